from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fuseplan
from carets import above_carets
from fuseplan.errors import FuseplanError, PlanError
from fuseplan.language.dtypes import DTYPES
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from strategies import tensors


def test_an_image_in_either_layout() -> None:
    plain = TensorSpec((2, 3, 4, 5))
    assert (plain.layout, plain.element_strides, plain.is_channels_last) == ("nchw", (60, 20, 5, 1), False)
    last = TensorSpec((2, 3, 4, 5), "f16", "nhwc")
    assert (last.strides, last.element_strides, last.is_channels_last) == (None, (60, 1, 15, 3), True)
    assert (last.rank, last.batch, last.channels, last.spatial) == (4, 2, 3, (4, 5))
    assert (last.size, last.itemsize, last.nbytes, last.compute_dtype) == (120, 2, 240, "f32")
    assert TensorSpec((2, 3), "f64").compute_dtype == "f64"


@pytest.mark.parametrize("layout", list(itertools.chain(*LAYOUTS.values())))
def test_strides_of_a_named_layout_become_it(layout: str) -> None:
    shape = (2, 3, 4, 5, 6)[: len(layout)]
    named = TensorSpec(shape, layout=layout)
    assert TensorSpec(shape, strides=named.element_strides) == named
    assert named.is_dense


@pytest.mark.parametrize("layout", list(itertools.chain(*LAYOUTS.values())))
def test_strides_are_numpys(layout: str) -> None:
    logical = "nc" + "dhw"[5 - len(layout) :]
    shape = (2, 3, 4, 5, 6)[: len(layout)]
    stored = np.zeros([shape[logical.index(axis)] for axis in layout], np.int8)
    viewed = stored.transpose([layout.index(axis) for axis in logical])
    assert TensorSpec(shape, layout=layout).element_strides == viewed.strides


def test_axes_of_size_one_take_any_stride() -> None:
    spec = TensorSpec((1, 3, 4, 1), layout="nhwc")
    assert spec.same_layout((99, 1, 3, 77))
    assert not spec.same_layout((99, 4, 1, 77))
    assert not spec.same_layout((1, 3))
    assert TensorSpec((1, 3, 4, 5), strides=(7, 20, 5, 1)).layout == "nchw"


def test_another_shape_of_a_tensor_has_a_named_layout() -> None:
    gaps = TensorSpec((2, 3, 4, 5), strides=(200, 1, 40, 8))
    assert (gaps.layout, gaps.is_dense, gaps.span, gaps.nbytes) == (None, False, 355, 480)
    assert str(gaps.with_shape((2, 6, 2, 2))) == "f32[2x6x2x2, nhwc]"
    turned = TensorSpec((2, 3, 4, 5), strides=(1, 2, 6, 24))
    assert turned.is_dense
    assert str(turned.with_shape((3, 2, 2, 2))) == "f32[3x2x2x2]"
    assert str(TensorSpec((2, 3, 4, 5), layout="nhwc").with_shape((1, 1, 1, 1))) == "f32[1x1x1x1, nhwc]"


@given(tensors(dtypes=tuple(DTYPES)))
def test_text_goes_both_ways(spec: TensorSpec) -> None:
    assert TensorSpec.parse(str(spec)) == spec
    assert hash(TensorSpec.parse(str(spec))) == hash(spec)


@given(tensors(dtypes=tuple(DTYPES)))
def test_elements_have_places_of_their_own(spec: TensorSpec) -> None:
    indices = np.indices(spec.shape).reshape(spec.rank, -1)
    places = np.tensordot(spec.element_strides, indices, axes=1)
    assert len(set(places.tolist())) == spec.size
    assert places.max() + 1 == spec.span
    assert spec.is_dense == (spec.span == spec.size)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("f32[2x3x4x5, nchw]", "f32[2x3x4x5]"),
        ("  bf16 [ 2x 3 x4 ,nwc ] ", "bf16[2x3x4, nwc]"),
        ("f32[2x3x4x5, strides=60:1:15:3]", "f32[2x3x4x5, nhwc]"),
        ("f64[2x3, strides = 1 : 2]", "f64[2x3, strides=1:2]"),
    ],
)
def test_other_spellings(text: str, canonical: str) -> None:
    assert str(TensorSpec.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "carets", "says"),
    [
        ("f17[2x3]", "f17", "Did you mean `f16`?"),
        ("f32[1x2x3x4x5x6]", "1x2x3x4x5x6", "at most 5 axes"),
        ("f32[2x0]", "2x0", "positive integer"),
        ("f32[2x0x4x5, nhwc]", "2x0x4x5", "positive integer"),
        ("f32[2x-3]", "-3", "'-3' is not a size"),
        ("f32[2x3x]", "]", "'' is not a size"),
        ("f32[2x٣]", "٣", "is not a size"),
        ("f32[2x3x4x5, nwc]", "nwc", "want nchw or nhwc"),
        ("f32[2x3, strides=1:1]", "strides=1:1", "must not share storage"),
        ("f32[2x3, strides=0:1]", "strides=0:1", "positive integer"),
        ("f32[2x3, strides=3:k]", "k", "'k' is not a size"),
        ("f32[2x3, strides=1]", "strides=1", "1 stride; want 2"),
        ("f32[2x3", "f32[2x3", "this is not a tensor"),
        ("", "", "this is not a tensor"),
        ("f32[4294967296x4294967296]", "4294967296x4294967296", "larger than memory"),
        ("f32[2x3, strides=9999999999999999999:1]", "strides=9999999999999999999:1", "larger than memory"),
        (f"f32[2x{'9' * 500}]", "9" * 500, "is not a size"),
    ],
)
def test_texts_that_are_no_tensor(text: str, carets: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        TensorSpec.parse(text)
    assert says in str(caught.value)
    assert above_carets(caught.value) == carets


def test_what_is_no_text_is_no_tensor() -> None:
    wrong: Any = (2, 3)
    with pytest.raises(PlanError, match="a tensor is read from its text"):
        TensorSpec.parse(wrong)


@given(st.text(alphabet="f3216b[]x, nchw=:strde0159\n-", max_size=40))
def test_any_text_is_a_tensor_or_a_plan_error(text: str) -> None:
    try:
        spec = TensorSpec.parse(text)
    except PlanError:
        return
    assert TensorSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (2, True)},
        {"shape": (2, 3.0)},
        {"shape": "23"},
        {"shape": 4},
        {"shape": None},
        {"shape": (2, None)},
        {"shape": (2, 3), "dtype": "f8"},
        {"shape": (2, 3), "dtype": "i7"},
        {"shape": (2, 3), "dtype": ["f32"]},
        {"shape": (2, 3), "layout": "nchw"},
        {"shape": (2, 3), "layout": 5},
        {"shape": (2, 3), "layout": "nc", "strides": (3, 1)},
        {"shape": (2, 3), "strides": (-3, 1)},
        {"shape": (2, 3), "strides": (1, 1)},
        {"shape": (2, 3), "strides": 3},
        {"shape": (2**31, 2**31), "dtype": "bf16"},
    ],
)
def test_what_no_tensor_can_have_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(FuseplanError):
        TensorSpec(**arguments)


def test_the_largest_tensor_fits_exactly() -> None:
    assert TensorSpec((2**31 - 1, 2**31), "bf16").nbytes < 2**63


def test_numpys_integers_are_integers() -> None:
    shape: Any = (np.int64(2), np.int32(3))
    assert repr(TensorSpec(shape).shape) == "(2, 3)"


# ---- other packages' dtypes and tensors


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "f64"),
        (torch.float32, "f32"),
        (torch.bfloat16, "bf16"),
        (np.float16, "f16"),
        (np.dtype("float32"), "f32"),
        (ml_dtypes.bfloat16, "bf16"),
        (SimpleNamespace(dtype=np.dtype("float32")), "f32"),  # as jax.numpy.float32 is
    ],
)
def test_a_dtype_may_be_another_packages(dtype: object, name: str) -> None:
    assert TensorSpec((2, 3), dtype) == TensorSpec((2, 3), name)


@pytest.mark.parametrize("dtype", [None, float, int, 4, np.uint32, np.uint16, torch.uint32, np.dtype(">f4")])
def test_what_is_no_dtype_of_a_plan_is_refused(dtype: object) -> None:
    with pytest.raises(PlanError, match="there is no dtype") as refused:
        TensorSpec((2, 3), dtype)
    assert "want f64 f32 f16 bf16" in str(refused.value)


def test_a_tensor_is_described_where_it_lies() -> None:
    image = torch.zeros(2, 3, 4, 5, dtype=torch.float16)
    for tensor, text in (
        (image, "f16[2x3x4x5]"),
        (image.to(memory_format=torch.channels_last), "f16[2x3x4x5, nhwc]"),
        (image.to("meta"), "f16[2x3x4x5]"),
        (image[:, :2], "f16[2x2x4x5, strides=60:20:5:1]"),
        (np.zeros((2, 4, 5, 3), np.float32).transpose(0, 3, 1, 2), "f32[2x3x4x5, nhwc]"),
        (np.zeros((4, 6))[:, ::2], "f64[4x3, strides=6:2]"),
        (np.zeros((2, 3), np.uint16), "bf16[2x3]"),
        (np.zeros((2, 3), ml_dtypes.bfloat16), "bf16[2x3]"),
        (np.zeros((2, 3), np.uint8), "u8[2x3]"),
        (np.zeros((2, 3), ml_dtypes.float8_e5m2), "f8e5m2[2x3]"),
        (torch.zeros(2, 3, dtype=torch.bool), "bool[2x3]"),
        (SimpleNamespace(shape=(2, 3), dtype=np.dtype("float32")), "f32[2x3]"),
    ):
        assert str(TensorSpec.like(tensor)) == text
    compiled = fuseplan.compile(fuseplan.FusionPlan(TensorSpec.like(image[:, :2]), fuseplan.Relu()))
    assert compiled(image[:, :2]).shape == (2, 2, 4, 5)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ([1.0], "this is not a tensor"),
        (np.zeros((2, 3), np.uint32), "there is no dtype"),
        (np.zeros((1,) * 6), "at most 5 axes"),
        (torch.zeros(1, 3).expand(4, 3), "a stride must be a positive integer"),
        (np.zeros((2, 3))[:, ::-1], "a stride must be a positive integer"),
        (np.zeros(3, "f4, i1")["f0"][None], "strides are whole elements"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_tensor_that_no_plan_takes_is_not_described(tensor: object, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        TensorSpec.like(tensor)

"""The table of dtypes against NumPy, torch, ml_dtypes, ONNX and DLPack; each dtype in NumPy's arrays."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

import fuseplan
from every_number import every_code, exact_codes, floats
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.language.dtypes import DTYPES, DType, narrow, widen
from fuseplan.language.tensor import TensorSpec
from fuseplan.tensors.arrays import empty, view

ROWS = pytest.mark.parametrize("row", DTYPES.values(), ids=lambda row: row.name)
Array = NDArray[Any]


@ROWS
def test_a_row_is_what_other_packages_have(row: DType) -> None:
    theirs = getattr(torch, row.package)
    assert theirs.itemsize == row.itemsize == row.array.itemsize
    if row.is_float:
        known = torch.finfo(theirs)
        assert (row.epsilon, row.largest) == (known.eps, known.max)
    elif row.name != "bool":
        known = torch.iinfo(theirs)
        assert (row.least, row.largest) == (known.min, known.max)
    made = np.dtype(getattr(ml_dtypes, row.package, row.numpy))
    assert onnx.helper.tensor_dtype_to_np_dtype(row.onnx) == made
    assert TensorSpec((2, 3), made).dtype == TensorSpec((2, 3), theirs).dtype == row.name
    if row.numpy != row.package:
        assert not hasattr(np, row.package)


@ROWS
def test_elements_of_other_packages_are_read_where_they_lie(row: DType) -> None:
    tensor = torch.zeros(2, 3, dtype=getattr(torch, row.package))
    array = empty(f"{row.name}[2x3]")
    assert array.dtype == np.dtype(getattr(ml_dtypes, row.package, row.numpy))
    for each in (tensor, array, array.view(row.array), Exported(tensor)):
        found = view(each, "src").read_as(row.name)
        assert (found.dtype, found.shape, found.strides) == (row.name, (2, 3), (3, 1))


class Exported:
    """A tensor that is known by DLPack alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **given: Any) -> Any:
        return self.tensor.__dlpack__(**given)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


@ROWS
def test_every_element_is_widened_exactly(row: DType) -> None:
    codes = every_code(row)
    bits = codes.view({1: np.uint8, 2: np.int16}.get(row.itemsize, codes.dtype))
    with np.errstate(invalid="ignore"):  # of NaN that signal
        want = torch.from_numpy(bits).view(getattr(torch, row.package)).double().numpy()
    np.testing.assert_array_equal(exact_codes(row), want)
    known = ~np.isnan(want)
    np.testing.assert_array_equal(narrow(want[known], row.name), codes[known])


@ROWS
def test_numbers_are_rounded_as_torch_rounds_them(row: DType) -> None:
    """f8e4m3 saturates in PyTorch 2.13; ml_dtypes makes NaN of what is too large."""
    x = floats(row)
    if not row.is_float and row.name != "bool":
        x = x[(row.least <= x) & (x <= row.largest)]  # the others, PyTorch does not define
    if row.itemsize < 4 and row.is_float:
        x = x[~is_rounded_twice(x)]
    want = torch.from_numpy(x).to(getattr(torch, row.package))
    got = widen(narrow(x, row.name), row.name).astype(np.float64)
    np.testing.assert_array_equal(got, want.double().numpy())
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(want.double().numpy()[got == 0]))


def is_rounded_twice(x: Array) -> Array:
    """Where torch rounds float64 to float32 first, which may make a tie."""
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(np.float32).astype(np.float64) != x) & ~np.isnan(x)


@pytest.mark.parametrize("name", ["bf16", "f8e4m3", "f8e5m2"])
def test_a_double_is_rounded_once(name: str) -> None:
    row = DTYPES[name]
    codes = exact_codes(row)
    known = np.unique(codes[np.isfinite(codes)])
    middle = (known[1:] + known[:-1]) / 2
    for near, away in ((known[:-1], -1e-9), (known[1:], 1e-9)):
        beside = middle + away * (known[1:] - known[:-1])
        np.testing.assert_array_equal(widen(narrow(beside, name), name), near)


@pytest.mark.parametrize("name", ["i8", "u8", "i16", "i32"])
def test_integers_saturate_and_nan_is_zero(name: str) -> None:
    most, least = int(DTYPES[name].largest), int(DTYPES[name].least)
    got = narrow(np.array([math.nan, math.inf, -math.inf, most + 0.9, 1e30, -1e30, 2.9, -2.9]), name)
    assert got.tolist() == [0, most, least, most, most, least, 2, max(least, -2)]


def test_bits_of_one_byte_are_of_the_fp8_that_the_plan_has() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    for name in ("f8e4m3", "f8e5m2"):
        made = fuseplan.compile(f"{name}[2x128] -> cast(f32)", "reference")(codes)
        np.testing.assert_array_equal(made, widen(codes, name))
        saved = np.zeros_like(codes)
        fuseplan.compile(f"{name}[2x128] -> relu -> save(before)")(codes, before=saved)
        positive = np.maximum(widen(codes, name), 0)
        np.testing.assert_array_equal(widen(saved, name), positive)
    with pytest.raises(ArgumentError, match=r"got u8\[2x128\]; want i8\[2x128\]"):
        fuseplan.compile("i8[2x128] -> cast(f32)", "reference")(codes)


@pytest.mark.parametrize("word", ["float8_e4m3fn", "fp8", "int8", "torch.int32", "boolean"])
def test_names_of_other_libraries_have_an_answer(word: str) -> None:
    with pytest.raises(PlanError, match="there is no dtype") as refused:
        TensorSpec((2, 3), word)
    assert any(name in str(refused.value.remedy) for name in DTYPES)

"""Convolutions against torch in float64: every attribute, one to three axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.conv import CONVOLUTIONS, Conv, Conv1d, Conv2d, Conv3d
from fuseplan.plans.plan import FusionPlan
from strategies import convolutions, random_operands, random_src, tensors

torch.set_num_threads(1)  # threads cost more than they give on tensors this small

SAMPLES = [FusionPlan(tensor, op) for kind in CONVOLUTIONS for tensor, op in kind.samples()]


def theirs(op: Conv, src: Any, weight: Any) -> Any:
    """torch's convolution of a src padded beforehand, since torch knows no asymmetric padding."""
    window = op.window(TensorSpec(src.shape))
    reversed_pairs = [side for pair in reversed(window.padding) for side in pair]
    padded = F.pad(torch.from_numpy(src), reversed_pairs)
    function = (F.conv1d, F.conv2d, F.conv3d)[op.axes - 1]
    made = function(
        padded, torch.from_numpy(weight), stride=window.stride, dilation=window.dilation, groups=op.groups
    )
    return made.numpy()


def compare(plan: FusionPlan) -> None:
    rng = np.random.default_rng(3)
    src, operands = random_src(plan, rng), random_operands(plan, rng)
    op = plan[0].op
    assert isinstance(op, Conv)
    result = plan.reference(src, operands)
    assert result.shape == plan.output.shape
    np.testing.assert_allclose(result, theirs(op, src, operands["weight"]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("plan", SAMPLES, ids=str)
def test_samples_are_torchs(plan: FusionPlan) -> None:
    compare(plan)


@given(st.data())
def test_any_convolution_is_torchs(data: st.DataObject) -> None:
    src = data.draw(tensors(ranks=(3, 4, 5)))
    compare(FusionPlan(src, data.draw(convolutions(src))))


@given(
    extent=st.integers(1, 20), kernel=st.integers(1, 6), stride=st.integers(1, 4), dilation=st.integers(1, 3)
)
def test_same_keeps_the_extent_over_the_stride_and_puts_the_odd_element_high(
    extent: int, kernel: int, stride: int, dilation: int
) -> None:
    window = Conv1d(1, kernel, stride=stride, padding="same", dilation=dilation).window(
        TensorSpec((1, 1, extent))
    )
    ((low, high),) = window.padding
    assert window.dst == (math.ceil(extent / stride),)
    assert high - low in (0, 1)
    reach = (window.dst[0] - 1) * stride + dilation * (kernel - 1) + 1
    assert low + high == max(0, reach - extent), "no more padding than is needed"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_same_with_stride_1_is_torchs_own(kernel: int) -> None:
    rng = np.random.default_rng(5)
    src, weight = rng.standard_normal((2, 3, 9)), rng.standard_normal((4, 3, kernel))
    expected = F.conv1d(torch.from_numpy(src), torch.from_numpy(weight), padding="same").numpy()
    found = Conv1d(4, kernel, padding="same").reference(src, {"weight": weight}, {})
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_one_meaning_has_one_form() -> None:
    assert Conv2d(8, (3, 3), stride=(1, 1), padding=((1, 1), (1, 1)), dilation=(1, 1)) == Conv2d(
        8, 3, padding=1
    )
    assert Conv2d(8, [3, 5], padding=[1, 2]) == Conv2d(8, (3, 5), padding=((1, 1), (2, 2)))  # type: ignore[arg-type]
    assert Conv2d(8, 3, padding="valid") == Conv2d(8, 3)
    assert Conv2d(8, np.int64(3)) == Conv2d(8, 3)  # type: ignore[arg-type]
    assert Conv2d(8, 3, padding=(1, (0, 2))).padding == ((1, 1), (0, 2))
    assert len({Conv2d(8, 3, padding=(1, 1)), Conv2d(8, 3, padding=1)}) == 1


def test_weights_have_the_dtype_of_src() -> None:
    (weight,) = Conv2d(6, (3, 5), groups=2).operands(TensorSpec((2, 4, 9, 9), "bf16", "nhwc"))
    assert (weight.name, weight.shape, weight.dtype, weight.per) == ("weight", (6, 2, 3, 5), "bf16", "weight")


def test_the_output_keeps_dtype_and_order_of_axes() -> None:
    assert (
        str(Conv2d(6, 3, stride=2).output(TensorSpec((2, 4, 9, 8), "bf16", "nhwc"))) == "bf16[2x6x4x3, nhwc]"
    )
    gaps = TensorSpec((2, 4, 9, 9), strides=(1000, 1, 90, 9))
    assert str(Conv2d(6, 3).output(gaps)) == "f32[2x6x7x7, nhwc]"


@pytest.mark.parametrize("kind", [Conv1d, Conv2d, Conv3d])
@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_another_rank_is_refused(kind: Any, rank: int) -> None:
    src = TensorSpec((1, 2, 9, 9, 9)[:rank])
    if rank == kind.axes + 2:
        assert kind(3, kernel=1).output(src).channels == 3
        return
    with pytest.raises(PlanError, match=f"got .*which has {rank - 2}; want rank {kind.axes + 2}"):
        kind(3, kernel=1).output(src)


@pytest.mark.parametrize(
    ("attributes", "field"),
    [
        ({"features": -1}, "features"),
        ({"features": 2**31}, "features"),
        ({"features": None}, "features"),
        ({"kernel": (3,)}, "kernel"),
        ({"kernel": (3, 0)}, "kernel"),
        ({"kernel": "3"}, "kernel"),
        ({"kernel": math.nan}, "kernel"),
        ({"stride": 0}, "stride"),
        ({"stride": (1, True)}, "stride"),
        ({"dilation": 0}, "dilation"),
        ({"groups": 0}, "groups"),
        ({"groups": 3}, "groups"),
        ({"padding": -1}, "padding"),
        ({"padding": (1, 2, 3)}, "padding"),
        ({"padding": ((1, 2, 3), 1)}, "padding"),
        ({"padding": 1.0}, "padding"),
        ({"padding": "SAME"}, "padding"),
        ({"padding": None}, "padding"),
        ({"padding": True}, "padding"),
    ],
)
def test_what_no_convolution_can_have_is_refused_by_field(attributes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        Conv2d(**({"features": 4, "kernel": 3} | attributes))
    assert caught.value.field == field


def test_nan_and_infinity_reach_the_outputs_that_read_them() -> None:
    src = np.ones((1, 1, 6))
    src[0, 0, 2] = math.nan
    src[0, 0, 5] = math.inf
    result = Conv1d(1, 2).reference(src, {"weight": np.ones((1, 1, 2))}, {})
    np.testing.assert_array_equal(result, [[[2, math.nan, math.nan, 2, math.inf]]])


def test_zero_times_infinity_is_nan_even_in_a_product_of_single_elements() -> None:
    src = np.array([[[1.0, math.inf, -math.inf]]])
    result = Conv1d(1, 1).reference(src, {"weight": np.zeros((1, 1, 1))}, {})
    np.testing.assert_array_equal(result, [[[0, math.nan, math.nan]]])

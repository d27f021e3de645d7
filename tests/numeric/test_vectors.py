"""Tensors of one axis: their elements are channels, which operands, parts and saved values follow."""

import numpy as np
import pytest

import fuseplan
from closeness import assert_close
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.errors import PlanError
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

CHAINS = (
    "bias",
    "relu -> scale",
    "bias -> linear(13) -> bias -> gelu",
    "matmul(5) -> scale",
    "bias -> glu -> scale",
    "glu_backward",
    "bias -> save(kept) -> softmax -> scale",
    "bias -> layer_norm",
    'elementwise("x + index()") -> bias',
)


@pytest.mark.parametrize("chain", CHAINS)
def test_vectors_are_channels(chain: str) -> None:
    plan = FusionPlan.parse(f"f32[10] -> {chain}")
    assert_close(fuseplan.compile(plan), random_arrays(plan), slack=32)


@pytest.mark.parametrize("chain", ["bias", "relu -> scale", "bias -> glu -> scale"])
def test_vectors_on_gpus(chain: str) -> None:
    assert_interpreted(f"f32[10] -> {chain}", GpuPointwise, slack=80)


def test_the_meaning_of_a_vector() -> None:
    src, weight, bias = np.arange(3.0), np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])
    plan = FusionPlan.parse("f64[3] -> linear(2) -> bias")
    given = {"weight": weight, "bias": bias}
    np.testing.assert_array_equal(plan.reference(src, given), weight @ src + bias)
    np.testing.assert_array_equal(fuseplan.compile(plan)(src, **given), weight @ src + bias)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[8] -> rotary", "rotary reads positions"),
        ("f32[2x3] -> amin -> within(7)", "within takes a tensor in a named layout"),
        ("f32[2x3x5x28] -> rotary(6) -> softmax(hw)", r"are not axes of src(?s:.*)\^{11}(?s:.*)bhsc"),
    ],
)
def test_axes_that_a_tensor_lacks(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)

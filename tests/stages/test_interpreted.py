"""The interpreting process: it computes what the reference does, and sees what must not be done."""

import numpy as np
import pytest

from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret
from toy_templates import ToyProduct, ToyScale, ToySteps

H100 = Target("triton", "sm_90", l1_bytes=227 * 1024, processors=132, warp=32)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_elements_by_pointers(dtype: str) -> None:
    assert_interpreted(f"{dtype}[7x19] -> scale", ToyScale, H100)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_products_by_tensor_maps(dtype: str) -> None:
    assert_interpreted(f"{dtype}[2x40x5x7, nhwc] -> conv2d(24, kernel=1)", ToyProduct, H100, slack=64)


def error_of(precision: str) -> float:
    plan = FusionPlan.parse("f32[1x256x4x8, nhwc] -> conv2d(32, kernel=1)")
    kernel, arrays = lower(match(plan)), random_arrays(plan, 2)
    got = interpret(ToyProduct(precision=precision), kernel, H100, arrays)
    want = reference(plan, arrays)
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_tf32_loses_what_the_hardware_loses() -> None:
    once, thrice, exact = (error_of(word) for word in ("tf32", "tf32x3", "ieee"))
    assert 1e-4 < once < 1e-2
    assert max(thrice, exact) < 3e-6


def test_a_map_with_steps_takes_every_second() -> None:
    plan = FusionPlan.parse("f16[2x16x7x8, nhwc] -> conv2d(16, kernel=1, stride=2)")
    kernel, arrays = lower(match(plan)), random_arrays(plan, 3)
    got = interpret(ToySteps(), kernel, H100, arrays)
    assert np.array_equal(wide(got), wide(arrays["src"])[:, :, ::2, ::2])


def test_what_a_masked_load_leaves_open_is_nan() -> None:
    plan = FusionPlan.parse("f32[3x5] -> scale")
    kernel, arrays = lower(match(plan)), random_arrays(plan, 4)
    body = "x * tl.load(op_scale + at % 5, mask=at % 5 > 0)"
    got = interpret(ToyScale(body), kernel, H100, arrays)
    assert np.isnan(got[:, 0]).all()
    assert np.isfinite(got[:, 1:]).all()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x + tl.load(src + at + 1)", "elements read outside of the kernel's memory"),
        ("x + tl.store(op_scale + at % 5, x)", "elements written outside of the kernel's memory"),
        ("x + nothing", "nothing"),
    ],
)
def test_errors_tell_the_line(body: str, said: str) -> None:
    plan = FusionPlan.parse("f32[3x5] -> scale")
    with pytest.raises(AssertionError, match=said):
        interpret(ToyScale(body), lower(match(plan)), H100, random_arrays(plan, 5))

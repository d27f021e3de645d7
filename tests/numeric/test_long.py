"""Plans with many operators: their stages are one function, which every vector calls."""

import re

import pytest

from closeness import assert_close
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan

# All kinds of operands and a parameter, and more functions than are written out for each vector.
LONG = (
    "bias -> add -> silu -> batch_norm(per_activation) -> leaky_relu(0.3) -> scale -> sigmoid -> add -> "
    "batch_norm -> gelu(tanh) -> prelu -> silu"
)


@pytest.mark.parametrize(
    "form",
    [
        "f32[2x13x9x11] -> conv2d(19, kernel=3, padding=1) -> {}",
        "f16[2x13x9x11, nhwc] -> conv2d(19, kernel=3, stride=2) -> {}",
        "f64[2x13x9x11] -> conv2d(19, kernel=1) -> {}",
        "f32[2x13x9x11] -> conv2d(13, kernel=3, padding=1, groups=13) -> {}",
        "f32[2x13x9x11, nhwc] -> conv2d(13, kernel=3, padding=1, groups=13) -> {}",
        "f16[2x13x9x11] -> {} -> conv2d(19, kernel=3, padding=1)",
        "f32[2x13x9x11] -> {} -> conv2d(13, kernel=3, padding=1, groups=13)",
        "f32[2x13x9x11, nhwc] -> {}",
        "f64[2x13x9x11] -> {}",
        "f32[9x7] -> matmul(19) -> {}",
        "f32[2x13x9x11] -> {} -> batch_norm_training(saved=False)",
        "f16[2x13x9x11] -> batch_norm_training(saved=False) -> {}",
        "f64[2x13x9x11, nhwc] -> batch_norm_training(saved=False) -> {}",
        "f32[9x13x3x5, nhwc] -> batch_norm_training(per_activation, saved=False) -> {}",
    ],
)
def test_a_long_plan_is_as_exact(form: str) -> None:
    plan = FusionPlan.parse(form.format(LONG))
    compiled = compile_plan(plan, "cpu", threads=1, cache=False)
    assert re.search(r"define internal void @stages\d", compiled.source.text)
    assert_close(compiled, random_arrays(plan, 1), slack=40)

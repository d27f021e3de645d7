"""Results in ranges of larger tensors, on every template that writes them, against float64."""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest

import fuseplan
from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import CPU
from fuseplan.compile import CompiledPlan
from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.data import random_arrays
from fuseplan.measure.spaces import empty
from fuseplan.plans.plan import FusionPlan

PLANS = (
    "f32[1x8x6x7, nhwc] -> conv2d(20, kernel=1) -> bias -> relu -> within(29)",
    "f32[2x8x9x7, nhwc] -> conv2d(19, kernel=3, padding=1) -> bias -> within(64)",
    "f32[2x8x9x7, nhwc] -> relu -> conv2d(20, kernel=5, padding=2) -> batch_norm -> within(23)",
    "f32[2x8x9x7, nhwc] -> conv2d(20, kernel=3, stride=2) -> within(33)",
    "bf16[2x20x9x7, nhwc] -> max_pool2d(3, stride=1, padding=1) -> within(36)",
    "f32[2x9x9x7, nhwc] -> conv2d(18, kernel=3, padding=1, groups=9) -> relu -> within(40)",
    "f64[2x8x11, nwc] -> conv1d(6, kernel=3) -> within(9)",
    "f32[1x4x6x7] -> conv2d(20, kernel=1) -> bias -> within(64)",
    "f32[3x5x16] -> linear(20) -> bias -> gelu -> within(64)",
    'f32[1x3x9x12] -> conv2d(20, kernel=7, stride=2, padding=3) -> bias -> relu -> within(20, layout="nhwc")',
    'f32[2x5x9x7] -> conv2d(19, kernel=3, padding=1) -> bias -> within(24, layout="nhwc")',
    'f32[2x9x9x7] -> conv2d(18, kernel=3, padding=1, groups=9) -> relu -> within(40, layout="nhwc")',
    'bf16[2x20x9x7] -> max_pool2d(3, stride=1, padding=1) -> within(20, layout="nhwc")',
    'f64[2x8x11] -> conv1d(6, kernel=3) -> within(9, layout="nwc")',
    "f16[5x16] -> linear(40) -> bias -> glu(silu) -> within(33)",
)
BEGIN = 3  # the first feature of the range


def check(compiled: CompiledPlan) -> None:
    """The range is right, and nothing around it is written."""
    plan = compiled.plan
    arrays = random_arrays(plan, 5)
    src, axis, shape = plan[-1].src, plan.output.channel_axis, list(plan.output.shape)
    shape[axis] = plan.ops[-1].features  # type: ignore[attr-defined]
    layout = plan.ops[-1].layout  # type: ignore[attr-defined]
    whole = empty(TensorSpec(shape, src.dtype, layout) if layout else src.with_shape(shape))
    whole[...] = 7
    begin = min(BEGIN, shape[axis] - src.channels)
    part = (slice(None),) * axis + (slice(begin, begin + src.channels),)
    want = empty(plan.output)
    want[...] = compiled(**arrays)
    compiled(**arrays, out=whole[part])
    np.testing.assert_array_equal(whole[part], want)
    whole[part] = 7
    assert (whole == 7).all()
    assert_close(compiled, arrays, slack=256)


@pytest.mark.parametrize(("text", "width"), list(zip(PLANS, cycle((64, 32, 16)), strict=False)), ids=str)
def test_every_template_of_the_cpu(text: str, width: int) -> None:
    plan, target = FusionPlan.parse(text), narrowed(width)
    kinds = [kind for kind in CPU.templates if kind.ranges or plan.output.layout]
    taken = [kind for kind in kinds if refusal_of(plan, kind, target) is None]
    assert taken
    for kind in taken:
        check(forced(plan, kind, target))
    check(fuseplan.compile(plan, "reference"))


def test_open_rows() -> None:
    compiled = fuseplan.compile("f32[*x16] -> linear(20) -> bias -> within(64)", threads=1)
    plan = FusionPlan.parse("f32[7x16] -> linear(20) -> bias -> within(64)")
    arrays = random_arrays(plan, 5)
    whole = np.full((7, 64), 7, np.float32)
    compiled(**arrays, out=whole[:, 40:60])
    np.testing.assert_allclose(whole[:, 40:60], plan.reference(arrays.pop("src"), arrays), atol=1e-5)
    assert (whole[:, :40] == 7).all()
    assert (whole[:, 60:] == 7).all()


def test_where_a_range_lies() -> None:
    plan = FusionPlan.parse("f32[2x8x6x5, nhwc] -> conv2d(16, kernel=1) -> within(64)")
    assert plan.output == TensorSpec((2, 16, 6, 5), strides=(1920, 1, 320, 64))
    one = FusionPlan.parse("f32[1x8x6x5] -> conv2d(16, kernel=1) -> within(64)")
    assert one.output.layout == "nchw"  # one image's channels lie side by side
    with pytest.raises(PlanError, match="features are fewer than src's"):
        FusionPlan.parse("f32[2x8x6x5] -> conv2d(16, kernel=1) -> within(15)")
    last = FusionPlan.parse('f32[2x8x6x5] -> conv2d(16, kernel=1) -> within(64, layout="nhwc")')
    assert last.output == plan.output
    for layout in ("nwc", "bhwc", "nhcc"):
        with pytest.raises(PlanError):
            FusionPlan.parse(f'f32[2x8x6x5] -> conv2d(16, kernel=1) -> within(64, layout="{layout}")')
    with pytest.raises(PlanError, match="layout has other axes than src"):
        FusionPlan.parse('f32[2x8x6] -> linear(16) -> within(64, layout="bsc")')
    with pytest.raises(PlanError, match="within takes a tensor in a named layout"):
        FusionPlan.parse("f32[2x8, strides=9:1] -> within(10)")

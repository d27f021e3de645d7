"""Pools on CPUs and in Triton's interpreter against float64: shapes, layouts, dtypes, borders."""

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.depthwise import Depthwise
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes
from fuseplan.backends.triton.templates.depthwise import GpuDepthwise
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays
from fuseplan.ops.pool import POOLS, Pool
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

LAST, FIRST = {3: "nwc", 4: "nhwc", 5: "ndhwc"}, {3: "ncw", 4: "nchw", 5: "ncdhw"}
TEMPLATES: dict[type[Template], dict[int, str]] = {Depthwise: LAST, DepthwisePlanes: FIRST}
BOTH = pytest.mark.parametrize("kind", list(TEMPLATES), ids=lambda kind: kind.name)
MEANS = "count_include_pad=False"

SHAPES = (
    ("2x19x9x11", "max_pool2d(3, stride=2, padding=1)"),
    ("1x7x40x37", "max_pool2d(3, stride=2, ceil_mode=True)"),
    ("1x20x14x14", "max_pool2d(5, stride=1, padding=2)"),
    ("1x5x21x30", "max_pool2d((2, 3), stride=(1, 2), padding=((0, 1), (2, 0)), dilation=(2, 3))"),
    ("1x3x20x100", "max_pool2d((1, 70), stride=1, padding=(0, 30))"),
    ("2x5x7x35", "max_pool2d((3, 50), stride=1, padding=(1, 48))"),
    ("2x9x12x13", "avg_pool2d(3, stride=1, padding=1)"),
    ("1x9x35x35", f"avg_pool2d(3, stride=1, padding=1, {MEANS})"),
    ("1x4x10x23", f"avg_pool2d(3, stride=2, padding=1, ceil_mode=True, {MEANS})"),
    ("1x4x10x23", "avg_pool2d(3, stride=2, padding=1, ceil_mode=True)"),
    ("1x6x9x10", f"avg_pool2d((3, 2), stride=1, padding=((2, 0), (0, 1)), dilation=(2, 3), {MEANS})"),
    ("2x3x40", f"avg_pool1d(7, stride=3, padding=3, {MEANS})"),
    ("1x5x4x6x17", f"avg_pool3d(3, stride=2, padding=1, {MEANS})"),
    ("2x3x5x6x7", "max_pool3d(3, stride=2, padding=1)"),
)


def plan_of(kind: type[Template], shape: str, pool: str, *, dtype: str = "f32", head: str = "") -> FusionPlan:
    return FusionPlan.parse(f"{dtype}[{shape}, {TEMPLATES[kind][shape.count('x') + 1]}] -> {head}{pool}")


@pytest.mark.part(6)
@BOTH
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("shape", "pool"), SHAPES)
def test_shapes(kind: type[Template], shape: str, pool: str, width: int) -> None:
    plan = plan_of(kind, shape, pool)
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 1))


@pytest.mark.part(3)
@BOTH
@pytest.mark.parametrize("dtype", ["f16", "f64"])
@pytest.mark.parametrize("head", ["", "sigmoid -> ", "add -> gelu -> "])
@pytest.mark.parametrize("pool", ["max_pool2d(3, stride=2, padding=1)", f"avg_pool2d(3, padding=1, {MEANS})"])
def test_dtypes_and_operators_before_and_after(
    kind: type[Template], dtype: str, head: str, pool: str
) -> None:
    plan = plan_of(kind, "1x11x9x20", f"{pool} -> bias -> add -> relu", dtype=dtype, head=head)
    assert_close(forced(plan, kind, narrowed(32, 2)), random_arrays(plan, 2))


@BOTH
@pytest.mark.parametrize("pool", ["max_pool2d(3, stride=2, padding=1)", "avg_pool2d(2)"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_what_they_touch(kind: type[Template], pool: str, bad: float) -> None:
    plan = plan_of(kind, "1x6x20x40", pool)
    arrays = random_arrays(plan, 3)
    arrays["src"].flat[[0, arrays["src"].size // 2]] = bad
    assert_same_exceptions(forced(plan, kind, narrowed(32)), arrays)


@BOTH
def test_windows_of_padding_alone_are_minus_infinity(kind: type[Template]) -> None:
    plan = plan_of(kind, "2x5x7x9", "max_pool2d(3, stride=1, padding=(1, 60))")
    assert_same_exceptions(forced(plan, kind, narrowed(32)), random_arrays(plan, 5))


def test_one_channel_and_one_position() -> None:
    for text in ("f32[2x1x9x9] -> max_pool2d(3, padding=1)", "f32[2x5x3x3, nhwc] -> avg_pool2d(3)"):
        plan = FusionPlan.parse(text)
        kind = DepthwisePlanes if plan.src.layout == "nchw" else Depthwise
        assert_close(forced(plan, kind, narrowed(32)), random_arrays(plan, 4))


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", POOLS, ids=lambda kind: kind.name)
def test_a_gpu_computes_each_sample(kind: type[Pool]) -> None:
    for text, op in kind.samples():
        assert_interpreted(str(FusionPlan(text, op)), GpuDepthwise)


@pytest.mark.parametrize(
    ("pool", "dtype", "layout"), [(SHAPES[0][1], "f64", "nchw"), (SHAPES[8][1], "f16", "nhwc")]
)
def test_a_gpu_reads_other_dtypes_and_operators(pool: str, dtype: str, layout: str) -> None:
    text = f"{dtype}[1x5x7x9, {layout}] -> bias -> sigmoid -> {pool} -> scale -> add -> relu"
    assert_interpreted(text, GpuDepthwise)


@pytest.mark.parametrize("dtype", ["f8e4m3", "f8e5m2"])
@pytest.mark.parametrize("pool", ["max_pool2d(3, stride=2, padding=1)", "avg_pool2d(3, padding=1)"])
def test_padding_of_8_bits_is_no_zero_on_a_gpu(pool: str, dtype: str) -> None:
    """Windows that reach into padding have a negative maximum; those of padding alone stay infinite."""
    assert_interpreted(f"{dtype}[1x5x7x9, nhwc] -> {pool}", GpuDepthwise)
    assert_interpreted(
        f"{dtype}[1x3x5x7] -> max_pool2d(3, stride=1, padding=(1, 5)) -> sigmoid", GpuDepthwise
    )


@pytest.mark.parametrize(
    "text",
    [
        "f16[1x64x1, nwc] -> avg_pool1d(1, padding=((3, 0),), ceil_mode=True)",
        "f32[2x9x3, nwc] -> bias -> max_pool1d(2, padding=4) -> maximum",
        "f32[1x5x2x2] -> avg_pool2d(1, stride=2, padding=2, count_include_pad=False) -> relu",
        "f16[1x1x1x1x1, ndhwc] -> avg_pool3d(1, padding=((3, 0), (0, 1), (0, 3)), ceil_mode=True)",
    ],
)
def test_a_gpu_fills_windows_that_lie_in_the_padding(text: str) -> None:
    assert_interpreted(text, GpuDepthwise)

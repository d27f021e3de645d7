"""The depthwise templates against the float64 reference: shapes, layouts, dtypes, widths, knobs, borders."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.gather import Stretch
from fuseplan.backends.cpu.ir import Builder
from fuseplan.backends.cpu.ir_text import Module
from fuseplan.backends.cpu.templates.depthwise import Depthwise
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

LAST, FIRST = {3: "nwc", 4: "nhwc", 5: "ndhwc"}, {3: "ncw", 4: "nchw", 5: "ncdhw"}
TEMPLATES: dict[type[Template], dict[int, str]] = {Depthwise: LAST, DepthwisePlanes: FIRST}
BOTH = pytest.mark.parametrize("kind", list(TEMPLATES), ids=lambda kind: kind.name)
WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])

# Shape and convolution; groups are added, and features unless given.
SHAPES = (
    ("2x19x9x11", "kernel=3, padding=1"),
    ("1x16x14x14", "kernel=3, padding=1"),
    ("1x5x7x7", "kernel=3, padding=1"),
    ("1x33x7x7", "kernel=5, padding=2"),
    ("1x7x56x56", "kernel=3, padding=1"),
    ("1x3x112x112", "kernel=3, stride=2, padding=1"),
    ("1x20x28x28", "kernel=5, stride=2, padding=2"),
    ("1x6x14x14", "kernel=5, stride=2, padding=((1, 2), (2, 1))"),
    ("2x8x21x37", "kernel=(3, 5), stride=(2, 3), padding=(0, 2)"),
    ("1x4x23x50", "kernel=(5, 2), stride=(1, 4), padding=((0, 3), (1, 0))"),
    ("1x9x17x33", "kernel=3, dilation=2, padding=2"),
    ("1x8x10x40", "kernel=3, dilation=(4, 6), padding=(4, 6)"),
    ("1x4x6x5", "kernel=1"),
    ("1x4x6x5", "kernel=1, padding=2"),
    ("1x4x3x70", "kernel=1, stride=2"),
    ("1x40x5x1", "kernel=(3, 1), padding=(1, 0)"),
    ("1x40x1x90", "kernel=(1, 3), padding=(0, 1)"),
    ("1x7x31x2", "kernel=2"),
    ("1x12x7x7", "kernel=7"),
    ("1x3x20x30", "kernel=13, padding=6"),
    ("2x11x64", "kernel=31, padding=15"),
    ("2x17x50", "kernel=4, padding=((3, 0),)"),
    ("1x5x200", "kernel=70, padding=40"),
    ("2x5x7x9", "kernel=3, padding=(1, 60)"),
    ("1x5x6x40", "kernel=(2, 5), stride=(1, 2), dilation=(1, 30), padding=((0, 1), (120, 90))"),
    ("1x3x3x4x5", "kernel=3, padding=(1, 2, 45)"),
    ("1x5x7", "kernel=1, padding=50"),
    ("1x5x3", "kernel=2, stride=2"),
    ("1x6x5x9x12", "kernel=3, padding=1"),
    ("2x3x6x7x19", "kernel=(2, 3, 3), stride=(1, 2, 2), padding=((0, 1), (1, 1), (2, 0))"),
    ("1x4x5x8x9", "kernel=5, padding=2"),
)


def plan_of(
    kind: type[Template], shape: str, conv: str, tail: str = "", *, dtype: str = "f32", many: int = 1
) -> FusionPlan:
    extents = shape.split("x")
    layout, axes, channels = TEMPLATES[kind][len(extents)], len(extents) - 2, int(extents[1])
    text = f"conv{axes}d({channels * many}, {conv}, groups={channels}){tail}"
    return FusionPlan.parse(f"{dtype}[{shape}, {layout}] -> {text}")


@pytest.mark.part(6)
@BOTH
@WIDTHS
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_any_shape(kind: type[Template], width: int, shape: str, conv: str) -> None:
    plan = plan_of(kind, shape, conv, " -> bias -> relu")
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 1))


@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
@pytest.mark.part(3)
def test_error_stays_within_the_bound_that_is_claimed(kind: type[Template], shape: str, conv: str) -> None:
    plan = plan_of(kind, shape, conv)
    compiled = forced(plan, kind, narrowed(32))
    arrays = random_arrays(plan, 2)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    bound = compiled.choice.template.error_bound(compiled.kernel)
    assert (np.abs(got - want) <= bound * size).all()


@pytest.mark.part(6)
@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(
    ("shape", "conv"),
    [
        ("2x19x9x21", "kernel=3, padding=1"),
        ("1x20x28x28", "kernel=5, stride=2, padding=2"),
        ("1x5x7x7", "kernel=3, padding=1"),
        ("2x3x6x7x19", "kernel=3, stride=2, padding=1"),
        ("2x11x64", "kernel=31, padding=15"),
    ],
)
def test_any_dtype(kind: type[Template], dtype: str, width: int, shape: str, conv: str) -> None:
    plan = plan_of(kind, shape, conv, " -> bias -> add -> relu", dtype=dtype)
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 3))


AROUND = (
    ("relu", "bias -> silu"),
    ("batch_norm -> relu", "scale -> tanh"),
    ("gelu", "bias -> silu"),
    ("add -> relu", "batch_norm(per_activation) -> add -> prelu"),
    ("batch_norm(per_activation) -> silu", "bias -> relu"),
    ("prelu -> bias", "add -> gelu"),
)


@BOTH
@pytest.mark.parametrize(("before", "after"), AROUND)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.part(2)
def test_operators_before_and_after(kind: type[Template], before: str, after: str, dtype: str) -> None:
    plan = FusionPlan.parse(
        f"{dtype}[2x13x10x23, {TEMPLATES[kind][4]}] -> {before} -> "
        f"conv2d(13, kernel=3, stride=(1, 2), padding=1, groups=13) -> {after}"
    )
    assert_close(forced(plan, kind, narrowed(32)), random_arrays(plan, 4), slack=40)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize("many", [2, 3, 8])
@pytest.mark.parametrize("width", [16, 64])
def test_several_features_a_channel(kind: type[Template], many: int, width: int) -> None:
    plan = plan_of(kind, "2x19x6x9", "kernel=3, padding=1", " -> relu -> bias", many=many)
    assert_close(forced(plan, kind, narrowed(width)), random_arrays(plan, 5))


@BOTH
@pytest.mark.parametrize("before", ["", "relu -> "])
@pytest.mark.parametrize("strides", ["7000:1:700:20", "9000:1000:30:1", "9000:3:900:60", "9000:1000:30:2"])
def test_strided_src(kind: type[Template], strides: str, before: str) -> None:
    layout = "dense" if strides.split(":")[1] == "1" else "first"
    plan = FusionPlan.parse(
        f"f32[2x9x10x12, strides={strides}] -> {before}conv2d(9, kernel=3, padding=1, groups=9) -> bias"
    )
    if plan.output.is_channels_last != (kind is Depthwise):
        refusal = refusal_of(plan, kind, narrowed(32))
        assert refusal is not None, layout
        assert refusal.reason in (Reason.CHANNELS_FIRST, Reason.CHANNELS_LAST)
        return
    assert_close(forced(plan, kind, narrowed(32)), random_arrays(plan, 6))


@BOTH
@pytest.mark.parametrize(("shape", "conv"), [("1x37x19x23", "kernel=3, padding=1"), SHAPES[6], SHAPES[25]])
def test_every_candidate_and_other_knobs(kind: type[Template], shape: str, conv: str) -> None:
    plan = plan_of(kind, shape, conv, " -> bias")
    target, arrays = narrowed(32, threads=2), random_arrays(plan, 7)
    candidates = list(kind.candidates(lower(match(plan)), target, "default"))
    assert candidates
    odd: list[Template] = [Depthwise(2, 3, 2, 1), Depthwise(1, 1, 3, 2)]
    if kind is DepthwisePlanes:
        odd = [
            DepthwisePlanes(3, 2, 1, 2, 3),
            DepthwisePlanes(1, 1, 1, 1, 2),
            DepthwisePlanes(2, 3, 1, 7, 100),
        ]
    for template in [*candidates, *odd]:
        assert_close(forced(plan, kind, target, template), arrays)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize("shape", ["1x64x14x14", "3x40x7x7", "1x24x60x60"])
@pytest.mark.parametrize("threads", [2, 5, 16])
def test_any_number_of_threads(kind: type[Template], shape: str, threads: int) -> None:
    plan = plan_of(kind, shape, "kernel=3, padding=1", " -> bias -> relu")
    arrays = random_arrays(plan, 8)
    alone = forced(plan, kind, narrowed(64))(**arrays)
    compiled = forced(plan, kind, narrowed(64, threads))
    for _ in range(20):
        np.testing.assert_array_equal(compiled(**arrays), alone)


@BOTH
@pytest.mark.parametrize("shape", ["1x6x7x7", "1x6x30x40", "2x20x20"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_what_they_touch(kind: type[Template], shape: str, bad: float) -> None:
    plan = plan_of(kind, shape, "kernel=3, padding=1")
    compiled = forced(plan, kind, narrowed(32))
    for key in ("src", "weight"):
        arrays = random_arrays(plan, 9)
        arrays[key].flat[arrays[key].size // 2] = bad
        assert_same_exceptions(compiled, arrays)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_nothing_outside_dst_is_written_nor_outside_src_read(
    kind: type[Template], shape: str, conv: str, guarded: Any
) -> None:
    plan = plan_of(kind, shape, conv, " -> bias")
    arrays = random_arrays(plan, 10)
    compiled = forced(plan, kind, narrowed(64))
    want = compiled(**arrays)
    src, dst = guarded(plan.src), guarded(plan.output)
    src[...] = arrays.pop("src")
    np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


@pytest.mark.parametrize(
    ("kind", "plan", "reason"),
    [
        (Depthwise, "f32[1x8x6x6, nhwc] -> relu", Reason.NO_CONTRACTION),
        (Depthwise, "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, groups=4)", Reason.NOT_DEPTHWISE),
        (Depthwise, "f32[1x2x6x6, nhwc] -> conv2d(18, kernel=3, groups=2)", Reason.CHANNEL_MULTIPLIER),
        (Depthwise, "f32[1x8x6x6] -> conv2d(8, kernel=3, groups=8)", Reason.CHANNELS_FIRST),
        (DepthwisePlanes, "f32[1x8x6x6] -> relu", Reason.NO_CONTRACTION),
        (DepthwisePlanes, "f32[1x8x6x6] -> conv2d(8, kernel=3)", Reason.NOT_DEPTHWISE),
        (DepthwisePlanes, "f32[1x8x6x6, nhwc] -> conv2d(8, kernel=3, groups=8)", Reason.CHANNELS_LAST),
    ],
)
def test_refusals(kind: type[Template], plan: str, reason: Reason) -> None:
    refusal = refusal_of(plan, kind, narrowed(32))
    assert refusal is not None
    assert refusal.reason is reason


def test_lines_under_a_task_stay_in_the_second_cache_for_the_next_block_of_channels() -> None:
    """Tasks of 42 rows of wide lines took 1.5 times as long; narrow ones are not cut."""
    target = replace(narrowed(64), l2_bytes=1 << 20)

    def lines(tensor: str) -> list[int]:
        kernel = lower(match(FusionPlan.parse(f"f32[{tensor}, nhwc] -> avg_pool2d(2)")))
        made = Depthwise.candidates(kernel, target, "default")
        return [each.block_rows // each.rows for each in made if isinstance(each, Depthwise)]

    assert max(lines("1x544x85x85")) == 1
    assert min(lines("1x16x85x85")) > 1


def test_a_stretch_is_loaded_once_and_never_left() -> None:
    b = Builder(Module(), "f", [("ptr", "src")], lanes=8)
    src = Stretch(b, b.parameters[0], 0, 20)
    shifted = src.vector([None, *range(7)])
    assert src.vector([None, *range(7)]) is shifted
    src.vector(range(8))
    src.vector([*range(14, 20), None, None])
    src.vector(range(0, 16, 2))
    b.finish()
    text = b.module.text()
    # 0..7, 8..15 and the last eight, 12..19
    assert text.count(" load <8 x float>") == 3
    assert "i64 12" in text
    assert not any(f"i64 {start}" in text for start in range(13, 30))

"""Pointwise kernels against the float64 reference: ranks, layouts, strides, dtypes, operands, knobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.language.layouts import LAYOUTS
from fuseplan.measure.data import random_arrays
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])

SHAPES = (
    "1x1",
    "4x100",
    "5x3",
    "1x1x1",
    "3x37x5",
    "2x8x300",
    "2x13x9x11",
    "1x64x12x12",
    "2x3x5x7",
    "7x40x2x2",
    "5x3x1x1",
    "1x1x33x3",
    "3x2100x3x1",
    "1x256x31x33",
    "2x6x3x5x7",
    "1x33x2x1x9",
)
TENSORS = [f"{shape}, {layout}" for shape in SHAPES for layout in LAYOUTS[shape.count("x") + 1]]

# Every way in which an operand may be indexed, and none.
CHAINS = (
    "relu",
    "batch_norm -> relu",
    "batch_norm(per_activation) -> gelu",
    "bias -> add -> silu",
    "scale -> prelu -> elu(1.5)",
    "add -> batch_norm -> add -> batch_norm(per_activation)",
    "elementwise('x * 2 + 1') -> leaky_relu(0.1)",
)

# nchw and nhwc with gaps, slices of every other element, orders of axes that have no name.
STRIDES = (
    "900:90:10:1",
    "700:1:70:7",
    "2000:2:200:20",
    "3000:300:30:2",
    "1:1000:100:10",
    "90:1:900:9",
    "10000:2:20:1000",
)


@WIDTHS
@pytest.mark.parametrize("tensor", TENSORS)
def test_any_shape_and_layout(width: int, tensor: str) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> batch_norm -> relu")
    assert_close(forced(plan, Pointwise, narrowed(width, threads=2)), random_arrays(plan, 1), slack=40)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("tensor", ["2x13x9x11", "2x13x9x11, nhwc", "3x8x16, nwc", "4x20", "7x1x3x3x3"])
@pytest.mark.part(2)
def test_any_chain_and_dtype(chain: str, dtype: str, tensor: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{tensor}] -> {chain}")
    assert_close(forced(plan, Pointwise, narrowed(32, threads=2)), random_arrays(plan, 2), slack=80)


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("chain", ["relu", "add -> batch_norm -> relu", "batch_norm(per_activation) -> bias"])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_strided_src(strides: str, chain: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[3x7x8x9, strides={strides}] -> {chain}")
    assert_close(forced(plan, Pointwise, narrowed(32)), random_arrays(plan, 3), slack=40)


@pytest.mark.part(4)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("tensor", ["3x20x9x11", "3x20x9x11, nhwc", "2x4x200", "64x5", "1x3x40x40, nhwc"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_candidate_and_other_knobs(chain: str, tensor: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{tensor}] -> {chain}")
    target, arrays = narrowed(32, threads=2), random_arrays(plan, 4)
    candidates = list(Pointwise.candidates(lower(match(plan)), target, "default"))
    assert candidates
    whole = plan.src.size
    odd = [
        Pointwise(4, 1, 1, whole, True),
        Pointwise(1, 1, 5, whole, False),
        Pointwise(2, 3, 2, whole, True),
        Pointwise(2, 1, 3, 48, True),
        Pointwise(2, 8, 1, 16, False),
        Pointwise(1, 8, 1, whole, False),
    ]
    for template in [*candidates, *odd]:
        assert_close(forced(plan, Pointwise, target, template), arrays, slack=80)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("ahead", [0, 1, 5, 16])
def test_stores_past_the_caches_from_any_address(layout: str, ahead: int) -> None:
    plan = FusionPlan.parse(f"f32[2x24x20x21, {layout}] -> batch_norm -> relu")
    arrays = random_arrays(plan, 5)
    want = forced(plan, Pointwise, narrowed(64))(**arrays)
    room = np.full(plan.output.size + 80, 7, np.float32)
    steps = [step * 4 for step in plan.output.element_strides]
    out = np.lib.stride_tricks.as_strided(room[ahead + 16 :], plan.output.shape, steps)
    forced(plan, Pointwise, narrowed(64), Pointwise(4, 8, 2, plan.src.size, True))(**arrays, out=out)
    np.testing.assert_array_equal(out, want)
    around = np.concatenate([room[: ahead + 16], room[ahead + 16 + plan.output.size :]])
    np.testing.assert_array_equal(around, 7)


@pytest.mark.parametrize("tensor", ["8x64x14x14", "1x2048x7x7, nhwc", "2x3x120x90", "40x1000"])
@pytest.mark.parametrize("threads", [2, 5, 16])
def test_any_number_of_threads(tensor: str, threads: int) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> batch_norm -> relu")
    arrays = random_arrays(plan, 6)
    alone = forced(plan, Pointwise, narrowed(64))(**arrays)
    compiled = forced(plan, Pointwise, narrowed(64, threads))
    for _ in range(20):
        np.testing.assert_array_equal(compiled(**arrays), alone)


def test_a_small_tensor_is_one_task_and_a_large_one_several_a_thread() -> None:
    def rows_of(tensor: str) -> tuple[int, Pointwise]:
        plan = FusionPlan.parse(f"f32[{tensor}] -> relu")
        chosen = next(iter(Pointwise.candidates(lower(match(plan)), narrowed(32, threads=16), "default")))
        assert isinstance(chosen, Pointwise)
        return plan.src.size, chosen

    size, small = rows_of("1x16x10x10")
    assert small.block_run == size
    size, large = rows_of("8x64x112x112")
    assert size / large.block_run >= 48


def test_streaming_is_for_what_no_cache_holds() -> None:
    target = narrowed(32, threads=2)

    def streams(tensor: str) -> list[bool]:
        kernel = lower(match(FusionPlan.parse(f"f32[{tensor}] -> batch_norm -> relu")))
        candidates = Pointwise.candidates(kernel, target, "default")
        return [each.stream for each in candidates if isinstance(each, Pointwise)]

    large = 3 * target.l3_bytes // (64 * 112 * 112 * 4)
    assert streams(f"{large}x64x112x112") == [True, False]
    assert streams(f"{large}x64x112x112, nhwc") == [True, False]
    assert streams("1x64x14x14") == [False]


def test_streaming_begins_where_the_last_cache_is_half_full() -> None:
    """A kernel's tensors share the last cache with what others left there."""
    target = narrowed(32)
    for chain, template in (("relu", Pointwise), ("layer_norm", Reduction)):
        kernels = [
            lower(match(FusionPlan.parse(f"f32[{percent * target.l3_bytes // 819200}x1024] -> {chain}")))
            for percent in (50, 75)
        ]
        few, many = (next(iter(template.candidates(each, target, "default"))) for each in kernels)
        assert (few.knobs["stream"], many.knobs["stream"]) == (False, True)


def test_rows_of_many_channels_are_whole_where_no_cache_holds_them() -> None:
    """Parts of 576 and 480 channels took 2.3 times as long."""
    target = replace(narrowed(64), l1_bytes=32 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20)

    def block(tensor: str) -> Any:
        kernel = lower(match(FusionPlan.parse(f"f32[{tensor}] -> batch_norm -> relu")))
        return next(iter(Pointwise.candidates(kernel, target, "default"))).knobs["block_run"]

    assert block("68x1056x16x7, nhwc") == 1056
    assert block("1x1056x16x7, nhwc") == 576


@pytest.mark.parametrize("tensor", ["2x13x5x7", "2x13x5x7, nhwc"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("chain", ["batch_norm -> relu", "bias -> add -> clamp(-1, max=1)", "silu", "prelu"])
def test_nan_and_infinity_reach_what_they_touch(tensor: str, bad: float, chain: str) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> {chain}")
    compiled = forced(plan, Pointwise, narrowed(32))
    for key in random_arrays(plan, 7):
        arrays = random_arrays(plan, 7)
        arrays[key].flat[arrays[key].size // 2] = bad
        assert_same_exceptions(compiled, arrays)


@WIDTHS
@pytest.mark.parametrize("tensor", TENSORS)
def test_nothing_outside_dst_is_written_nor_outside_src_read(width: int, tensor: str, guarded: Any) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> bias -> relu")
    arrays = random_arrays(plan, 8)
    compiled = forced(plan, Pointwise, narrowed(width))
    want = compiled(**arrays)
    src, dst = guarded(plan.src), guarded(plan.output)
    src[...] = arrays.pop("src")
    np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


def test_a_contraction_is_refused() -> None:
    refusal = refusal_of("f32[1x8x6x6] -> relu -> conv2d(8, kernel=1)", Pointwise, narrowed(32))
    assert refusal is not None
    assert refusal.reason is Reason.CENTRE_IN_POINTWISE
    assert refusal.operator == 1

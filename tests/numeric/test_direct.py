"""The direct convolution against the float64 reference: shapes, layouts, dtypes, widths, knobs, borders."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import dots, model, staging, toolchain
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.tiling import Tiling, tiling
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

LAYOUTS = {3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
BOTH = pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])

SHAPES = (
    ("2x5x9x11", "conv2d(7, kernel=3, padding=1)"),
    ("1x64x14x14", "conv2d(33, kernel=3, padding=1)"),
    ("1x3x30x30", "conv2d(64, kernel=7, stride=2, padding=3)"),
    ("2x17x7x7", "conv2d(49, kernel=1)"),
    ("1x16x10x12", "conv2d(20, kernel=1, stride=2)"),
    ("1x16x10x12", "conv2d(20, kernel=1, padding=1)"),
    ("1x9x13x15", "conv2d(70, kernel=(5, 2), stride=(2, 3), padding=((0, 3), (1, 0)))"),
    ("1x6x17x18", "conv2d(8, kernel=3, dilation=(2, 3), padding=2)"),
    ("2x12x9x8", "conv2d(18, kernel=3, padding=1, groups=3)"),
    ("1x64x8x8", "conv2d(64, kernel=3, padding=1, groups=16)"),
    ("1x1x8x8", "conv2d(1, kernel=3)"),
    ("3x130x1x1", "conv2d(100, kernel=1)"),
    ("1x4x1x40", "conv2d(5, kernel=(1, 9), padding=(0, 4))"),
    ("1x4x40x1", "conv2d(5, kernel=(9, 1), padding=(4, 0))"),
    ("1x8x5x5", "conv2d(16, kernel=5)"),
    ("2x3x50", "conv1d(7, kernel=9, stride=3, padding=4)"),
    ("2x20x33", "conv1d(34, kernel=3, padding=same)"),
    ("1x5x6x7x8", "conv3d(9, kernel=3, padding=1)"),
    (
        "2x4x5x9x6",
        "conv3d(6, kernel=(1, 3, 2), stride=(2, 1, 3), padding=((0, 1), (1, 1), (2, 0)), groups=2)",
    ),
)


def plan_of(shape: str, conv: str, last: bool, tail: str = "", dtype: str = "f32") -> FusionPlan:
    layout = LAYOUTS[shape.count("x") + 1][last]
    return FusionPlan.parse(f"{dtype}[{shape}, {layout}] -> {conv}{tail}")


@BOTH
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
@pytest.mark.part(3)
def test_any_shape(shape: str, conv: str, width: int, last: bool) -> None:
    plan = plan_of(shape, conv, last, " -> bias -> relu")
    assert_close(forced(plan, Direct, narrowed(width, threads=2)), random_arrays(plan, 1), slack=16)


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_error_stays_within_the_bound_that_is_claimed(shape: str, conv: str, last: bool) -> None:
    plan = plan_of(shape, conv, last)
    compiled = forced(plan, Direct, narrowed(32))
    arrays = random_arrays(plan, 2)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@pytest.mark.part(6)
@BOTH
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(("shape", "conv"), SHAPES[:3] + SHAPES[8:9] + SHAPES[15:])
def test_any_dtype(shape: str, conv: str, width: int, dtype: str, last: bool) -> None:
    plan = plan_of(shape, conv, last, " -> bias -> add -> relu", dtype)
    assert_close(forced(plan, Direct, narrowed(width)), random_arrays(plan, 3), slack=16)


@BOTH
@pytest.mark.parametrize(
    "before", ["relu", "batch_norm -> relu", "add", "batch_norm(per_activation) -> prelu"]
)
@pytest.mark.parametrize(
    "after", ["batch_norm -> gelu", "batch_norm(per_activation) -> add -> prelu -> scale"]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.part(2)
def test_operators_before_and_after(before: str, after: str, dtype: str, last: bool) -> None:
    plan = plan_of("2x13x10x9", f"{before} -> conv2d(21, kernel=3, padding=1)", last, f" -> {after}", dtype)
    assert_close(forced(plan, Direct, narrowed(64, threads=2)), random_arrays(plan, 4), slack=16)


@pytest.mark.part(6)
@BOTH
@pytest.mark.parametrize(
    ("rows", "vectors", "block", "panels"), list(product((1, 5, 7, 12), (1, 2), (1, 9), (1, 4)))
)
def test_any_knobs(rows: int, vectors: int, block: int, panels: int, last: bool) -> None:
    plan = plan_of("2x20x12x7", "conv2d(70, kernel=3, padding=1)", last, " -> bias -> relu")
    knobs = Direct(rows, vectors, block, panels)
    assert_close(forced(plan, Direct, narrowed(64, threads=2), knobs), random_arrays(plan, 5), slack=16)


@BOTH
@pytest.mark.parametrize("lines", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [5, 7, 9])
@pytest.mark.parametrize(
    "conv", ["conv2d(40, kernel=3, stride=2, padding=1)", "conv2d(40, kernel=5, padding=2)"]
)
@pytest.mark.part(3)
def test_lines_copied_by_each_thread(conv: str, rows: int, lines: int, last: bool) -> None:
    plan = plan_of("2x20x15x18", conv, last, " -> bias -> relu")
    covering = tiling(staging.staged(lower(match(plan))), rows, lines * plan.output.shape[3])
    knobs = Direct(rows, 1, covering.count, 3, lines)
    assert_close(forced(plan, Direct, narrowed(64, threads=2), knobs), random_arrays(plan, 6), slack=16)


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(("shape", "conv"), [SHAPES[0], SHAPES[2], SHAPES[6], SHAPES[17]])
def test_tiles_cover_each_position(shape: str, conv: str, rows: int) -> None:
    """Counted here as the kernel counts them: from the tiling's start and kind."""
    staged = staging.staged(lower(match(plan_of(shape, conv, True))))
    positions = int(np.prod(staged.convolution.dst_spatial)) * staged.convolution.batch
    if rows > positions:
        pytest.skip("a tile is no larger than its sheet")
    covering = tiling(staged, rows, positions)
    covered: set[int] = set()
    for tile in range(covering.count):
        start = _start(covering, tile)
        covered |= set(range(start, start + rows))
    assert covered == set(range(positions))
    assert covering.waste >= 1


def _start(covering: Tiling, tile: int) -> int:
    class Numbers:
        """A builder that counts instead of writing."""

        @staticmethod
        def smaller(a: int, b: int) -> int:
            return min(a, b)

    start = covering.start(Numbers(), tile)  # type: ignore[arg-type]
    assert isinstance(start, int)
    return start


@BOTH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_reach_what_they_touch_and_nothing_else(value: float, last: bool) -> None:
    plan = plan_of("1x5x9x11", "conv2d(7, kernel=3, padding=1)", last)
    arrays = random_arrays(plan, 7)
    arrays["src"][0, 2, 4, 5] = value
    got = forced(plan, Direct, narrowed(64))(**arrays)
    touched = np.zeros(plan.output.shape, bool)
    touched[:, :, 3:6, 4:7] = True
    assert np.array_equal(~np.isfinite(got), touched)
    want = reference(plan, arrays)
    assert np.array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.part(2)
@BOTH
@pytest.mark.parametrize(("shape", "conv"), SHAPES)
def test_nothing_outside_the_tensors_is_touched(shape: str, conv: str, last: bool, guarded: Any) -> None:
    plan = plan_of(shape, conv, last, " -> bias -> add -> relu")
    arrays = random_arrays(plan, 8)
    for key, spec in (("src", plan.src), ("other", plan.output)):
        held = guarded(spec)
        held[...] = arrays[key]
        arrays[key] = held
    out = guarded(plan.output)
    want = reference(plan, arrays)
    forced(plan, Direct, narrowed(64))(**arrays, out=out)
    np.testing.assert_allclose(out, want, atol=16 * DTYPES["f32"].epsilon * np.abs(want).max())


def test_strided_source() -> None:
    plan = FusionPlan.parse("f32[2x4x9x11, strides=2000:500:50:3] -> relu -> conv2d(5, kernel=3) -> bias")
    assert_close(forced(plan, Direct, narrowed(32)), random_arrays(plan, 9), slack=16)


def test_refusals() -> None:
    target = narrowed(32)
    pointwise = refusal_of("f32[1x3x4x4] -> relu", Direct, target)
    assert pointwise is not None
    assert pointwise.reason is Reason.NO_CONTRACTION
    strided = refusal_of("f32[2x4x9x11, strides=2000:500:50:3] -> add -> conv2d(5, kernel=3)", Direct, target)
    assert strided is not None
    assert strided.reason is Reason.STRIDED_PROLOGUE


@pytest.mark.parametrize(
    "plan",
    [
        "f32[2x5x9x11] -> conv2d(7, kernel=3, padding=1) -> bias -> add -> relu",
        "f32[2x5x9x11, nhwc] -> conv2d(8, kernel=3, stride=2) -> batch_norm(per_activation)",
        "f64[1x12x9x8, nhwc] -> relu -> conv2d(12, kernel=3, padding=1, groups=3) -> bias",
        "f16[3x9x7] -> conv1d(2, kernel=3)",
        "f32[2x6x5x5, nhwc] -> conv_transpose2d(4, kernel=4, stride=2, padding=1) -> bias",
        "bf16[37x130] -> linear(8) -> bias -> add",
        "f32[3x7x20, bcs of bsc] -> matmul(5)",
    ],
)
def test_few_features_take_half_of_a_vector_where_it_is_computed_in_halves(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "in_halves", lambda target: target.vector_bytes == 64)
    monkeypatch.setattr(dots, "of", lambda kernel, target: None)
    made = FusionPlan.parse(plan)
    compiled = forced(made, Direct, narrowed(64, threads=2))
    width = 32 // DTYPES[made.compute_dtype].itemsize
    assert f"<{width} x" in compiled.source.text
    assert f"<{2 * width} x" not in compiled.source.text
    assert_close(compiled, random_arrays(made, 3))


def test_features_that_fill_more_than_half_of_a_vector_take_it_whole() -> None:
    whole = replace(narrowed(64), cpu="znver4")
    for count, has_whole in ((8, False), (9, True)):
        kernel = lower(match(FusionPlan.parse(f"f32[64x100] -> linear({count})")))
        chosen = next(iter(Direct.candidates(kernel, whole, "default")))
        assert ("<16 x float>" in chosen.emit(kernel, whole).text) == has_whole


def test_shuffled_groups_are_quicker_than_half_vectors_of_eight_features() -> None:
    """On a Zen 4 core, groups of 8 channels took 144 us, in half vectors 174; of 16 channels, 175 and 158."""
    target = replace(narrowed(64), cpu="znver4")
    for plan, name in (
        ("f32[4x64x20x20, nhwc] -> conv2d(64, kernel=3, padding=1, groups=8) -> bias -> relu", "grouped"),
        ("f32[2x64x28x28, nhwc] -> conv2d(32, kernel=3, padding=1, groups=4)", "direct"),
    ):
        assert decide(plan, target, tuned=False).choice.template.name == name


@pytest.mark.parametrize("kind", ["cpu:avx2", "cpu:avx512", "cpu:neon"])
def test_the_sums_of_one_vector_a_row_stay_in_their_registers(kind: str) -> None:
    """With AVX2, LLVM wrote them to the stack in every turn of the loop."""
    target = KINDS[kind]
    kernel = lower(match(FusionPlan.parse("f32[481x100] -> linear(8)")))
    source = Direct(13, 1, 37, 1).emit(kernel, target)
    text = toolchain.assembly(
        source.text, triple=toolchain.triple_of(target), cpu=target.cpu, features=target.features
    )
    loop = text[re.search("vfmadd|fmla", text).start() :]  # type: ignore[union-attr]
    assert not re.search(r"vmov[au]ps\s+%.mm\d+, \d*\(%rsp\)", loop)


@pytest.mark.parametrize(("rows", "tile"), [(16, (4, 2)), (12, (6, 2)), (21, (3, 3)), (480, (5, 2))])
def test_tiles_of_few_rows_leave_none_out(rows: int, tile: tuple[int, int]) -> None:
    """Eight products fill the multipliers; more of them a load are worth less than rows that are used."""
    kernel = lower(match(FusionPlan.parse(f"f32[{rows}x512] -> linear(768)")))
    chosen = next(iter(Direct.candidates(kernel, KINDS["cpu:avx2"], "default")))
    assert (chosen.knobs["rows"], chosen.knobs["vectors"]) == tile


def test_more_threads_make_more_tasks() -> None:
    kernel = lower(match(plan_of("1x64x14x14", "conv2d(256, kernel=1)", True)))
    few, many = (
        next(iter(Direct.candidates(kernel, replace(narrowed(64), threads=threads), "default")))
        for threads in (1, 16)
    )
    assert isinstance(few, Direct)
    assert isinstance(many, Direct)
    assert many.block_panels < few.block_panels

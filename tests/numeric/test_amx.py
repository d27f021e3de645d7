"""Products and convolutions by AMX's tiles against the float64 reference, where the machine has them."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_close, assert_same_exceptions
from forced import forced, refusal_of
from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.templates.amx import Amx
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.execution.stages import decide
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, Target, host_target, parse_target
from fuseplan.kernels.template import Template
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import tiles

HAS_TILES = pytest.mark.skipif(
    host_target().name != "amx", reason="the processor has no AMX, or Linux does not let this process use it"
)
WEIGHTS = pytest.mark.parametrize(
    "weight", ["", ", transposed=True", ", batched=True", ", transposed=True, batched=True"]
)
MATRICES = (
    ("1x1", 1),
    ("1x70", 33),
    ("7x5", 9),
    ("16x32", 32),
    ("17x33", 31),
    ("33x64", 64),
    ("100x101", 95),
    ("257x30", 40),
    ("2x5x7x4", 50),
    ("3x21x17", 35),
)
PLANS = (
    "bf16[2x64x9x11, nhwc] -> conv2d(64, kernel=3, padding=2, dilation=2) -> batch_norm -> add -> relu",
    "bf16[37x50] -> matmul(70, transposed=True) -> bias -> glu(silu)",
    "bf16[37x50] -> linear(2) -> glu",
    "bf16[40x64] -> linear(70) -> bias -> save(kept) -> gelu -> add",
    "bf16[300x1000] -> linear(100) -> bias -> cast(f32)",
    "i8[40x300] -> linear(70) -> dequantize(per=row) -> bias -> relu",
    "bf16[2x19x9x11, nhwc] -> conv2d(37, kernel=(3, 5), stride=2, padding=1) -> bias -> tanh",
    "bf16[1x66x9x9, nhwc] -> conv2d(50, kernel=1, groups=2, stride=2) -> relu",
    "bf16[1x70x5x5, nhwc] -> conv2d(9, kernel=1, padding=1) -> bias",
    "bf16[2x12x15, nwc] -> conv1d(20, kernel=3, padding=1, groups=2) -> bias",
    "bf16[2x12x5x6x7, ndhwc] -> conv3d(20, kernel=(2, 3, 1), padding=1, stride=(1, 2, 1)) -> bias",
)
WINDOWS = (
    "f32[1x3x23x21, nhwc] -> conv2d(40, kernel=7, stride=2, padding=3) -> bias -> relu",
    "f32[2x64x9x8, nhwc] -> conv2d(33, kernel=3, padding=1) -> bias",
    "f32[2x32x9x8, nhwc] -> conv2d(33, kernel=(2, 3), padding=(2, 0), dilation=(2, 1)) -> bias",
    "f32[1x64x9x9, nhwc] -> conv2d(40, kernel=3, padding=2, dilation=2)",
    "f32[1x64x9x9, nhwc] -> conv2d(64, kernel=3, padding=1, groups=2)",
    "f32[1x9x5x6x7, ndhwc] -> conv3d(20, kernel=(2, 3, 3), padding=1, stride=(1, 2, 1)) -> bias",
    "f32[1x20x3, nwc] -> conv1d(9, kernel=5, padding=4)",
    "bf16[2x20x9x11, nhwc] -> conv2d(37, kernel=(3, 5), stride=2, padding=(1, 3))",
    "bf16[1x64x6x5, nhwc] -> conv2d(37, kernel=3, padding=1)",
    "i8[2x19x9x11, nhwc] -> conv2d(37, kernel=(3, 5), stride=2, padding=1)",
    "i8[1x3x23x21, nhwc] -> conv2d(40, kernel=7, stride=2, padding=3)",
)
OPEN = (
    "bf16[*x70] -> linear(100) -> bias -> gelu",
    "bf16[*x12x9x7, nhwc] -> conv2d(20, kernel=3, padding=1) -> bias",
)


def host(threads: int = 2) -> Target:
    return replace(host_target(), threads=threads)


def choices(plan: str, target: Target) -> Iterator[Amx]:
    for each in Amx.candidates(lower(match(FusionPlan.parse(plan))), target, "default"):
        assert isinstance(each, Amx)
        yield each


@HAS_TILES
@WEIGHTS
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize(("src", "features"), MATRICES)
def test_any_shape_and_weight(src: str, features: int, weight: str, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{src}] -> matmul({features}{weight}) -> bias -> add -> relu")
    assert_close(forced(plan, Amx, host()), random_arrays(plan, 1), slack=32)


@HAS_TILES
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("plan", [*PLANS, *(plan.replace("bf16", "f32") for plan in PLANS[:4])])
def test_operators_and_convolutions(plan: str, threads: int) -> None:
    arrays = random_arrays(FusionPlan.parse(plan), 2)
    for chosen in choices(plan, host(threads)):
        assert_close(forced(plan, Amx, host(threads), chosen), arrays, slack=32)


@HAS_TILES
@pytest.mark.parametrize("rows", [16, 32, 48, 256])
@pytest.mark.parametrize("plan", WINDOWS)
def test_windows_are_gathered(plan: str, rows: int) -> None:
    """Whole runs of taps, a part of them at a time, and those that padding cuts."""
    chosen = replace(next(choices(plan, host())), rows=rows)
    assert_close(forced(plan, Amx, host(), chosen), random_arrays(FusionPlan.parse(plan), 12), slack=32)


@pytest.mark.parametrize("plan", [each for each in WINDOWS if each.startswith("i8")])
def test_windows_of_bytes_are_code_anywhere(plan: str) -> None:
    """A vector has 64 of them, as many as the conditions have bits."""
    kernel, target = lower(match(FusionPlan.parse(plan))), parse_target("cpu:amx")
    for chosen in Amx.candidates(kernel, target, "default"):
        assert toolchain.portable_object(chosen.emit(kernel, target).text, target)


@HAS_TILES
@pytest.mark.parametrize(
    ("rows", "panels", "depth", "extent"), [(32, 1, 1, 2), (64, 2, 3, 7), (128, 3, 2, 4), (16, 2, 11, 11)]
)
@pytest.mark.parametrize(
    "plan",
    [
        "bf16[150x340] -> linear(130) -> bias",
        "bf16[150x340] -> linear(130) -> bias -> glu(silu)",
        "i8[150x700] -> linear(130)",
        "f32[150x340] -> linear(130) -> bias -> gelu",
        "f32[2x340x9x9, nhwc] -> conv2d(70, kernel=1, stride=2, padding=1) -> bias",
        "bf16[2x40x9x9, nhwc] -> conv2d(70, kernel=3, padding=1) -> bias",
        "bf16[2x340x9x9, nhwc] -> conv2d(70, kernel=1, stride=2, padding=1) -> bias",
    ],
)
def test_channels_in_parts(plan: str, rows: int, panels: int, depth: int, extent: int) -> None:
    """Sums of other blocks and panels stay in memory while the next channels come."""
    compiled = forced(plan, Amx, host(), Amx(rows, panels, depth, extent))
    assert_close(compiled, random_arrays(compiled.plan, 3), slack=32)


@HAS_TILES
@pytest.mark.parametrize("plan", OPEN)
def test_any_extent_of_an_open_axis(plan: str) -> None:
    compiled = forced(plan, Amx, host())
    arrays: dict[str, Any] = {}
    for extent in (1, 2, 15, 17, 33, 300):
        known = FusionPlan.parse(plan.replace("*", str(extent)))
        arrays = {**random_arrays(known, 4), **{key: arrays[key] for key in arrays if key != "src"}}
        got, want = wide(compiled(**arrays), "bf16"), reference(known, arrays)
        np.testing.assert_allclose(got, want, rtol=2.0**-8, atol=2.0**-17 * np.abs(want).max())


@HAS_TILES
@given(
    st.integers(1, 80), st.integers(2, 140), st.integers(2, 100), st.integers(1, 3), st.booleans(),
    st.sampled_from(("bf16", "f32")),
)  # fmt: skip
def test_any_size(rows: int, channels: int, features: int, threads: int, gated: bool, dtype: str) -> None:
    tail = f"linear({2 * features}) -> glu(silu)" if gated else f"linear({features}) -> bias"
    plan = FusionPlan.parse(f"{dtype}[{rows}x{channels}] -> {tail}")
    assert_close(forced(plan, Amx, host(threads)), random_arrays(plan, 5), slack=32)


@HAS_TILES
def test_sums_of_i8_are_exact() -> None:
    plan = FusionPlan.parse("i8[40x3000] -> linear(70)")
    arrays = random_arrays(plan, 6)
    arrays["src"][:] = arrays["weight"][:] = -128
    arrays["src"][::2] = 127
    np.testing.assert_array_equal(forced(plan, Amx, host())(**arrays), reference(plan, arrays))


@HAS_TILES
@pytest.mark.parametrize(("rows", "channels"), [(33, 3072), (40, 61)])
def test_error_stays_within_the_bound_that_is_claimed(rows: int, channels: int) -> None:
    plan = FusionPlan.parse(f"bf16[{rows}x{channels}] -> linear(40) -> cast(f32)")
    compiled, arrays = forced(plan, Amx, host()), random_arrays(plan, 7)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: array.view(np.uint16) & 0x7FFF for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@HAS_TILES
@pytest.mark.parametrize("channels", [2, 5, 64, 300, 3072])
def test_f32_is_as_exact_as_sums_of_f32(channels: int) -> None:
    plan = FusionPlan.parse(f"f32[50x{channels}] -> linear(40)")
    compiled, arrays = forced(plan, Amx, host()), random_arrays(plan, 11)
    got, want = compiled(**arrays), reference(plan, arrays)
    error = np.abs(got - want)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (error <= compiled.choice.template.error_bound(compiled.kernel) * size).all()
    plain = np.abs(forced(plan, Direct, host())(**arrays) - want)
    assert error.mean() <= 1.5 * plain.mean() + 2.0**-26 * size.mean()


@HAS_TILES
def test_infinite_and_undefined_elements_of_f32_stay_in_their_rows_and_columns() -> None:
    plan = FusionPlan.parse("f32[40x45] -> linear(40) -> bias")
    arrays = random_arrays(plan, 8)
    arrays["src"][[3, 17, 39], -1] = np.inf, -np.inf, np.nan
    arrays["weight"][[5, 7], 0] = np.inf, np.nan
    assert_same_exceptions(forced(plan, Amx, host()), arrays)


@HAS_TILES
def test_numbers_that_parts_make_infinite_are_multiplied_as_they_are() -> None:
    plan = FusionPlan.parse("f32[1x5x4x4, nhwc] -> conv2d(3, kernel=3, padding=1)")
    arrays = random_arrays(plan, 13)
    arrays["src"][0, 2, 1, 1], arrays["src"][0, 4, 3, 3] = np.finfo(np.float32).max, np.inf
    arrays["weight"] *= np.float32(0.01)
    assert_same_exceptions(forced(plan, Amx, host()), arrays)


@pytest.mark.parametrize(
    ("plan", "kind", "rows"),
    [
        ("f32[1x832x7x7, nhwc] -> conv2d(192, kernel=1)", Direct, 0),  # weights arrive as slowly
        ("f32[1x256x14x14, nhwc] -> conv2d(1024, kernel=1)", Amx, 196),  # weights are read once
        ("f32[1x64x56x56, nhwc] -> conv2d(256, kernel=1)", Amx, 32),  # a block stays in the first cache
        ("f32[1x96x56x56, nhwc] -> conv2d(24, kernel=1)", Direct, 0),  # as many elements are copied
    ],
)
def test_which_template_and_rows_are_chosen(plan: str, kind: type[Template], rows: int) -> None:
    target = replace(KINDS["cpu:amx"], l1_bytes=48 * 1024, threads=2)
    chosen = decide(FusionPlan.parse(plan), target).choice.template
    assert isinstance(chosen, kind)
    assert not isinstance(chosen, Amx) or chosen.rows == rows


@HAS_TILES
def test_infinite_and_undefined_elements_stay_in_their_rows() -> None:
    plan = FusionPlan.parse("bf16[40x45] -> linear(40) -> bias")
    arrays = random_arrays(plan, 8)
    for place, bits in ((3, 0x7F80), (17, 0xFF80), (39, 0x7FC0)):
        arrays["src"].view(np.uint16)[place, -1] = bits
    assert_same_exceptions(forced(plan, Amx, host()), arrays)


@HAS_TILES
def test_denormal_numbers_are_0() -> None:
    plan = FusionPlan.parse("bf16[1x16] -> matmul(16)")
    small, one = np.full((1, 16), 64, np.uint16), np.eye(16, dtype=np.float32).view(np.uint32) >> 16
    made = forced(plan, Amx, host())(src=small, weight=one.astype(np.uint16))
    np.testing.assert_array_equal(made.view(np.uint16), 0 * small)


@HAS_TILES
@pytest.mark.parametrize(
    "plan",
    [
        "bf16[37x45] -> linear(35) -> bias -> add",
        "bf16[1x7] -> linear(3) -> add",
        "bf16[1x19x9x11, nhwc] -> conv2d(21, kernel=3, padding=1) -> add",
    ],
)
def test_nothing_outside_the_tensors_is_touched(plan: str, guarded: Any) -> None:
    compiled = forced(plan, Amx, host())
    arrays = random_arrays(compiled.plan, 9)
    for key, spec in (("src", compiled.plan.src), ("other", compiled.plan.output)):
        held = guarded(spec)
        held[...] = arrays[key].view(held.dtype)
        arrays[key] = held
    out = guarded(compiled.plan.output)
    want = reference(compiled.plan, arrays)
    compiled(**arrays, out=out)
    np.testing.assert_allclose(wide(out, "bf16"), want, rtol=2.0**-8, atol=2.0**-17 * np.abs(want).max())


IN_USE = """
declare i64 @llvm.x86.xgetbv(i32)
define i64 @inuse() {
  %components = call i64 @llvm.x86.xgetbv(i32 1)
  ret i64 %components
}"""


@HAS_TILES
def test_threads_of_python_hold_no_tiles_afterwards() -> None:
    plan = FusionPlan.parse("bf16[70x100] -> linear(90) -> bias")
    compiled, arrays = forced(plan, Amx, host()), random_arrays(plan, 10)
    want = compiled(**arrays)
    address = toolchain.load_object(toolchain.compile_object(IN_USE), ["inuse"])["inuse"]
    components = ctypes.CFUNCTYPE(ctypes.c_int64)(address)

    def run(_: int) -> bool:
        same = all(np.array_equal(compiled(**arrays), want) for _ in range(20))
        return same and not components() >> tiles.TILES & 1

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(8)))


def test_refusals() -> None:
    for plan, kind, reason in (
        ("bf16[4x32] -> linear(8)", "cpu:avx512bf16", Reason.NO_TILES),
        ("f16[4x32] -> linear(8)", "cpu:amx", Reason.TILE_DTYPE),
        ("i8[1x200000] -> linear(8)", "cpu:amx", Reason.TILE_DTYPE),
        ("i8[9x64] -> dequantize(i16, zero_points=True) -> linear(8)", "cpu:amx", Reason.TILE_DTYPE),
        ("bf16[4x32] -> relu -> linear(8)", "cpu:amx", Reason.PROLOGUE),
        ("bf16[4x32, strides=1:4] -> linear(8)", "cpu:amx", Reason.CHANNELS_FIRST),
        ("bf16[4x32x3x3] -> conv2d(8, kernel=1)", "cpu:amx", Reason.CHANNELS_FIRST),
    ):
        refusal = refusal_of(plan, Amx, KINDS[kind])
        assert refusal is not None, plan
        assert refusal.reason is reason
    for dtype in ("bf16", "f32"):
        kernel = lower(match(FusionPlan.parse(f"{dtype}[4x32] -> linear(8)")))
        strict = [claim.reason for claim in Amx.limits(kernel, KINDS["cpu:amx"], "strict") if not claim.holds]
        assert strict == [Reason.ACCURACY]

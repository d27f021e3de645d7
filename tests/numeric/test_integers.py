"""Products and convolutions of integers on CPUs: sums of 32 bits, exact, whichever instruction adds them."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from closeness import assert_close
from crossbuild.test_cpu_kinds import innermost_loops
from forced import forced, narrowed
from fuseplan.backends.cpu import dots, toolchain
from fuseplan.backends.cpu.ir import Value
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.winograd import Winograd
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, Target, host_target
from fuseplan.measure.data import random_arrays, reference
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan

WIDTHS = (16, 32, 64)
HAS_PAIRS = pytest.mark.skipif("+avx2" not in host_target().features, reason="the processor has no AVX2")
SUMS = (
    "i8[5x7] -> linear(9)",
    "i8[1x255] -> matmul(100)",
    "i8[33x768] -> linear(70)",
    "u8[17x1030] -> linear(33)",
    "u8[17x40] -> dequantize(i16, zero_points=True) -> linear(33)",
    "f32[33x40] -> quantize(u8, per=row) -> linear(24)",
    "i8[3x20x17] -> matmul(19, batched=True)",
    "i8[3x20x17, bcs of bsc] -> matmul(19, batched=True, transposed=True)",
    "i8[2x19x9x11, nhwc] -> conv2d(37, kernel=(3, 5), stride=2, padding=1)",
    "i8[2x19x9x11] -> conv2d(37, kernel=(3, 5), stride=2, padding=(0, 2))",
    "u8[1x3x23x21, nhwc] -> dequantize(i16, zero_points=True) -> conv2d(40, kernel=7, stride=2, padding=3)",
    "u8[1x3x13x11] -> dequantize(i16, zero_points=True) -> conv2d(10, kernel=3, padding=1)",
    "u8[2x8x9x9, nhwc] -> conv2d(9, kernel=3, padding=2, dilation=2)",
    "i8[2x20x9x9, nhwc] -> conv2d(12, kernel=3, padding=1, groups=4)",
    "i8[2x18x9x9] -> conv2d(12, kernel=3, groups=2)",
    "i8[2x12x9x9, nhwc] -> conv2d(24, kernel=3, padding=1, groups=12)",
    "u8[2x12x15, nwc] -> conv1d(20, kernel=3, padding=1)",
    "i8[2x5x5x6x7, ndhwc] -> conv3d(20, kernel=(2, 3, 1), padding=1, stride=(1, 2, 1))",
    "i8[2x16x6x6, strides=1152:1:192:32] -> conv2d(16, kernel=1)",
    "i8[2x20x3x5, strides=900:3:300:60] -> conv2d(7, kernel=3, padding=1)",
    "u8[1x20x11x13, nhwc] -> conv2d(33, kernel=3, padding=1)",
    "i8[2x150x9x7] -> conv2d(33, kernel=3, padding=1)",
)
TAILS = (
    "i8[40x300] -> linear(70) -> dequantize(per=row) -> bias -> relu",
    "i8[40x3000] -> linear(70) -> dequantize(per=channel) -> bias -> gelu",
    "i8[37x50] -> linear(70) -> dequantize(per=channel) -> glu(silu)",
    "i8[37x3000] -> linear(70) -> dequantize(f64) -> glu(silu)",
    "i8[40x64] -> linear(70) -> dequantize -> bias -> save(kept) -> gelu -> add",
    "u8[2x9x9x11] -> dequantize(i16, zero_points=True) -> conv2d(37, kernel=3, padding=1) -> "
    "dequantize(per=channel) -> relu",
    "u8[2x9x9x11, nhwc] -> conv2d(37, kernel=3, padding=1, stride=2) -> dequantize -> batch_norm -> add",
    "i8[29x64] -> linear(100) -> dequantize -> cross_entropy",
    "i8[29x3000] -> linear(100) -> dequantize(f64) -> cross_entropy",
)


def kernel_of(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


def extreme(plan: FusionPlan) -> dict[str, NDArray[Any]]:
    """Random numbers, among them the least and the largest of each dtype."""
    arrays = random_arrays(plan, 3)
    for key in ("src", "weight"):
        if arrays[key].dtype.kind in "iu":
            info, flat = np.iinfo(arrays[key].dtype), arrays[key].reshape(-1)
            flat[: flat.size // 3], flat[-(flat.size // 3) :] = info.min, info.max
    return arrays


@pytest.mark.part(2)
@pytest.mark.parametrize("nbytes", WIDTHS)
@pytest.mark.parametrize("plan", SUMS)
def test_sums_are_exact(plan: str, nbytes: int) -> None:
    made, compiled = FusionPlan.parse(plan), forced(plan, Direct, narrowed(nbytes, threads=2))
    for arrays in (random_arrays(made, 1), extreme(made)):
        np.testing.assert_array_equal(compiled(**arrays), reference(made, arrays))


@pytest.mark.parametrize("plan", SUMS)
def test_the_chosen_kernel_is_exact(plan: str) -> None:
    made = FusionPlan.parse(plan)
    arrays = extreme(made)
    np.testing.assert_array_equal(compile_plan(plan, "cpu", cache=False)(**arrays), reference(made, arrays))


@pytest.mark.parametrize("plan", TAILS)
def test_operators_behind_sums(plan: str) -> None:
    made = FusionPlan.parse(plan)
    assert_close(compile_plan(made, "cpu", cache=False), random_arrays(made, 2), slack=32)


@pytest.mark.parametrize("to", ["i8", "u8"])
@pytest.mark.parametrize(("layout", "channels"), [("nhwc", 40), ("nchw", 40), ("nhwc", 3), ("nhwc", 130)])
def test_quantized_again_within_one_step(to: str, layout: str, channels: int) -> None:
    """f32 rounds a scaled sum before it is rounded to a whole number: near a tie that may be the next."""
    plan = FusionPlan.parse(
        f"u8[2x{channels}x9x9, {layout}] -> dequantize(i16, zero_points=True) -> "
        f"conv2d(20, kernel=3, padding=1) -> dequantize(per=channel) -> quantize({to}, zero_points=True)"
    )
    arrays = random_arrays(plan, 4)
    got, want = compile_plan(plan, "cpu", cache=False)(**arrays).astype(int), reference(plan, arrays)
    assert np.abs(got - want).max() <= 1
    assert (got == want).mean() > 0.999


@settings(max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.integers(1, 3), st.sampled_from(WIDTHS),
    st.sampled_from(("i8", "u8")),
)  # fmt: skip
def test_any_size(rows: int, channels: int, features: int, threads: int, nbytes: int, dtype: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{rows}x{channels}] -> linear({features})")
    arrays = extreme(plan)
    got = forced(plan, Direct, narrowed(nbytes, threads))(**arrays)
    np.testing.assert_array_equal(got, reference(plan, arrays))


@pytest.mark.parametrize("plan", ["i8[*x40] -> linear(33)", "u8[*x9x7x5, nhwc] -> conv2d(8, kernel=3)"])
def test_any_extent(plan: str) -> None:
    compiled = compile_plan(plan, "cpu", cache=False)
    weight = random_arrays(FusionPlan.parse(plan.replace("*", "1")), 5)["weight"]
    for extent in (1, 3, 17, 40):
        known = FusionPlan.parse(plan.replace("*", str(extent)))
        arrays = {**random_arrays(known, extent), "weight": weight}
        np.testing.assert_array_equal(compiled(**arrays), reference(known, arrays))


def test_longer_sums_than_32_bits_hold_are_exact_too() -> None:
    plan = FusionPlan.parse("i8[2x131080] -> linear(3) -> dequantize(f64)")
    assert dots.of(kernel_of(str(plan)), narrowed(32)) is None
    arrays = random_arrays(plan, 6)
    arrays["src"][:] = arrays["weight"][:] = -128
    arrays["scale"][...] = 1
    np.testing.assert_array_equal(compile_plan(plan, "cpu", cache=False)(**arrays), 131080.0 * 2**14)


@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("i8[3x1024] -> linear(9)", "f32"),
        ("i8[3x1025] -> linear(9)", "f64"),
        ("i8[3x1025] -> linear(9) -> dequantize", "f32"),
        ("i8[3x131072] -> linear(9) -> dequantize", "f64"),
        ("u8[3x514] -> linear(9)", "f32"),
        ("u8[3x515] -> linear(9)", "f64"),
        ("u8[3x514] -> dequantize(i16, zero_points=True) -> linear(9)", "f32"),
        ("i16[3x5] -> linear(9)", "f64"),
    ],
)
def test_sums_that_f32_holds_are_computed_with_in_f32(plan: str, dtype: str) -> None:
    made = FusionPlan.parse(plan)
    assert made.compute_dtype == kernel_of(plan).compute_dtype == dtype


# ---- Winograd's transforms in whole numbers

WINDOWS = (
    "i8[1x16x12x12, nhwc] -> conv2d(16, kernel=3, padding=1)",
    "i8[2x19x9x11, nhwc] -> conv2d(9, kernel=3, padding=(0, 2))",
    "i8[1x113x9x11] -> conv2d(40, kernel=3, padding=1)",
    "u8[2x23x9x11] -> dequantize(i16, zero_points=True) -> conv2d(40, kernel=3, padding=1)",
    "u8[2x1x7x6, nhwc] -> conv2d(1, kernel=3)",
    "f32[1x8x9x9, nhwc] -> quantize(i8) -> conv2d(33, kernel=3, padding=1)",
)


def tiles_of(plan: str, target: Target) -> dict[int, Winograd]:
    kernel = kernel_of(plan)
    assert first_refusal(Winograd.limits(kernel, target, "strict")) is None
    found = (each for each in Winograd.candidates(kernel, target, "strict") if isinstance(each, Winograd))
    return {each.tile: each for each in found}


@HAS_PAIRS
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("plan", WINDOWS)
def test_transforms_of_integers_are_exact(plan: str, threads: int) -> None:
    made, target = FusionPlan.parse(plan), replace(host_target(), threads=threads)
    found = tiles_of(plan, target)
    assert found.keys() == {2, 4}
    for each in found.values():
        for arrays in (random_arrays(made, 1), extreme(made)):
            got = forced(plan, Winograd, target, each)(**arrays)
            np.testing.assert_array_equal(got, reference(made, arrays))


@HAS_PAIRS
@pytest.mark.parametrize(("channels", "tiles"), [(227, {2, 4}), (228, {2}), (3640, {2}), (3641, set())])
def test_transforms_are_taken_as_far_as_32_bits_hold_them(channels: int, tiles: set[int]) -> None:
    """Sums of up to channels * 9 * 2^14, times the powers of two that are divided by, 4 and 64."""
    plan = f"i8[1x{channels}x6x6, nhwc] -> conv2d(8, kernel=3, padding=1) -> dequantize"
    target = replace(host_target(), threads=1)
    refusal = first_refusal(Winograd.limits(kernel_of(plan), target, "default"))
    assert (set() if refusal else tiles_of(plan, target).keys()) == tiles
    if channels == 227:
        made = FusionPlan.parse(plan)
        arrays = random_arrays(made, 1)
        arrays["src"][:], arrays["weight"][:], arrays["scale"][...] = -128, -128, 1
        for each in tiles_of(plan, target).values():
            got = forced(plan, Winograd, target, each)(**arrays)
            np.testing.assert_array_equal(got, reference(made, arrays).astype(np.float32))


@HAS_PAIRS
def test_transforms_of_integers_at_any_extent() -> None:
    plan = "i8[*x19x9x7, nhwc] -> conv2d(20, kernel=3, padding=1)"
    compiled = forced(plan, Winograd, replace(host_target(), threads=2))
    weight = random_arrays(FusionPlan.parse(plan.replace("*", "1")), 5)["weight"]
    for extent in (1, 2, 9):
        known = FusionPlan.parse(plan.replace("*", str(extent)))
        arrays = {**random_arrays(known, extent), "weight": weight}
        np.testing.assert_array_equal(compiled(**arrays), reference(known, arrays))


# ---- instructions of processors that may be others than this one

AVX512 = KINDS["cpu:avx512"]
KIND_OF = {
    "avx2": KINDS["cpu:avx2"],
    "avx512": AVX512,
    "avxvnni": replace(KINDS["cpu:avx2"], features=f"{KINDS['cpu:avx2'].features},+avxvnni"),
    "avx512vnni": replace(AVX512, features=f"{AVX512.features},+avx512vnni"),
    "avxvnniint8": replace(KINDS["cpu:avx2"], features=f"{KINDS['cpu:avx2'].features},+avxvnniint8"),
    "neon": KINDS["cpu:neon"],
    "dotprod": replace(KINDS["cpu:neon"], features="+neon,+fp-armv8,+dotprod"),
}


@pytest.mark.parametrize(
    ("kind", "plan", "word"),
    [
        ("avx2", "i8[64x256] -> linear(64)", "vpmaddwd"),
        ("avx512", "i8[64x256] -> linear(64)", "vpmaddwd"),
        ("avxvnni", "i8[64x256] -> linear(64)", "vpdpbusd"),
        ("avx512vnni", "u8[64x256] -> linear(64)", "vpdpbusd"),
        ("avx512vnni", "u8[64x256] -> dequantize(i16, zero_points=True) -> linear(64)", "vpdpwssd"),
        ("avxvnniint8", "i8[64x256] -> linear(64)", "vpdpbssd"),
        ("neon", "i8[64x256] -> linear(64)", "mla\t"),
        ("dotprod", "i8[64x256] -> linear(64)", "sdot\t"),
    ],
)
def test_products_are_the_instruction_of_the_processor(kind: str, plan: str, word: str) -> None:
    kernel, target = kernel_of(plan), replace(KIND_OF[kind], threads=1)
    chosen = next(iter(Direct.candidates(kernel, target, "default")))
    assert isinstance(chosen, Direct)
    text, triple = chosen.emit(kernel, target).text, toolchain.triple_of(target)
    asm = toolchain.assembly(text, triple=triple, cpu=target.cpu, features=target.features)
    assert asm.count(word) >= chosen.rows * chosen.vectors
    loop = max(innermost_loops(asm), key=lambda part: part.count(word), default="")
    assert not re.search(r"%[yz]mm\d+, -?\d*\(%rsp\)", loop), "sums stay in registers"


def meaning(dot: dots.Dot, x: Value, y: Value, total: Value) -> Value:
    """An instruction of integers, in words that any processor has."""
    b, count = total.builder, dot.lanes * dot.channels
    first, second = (
        b.op(f"<{count} x {dot.element}>", f"bitcast {each.type} {each.name} to <{count} x {dot.element}>")
        for each in (x, y)
    )
    word = "zext" if dot.dtype == "u8" else "sext"
    products = b.convert(word, first, "i32") * b.convert("sext", second, "i32")
    for number in range(dot.channels):
        total = total + b.shuffle(products, products, range(number, count, dot.channels))
    return total


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("feature", "nbytes"), [("+avxvnni", 32), ("+avx512vnni", 64), ("+avxvnniint8", 32), ("+dotprod", 16)]
)
@pytest.mark.parametrize("plan", SUMS[::2])
def test_four_at_once_have_the_sums_of_the_weight_taken_off(
    plan: str, feature: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = narrowed(nbytes, threads=2)
    target = replace(wide, features=f"{wide.features},{feature}")
    taken = dots.of(kernel_of(plan), target)
    assert taken is not None
    is_wide = "dequantize" in plan  # whole numbers of 9 bits
    assert taken.channels == (2 if is_wide else 4)
    assert is_wide or taken.feature == feature
    monkeypatch.setattr(dots, "_product", meaning)
    made = FusionPlan.parse(plan)
    arrays = extreme(made)
    np.testing.assert_array_equal(forced(plan, Direct, target)(**arrays), reference(made, arrays))

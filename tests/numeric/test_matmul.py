"""The matrix product on the CPU against the float64 reference: ranks, layouts, weights, dtypes, borders."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from closeness import assert_close
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu import toolchain
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.sums import BLOCK, UNROLL
from fuseplan.backends.cpu.templates.depthwise import Depthwise
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.planes import Planes
from fuseplan.compile import compile as compile_plan
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, Target, host_target
from fuseplan.kernels.template import Accuracy
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import random_arrays, reference
from fuseplan.measure.spaces import exact as wide
from fuseplan.messages.reasons import Reason
from fuseplan.plans.plan import FusionPlan

WIDTHS = pytest.mark.parametrize("width", [16, 32, 64])
WEIGHTS = pytest.mark.parametrize(
    "weight", ["", ", transposed=True", ", batched=True", ", transposed=True, batched=True"]
)

# src, and features.
MATRICES = (
    ("7x5", 9),
    ("1x64", 48),
    ("1x1", 1),
    ("130x17", 33),
    ("64x128", 1),
    ("64x1", 70),
    ("101x3", 16),
    ("257x30, strides=1:257", 40),
    ("12x9, strides=11:1", 20),
    ("12x9, strides=40:3", 20),
)
IMAGES = (
    ("3x21x17", 35),
    ("3x21x17, bcs of bsc", 35),
    ("2x5x7x4", 50),
    ("2x5x7x4, bchs of bhsc", 50),
    ("2x3x5x4x6", 7),
    ("2x3x5x4x6, acbhs of abhsc", 7),
    ("2x3x9x5, strides=900:60:5:180 of bhsc", 6),
    ("4x1x8", 24),
)
TAIL = " -> bias -> add -> relu"


@pytest.mark.part(4)
@WIDTHS
@WEIGHTS
@pytest.mark.parametrize(("src", "features"), MATRICES + IMAGES)
def test_any_shape_and_weight(src: str, features: int, weight: str, width: int) -> None:
    plan = FusionPlan.parse(f"f32[{src}] -> matmul({features}{weight}){TAIL}")
    assert_close(forced(plan, Direct, narrowed(width, threads=2)), random_arrays(plan, 1))


@WIDTHS
@WEIGHTS
@pytest.mark.parametrize(("src", "features"), [IMAGES[1], IMAGES[3], IMAGES[5]])
@pytest.mark.part(2)
def test_planes(src: str, features: int, weight: str, width: int) -> None:
    plan = FusionPlan.parse(f"f32[{src}] -> matmul({features}{weight}){TAIL}")
    assert_close(forced(plan, Planes, narrowed(width, threads=2)), random_arrays(plan, 2))


@WEIGHTS
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
@pytest.mark.parametrize(("src", "features"), [MATRICES[3], MATRICES[7], IMAGES[0], IMAGES[3]])
@pytest.mark.part(8)
def test_any_dtype(src: str, features: int, dtype: str, weight: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{src}] -> gelu -> matmul({features}{weight}) -> bias -> gelu")
    compiled = compile_plan(plan, "cpu", threads=2, cache=False)
    assert_close(compiled, random_arrays(plan, 3), slack=32)


PAIRED = replace(KINDS["cpu:avx512"], features=KINDS["cpu:avx512"].features + ",+avx512bf16", cpu="znver4")
HAS_PAIRS = pytest.mark.skipif(
    "+avx512bf16" not in host_target().features, reason="the processor has no products of bf16"
)


def first(kernel: Kernel, target: Target, accuracy: Accuracy) -> Direct:
    """The first candidate."""
    found = next(iter(Direct.candidates(kernel, target, accuracy)))
    assert isinstance(found, Direct)
    return found


@HAS_PAIRS
@pytest.mark.parametrize(
    "plan",
    [
        *(f"bf16[{src}] -> matmul({features})" + TAIL for src, features in (*MATRICES[:5], *MATRICES[6:7])),
        "bf16[1x255] -> matmul(100, transposed=True) -> bias -> gelu",
        "bf16[3x21x17] -> matmul(35, batched=True) -> add",
        "bf16[37x50] -> matmul(70, transposed=True) -> bias -> glu(silu)",
        "bf16[1x66x9x9, nhwc] -> conv2d(50, kernel=1, groups=2, stride=2) -> relu",
    ],
)
def test_pairs_of_bf16(plan: str) -> None:
    made = FusionPlan.parse(plan)
    kernel, target = lower(match(made)), narrowed(64, threads=2)
    chosen = first(kernel, target, "default")
    assert chosen.dots
    assert_close(forced(made, Direct, target, chosen), random_arrays(made, 3), slack=32)


@HAS_PAIRS
def test_denormal_numbers_are_0_in_pairs_and_themselves_in_strict_plans() -> None:
    plan = FusionPlan.parse("bf16[1x16] -> matmul(16)")
    small, one = np.full((1, 16), 64, np.uint16), np.eye(16, dtype=np.float32).view(np.uint32) >> 16
    arrays = {"src": small, "weight": one.astype(np.uint16)}
    for accuracy, want in (("default", 0 * small), ("strict", small)):
        made = compile_plan(plan, "cpu", accuracy=accuracy, cache=False)(**arrays)
        np.testing.assert_array_equal(made.view(np.uint16), want)


def test_pairs_are_one_instruction() -> None:
    kernel = lower(match(FusionPlan.parse("bf16[64x256] -> matmul(64)")))
    chosen = first(kernel, PAIRED, "default")
    triple, text = toolchain.triple_of(PAIRED), chosen.emit(kernel, PAIRED).text
    asm = toolchain.assembly(text, triple=triple, cpu=PAIRED.cpu, features=PAIRED.features)
    products = chosen.rows * chosen.vectors * UNROLL
    assert asm.count("vdpbf16ps") == products
    assert not re.search(r"%zmm\d+, -?\d*\(%rsp\)", asm), "sums stay in registers"
    assert not first(kernel, PAIRED, "strict").dots


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("f32[12x4096] -> matmul(64)", range(1, 9)),
        ("f32[12x4080] -> matmul(64)", [12]),
        ("bf16[12x4096] -> matmul(64)", range(1, 9)),
        ("bf16[12x1024] -> matmul(64)", [12]),
    ],
)
def test_rows_of_a_tile_stay_in_the_first_cache(plan: str, rows: Sequence[int]) -> None:
    """A cache of 32 KiB holds 8 lines that lie whole pages apart."""
    kernel = lower(match(FusionPlan.parse(plan)))
    assert first(kernel, PAIRED, "default").rows in rows


@WEIGHTS
@pytest.mark.parametrize(("src", "features"), MATRICES[:4] + IMAGES[:4])
def test_error_stays_within_the_bound_that_is_claimed(src: str, features: int, weight: str) -> None:
    plan = FusionPlan.parse(f"f32[{src}] -> matmul({features}{weight})")
    compiled = compile_plan(plan, "cpu", cache=False)
    arrays = random_arrays(plan, 4)
    got, want = wide(compiled(**arrays)), reference(plan, arrays)
    size = reference(plan, {key: np.abs(array) for key, array in arrays.items()})
    assert (np.abs(got - want) <= compiled.choice.template.error_bound(compiled.kernel) * size).all()


@pytest.mark.parametrize(
    ("features", "inputs"), [(3072, "normal"), (1000, "large mean"), (4095, "large range")]
)
def test_a_long_sum_errs_as_its_blocks_do(features: int, inputs: str) -> None:
    """A sum of n products errs by about sqrt(n / 2) roundings, and each of these by about a half of 2^-24."""
    plan = FusionPlan.parse(f"f32[33x{features}] -> linear(40)")
    arrays = random_arrays(plan, 3, inputs=inputs)
    squares = [np.square(arrays[key].astype(np.float64)) for key in ("src", "weight")]
    made = compile_plan(plan, "cpu", threads=1, cache=False)(**arrays)
    error = (made - reference(plan, arrays)) / np.sqrt(squares[0] @ squares[1].T)
    roundings = np.sqrt(BLOCK / 2) + np.sqrt(features / BLOCK)
    assert np.sqrt(np.mean(np.square(error))) <= 0.5 * roundings * 2.0**-24


@pytest.mark.parametrize("operator", ["add", "scale", "batch_norm(per_activation)", "prelu(shared=True)"])
@pytest.mark.parametrize("weight", ["", ", batched=True"])
@pytest.mark.parametrize("src", ["31x20", "2x9x20, bsc"])
def test_operands_of_every_kind_on_both_sides(src: str, weight: str, operator: str) -> None:
    plan = FusionPlan.parse(f"f32[{src}] -> {operator} -> matmul(35{weight}) -> {operator} -> {operator}")
    assert_close(compile_plan(plan, "cpu", threads=2, cache=False), random_arrays(plan, 5))


def test_what_lies_as_rows_with_strides_do_is_refused_in_front() -> None:
    refusal = refusal_of("f32[31x20, strides=1:31] -> add -> matmul(35)", Direct, narrowed(32))
    assert refusal is not None
    assert refusal.reason is Reason.STRIDED_PROLOGUE


def test_an_activation_of_rows_with_strides_is_a_channel() -> None:
    plan = FusionPlan.parse("f32[31x20, strides=1:31] -> batch_norm(per_activation) -> matmul(35)")
    assert_close(compile_plan(plan, "cpu", threads=2, cache=False), random_arrays(plan, 5))


@pytest.mark.parametrize("lines", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 5, 8, 14])
def test_any_knobs(rows: int, lines: int) -> None:
    plan = FusionPlan.parse("bf16[960x48] -> matmul(70) -> bias -> relu")
    knobs = Direct(rows, 1, 3, 2, lines)
    if lines:
        knobs = replace(knobs, block=-(-lines * 64 // rows), block_panels=5)
    assert_close(forced(plan, Direct, narrowed(64, threads=2), knobs), random_arrays(plan, 6))


@WEIGHTS
@pytest.mark.parametrize(("src", "features"), [MATRICES[0], MATRICES[3], MATRICES[6], IMAGES[0], IMAGES[1]])
def test_nothing_outside_the_tensors_is_touched(src: str, features: int, weight: str, guarded: Any) -> None:
    plan = FusionPlan.parse(f"f32[{src}] -> matmul({features}{weight}){TAIL}")
    arrays = random_arrays(plan, 7)
    for key, spec in (("src", plan.src), ("other", plan.output)):
        held = guarded(spec)
        held[...] = arrays[key]
        arrays[key] = held
    out = guarded(plan.output)
    want = reference(plan, arrays)
    compile_plan(plan, "cpu", cache=False)(**arrays, out=out)
    np.testing.assert_allclose(out, want, atol=8 * DTYPES["f32"].epsilon * np.abs(want).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    plan = FusionPlan.parse("f32[33x12] -> matmul(20)")
    arrays = random_arrays(plan, 8)
    arrays["src"][5, 3] = value
    got = compile_plan(plan, "cpu", cache=False)(**arrays)
    assert list(np.flatnonzero(~np.isfinite(got).all(axis=1))) == [5]


def test_tf32_is_computed_in_full_precision() -> None:
    asked, full = (
        FusionPlan.parse(f"f32[40x64] -> matmul(24{precision})") for precision in (", precision=tf32", "")
    )
    arrays = random_arrays(asked, 9)
    assert_close(compile_plan(asked, "cpu", cache=False), arrays)
    assert np.array_equal(
        compile_plan(asked, "cpu", cache=False)(**arrays), compile_plan(full, "cpu", cache=False)(**arrays)
    )


def test_rows_become_positions_in_the_same_storage() -> None:
    kernel = lower(match(FusionPlan.parse("f32[960x48] -> matmul(70) -> batch_norm(per_activation)")))
    rows = as_rows(kernel)
    assert (rows.src.shape, rows.src.layout) == ((1, 48, 15, 64), "nhwc")
    assert (rows.dst.shape, rows.dst.layout) == ((1, 70, 15, 64), "nhwc")
    assert rows.contraction.is_matrix_product
    assert [operand.is_channel for operand in rows.operands] == [False, True, True, True, True]
    assert as_rows(rows) is rows


@pytest.mark.parametrize("kind", [Depthwise, DepthwisePlanes])
def test_templates_of_channels_alone_refuse_what_they_cannot_index(kind: Any) -> None:
    flat = refusal_of("f32[8x1] -> matmul(1)", kind, narrowed(32))
    assert flat is not None
    assert flat.reason is Reason.NOT_DEPTHWISE
    own = refusal_of("f32[8x6x1, bcs of bsc] -> matmul(1, batched=True)", kind, narrowed(32))
    assert own is not None
    assert own.reason is Reason.WEIGHT_PER_BATCH
    assert own.operator == 0

"""The matrix product in Triton's interpreter: dtypes, layouts, strides, tails, tiles, parts of the depth."""

from __future__ import annotations

import numpy as np
import pytest

from fuseplan.backends.triton.templates.product import LEAST_OF_I8, Product
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.data import random_arrays
from fuseplan.messages.reasons import Reason, first_refusal
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret

SM_90, GFX942 = parse_target("triton:sm_90"), parse_target("triton:gfx942")
DTYPES = ("f64", "f32", "f16", "bf16")


def lowered(plan: str) -> Kernel:
    return lower(match(FusionPlan.parse(plan)))


def candidates(plan: str, target: str = "triton:sm_90", accuracy: str | float = "default") -> list[Product]:
    found = list(Product.candidates(lowered(plan), parse_target(target), accuracy))
    return [each for each in found if isinstance(each, Product)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rest",
    [
        "[33x40] -> matmul(24) -> bias -> gelu(approximate=tanh)",
        "[7x5] -> matmul(9, transposed=True)",
        "[1x200] -> matmul(3) -> bias",
        "[3x20x17] -> matmul(19, batched=True) -> bias -> relu",
        "[3x20x17, bcs of bsc] -> matmul(19, batched=True, transposed=True) -> relu",
        "[2x20x7x7] -> conv2d(19, kernel=1) -> bias -> relu",
        "[2x20x7x7, nhwc] -> conv2d(19, kernel=1) -> batch_norm -> add -> relu",
        "[2x20x2x3x4] -> conv3d(5, kernel=1) -> batch_norm(per_activation)",
        "[2x20x2x3x4, ndhwc] -> conv3d(5, kernel=1) -> batch_norm(per_activation)",
        "[2x16x6x6, strides=1152:1:192:32] -> conv2d(16, kernel=1) -> bias -> relu",
        "[2x20x3x5, strides=900:3:300:60] -> conv2d(7, kernel=1) -> add",
        "[2x20x7x7] -> batch_norm -> relu -> conv2d(19, kernel=1)",
        "[2x20x7x7, nhwc] -> add -> silu -> conv2d(19, kernel=1) -> bias",
        "[3x5x20, bcs of bsc] -> batch_norm(per_activation) -> matmul(19, batched=True)",
        "[3x5x20] -> batch_norm(per_activation) -> matmul(19) -> bias",
    ],
)
def test_first_candidate(dtype: str, rest: str) -> None:
    kernel = lowered(dtype + rest)
    # What is multiplied has 16 bits again after a prologue.
    is_rounded = kernel.prologue and kernel.src.itemsize == 2
    slack = 2 * dtype_of(dtype).epsilon / 2.0**-23 if is_rounded else 8.0
    assert_interpreted(dtype + rest, Product, slack=slack)


FORMS = (
    Product(16, 32, 32),
    Product(32, 32, 16, split=2),
    Product(16, 16, 16, split=3, group=1),
    Product(16, 32, 32, swapped=True),
    Product(32, 16, 16, split=2, swapped=True),
    Product(32, 32, 32, parts=2),
    Product(32, 32, 32, parts=2, swapped=True, split=2),
    Product(16, 32, 32, group=2),
    Product(16, 32, 16, ahead=True),
    Product(32, 32, 16, ahead=True, split=2, swapped=True),
)


@pytest.mark.part(4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.text)
@pytest.mark.parametrize("arithmetic", ["native", "ieee", "tf32x3"])
@pytest.mark.parametrize(
    "rest",
    [
        "[90x70] -> matmul(100) -> bias -> relu",
        "[3x70x5x5] -> relu -> conv2d(66, kernel=1) -> bias -> add",
        "[2x33x70] -> sigmoid -> matmul(66, batched=True) -> bias",
    ],
)
def test_forms(form: Product, arithmetic: str, rest: str) -> None:
    dtype = "f16" if arithmetic == "native" else "f32"
    if dtype == "f16":
        rest = rest.replace("sigmoid -> ", "")
    assert_interpreted(
        dtype + rest, Product(**{**form.knobs, "arithmetic": arithmetic, "apart": arithmetic == "tf32x3"})
    )


# Sums of i8 are exact; the dtype in front of a contraction is not that which is multiplied.
INTEGERS = (
    "i8[33x40] -> linear(24)",
    "i16[33x40] -> linear(24)",
    "u8[33x40] -> dequantize(i16, zero_points=True) -> linear(24) -> dequantize(per=row)",
    "u8[2x20x5x7, nhwc] -> conv2d(22, kernel=3, padding=1) -> dequantize(per=channel)",
    "i8[33x48] -> linear(24) -> dequantize(f16) -> bias -> gelu",
    "i8[3x40x33, bcs of bsc] -> linear(19) -> dequantize(per=channel)",
    "i8[7x90] -> linear(34) -> dequantize -> glu(silu)",
    "f16[33x40] -> quantize(i8, per=row) -> linear(24) -> dequantize(per=row) -> scale -> relu",
    "i8[2x12x5x6] -> conv2d(8, kernel=3, padding=1, groups=4)",
)
CONVERTED = (
    "i8[33x40] -> dequantize(per=channel) -> linear(24)",
    "i8[2x20x5x7, nhwc] -> dequantize(f16, zero_points=True) -> conv2d(22, kernel=3, padding=1) -> relu",
    "f16[2x20x5x7] -> cast(f32) -> conv2d(22, kernel=3, padding=1) -> bias",
    "f32[7x90] -> bias -> cast(bf16) -> linear(9)",
    "f32[7x90] -> cast(f64) -> linear(9)",
    "f64[7x90] -> cast(f16) -> linear(9)",
    "f16[7x90] -> linear(9) -> cast(f64)",
    "f8e4m3[33x40] -> dequantize(bf16) -> linear(24)",
    "f8e4m3[2x20x5x7] -> conv2d(22, kernel=3, padding=1) -> bias",
    "f8e5m2[3x40x33, bcs of bsc] -> linear(19) -> relu",
    "f16[33x40] -> quantize(f8e4m3) -> linear(24) -> dequantize(f16)",
)
WHOLE = (
    Product(16, 32, 32, swapped=True),
    Product(32, 16, 32, split=2),
    Product(32, 32, 32, parts=2, split=2),
    Product(16, 32, 32, ahead=True, joined=4, swapped=True),
    Product(16, 16, 16, arithmetic="summed"),
)


@pytest.mark.parametrize("target", [SM_90, GFX942], ids=str)
@pytest.mark.parametrize("plan", INTEGERS)
def test_integers(plan: str, target: Target) -> None:
    assert_interpreted(plan, Product, target, slack=0.5 if plan.endswith("linear(24)") else 8)


@pytest.mark.parametrize("form", WHOLE, ids=lambda form: form.text)
def test_forms_of_integers(form: Product) -> None:
    for plan in (INTEGERS[0], INTEGERS[4]):
        assert_interpreted(plan, form)


def test_few_channels_of_groups_fill_an_instruction() -> None:
    assert all(each.depth >= LEAST_OF_I8 for each in candidates(INTEGERS[-1]))


def test_integers_by_copies() -> None:
    plan = "i8[33x48] -> linear(24) -> dequantize(f16)"
    assert any(each.maps for each in candidates(plan))
    assert_interpreted(plan, Product(16, 32, 32, maps=True))


@pytest.mark.parametrize("depth", [2**17 - 1, 2**17])
def test_a_sum_of_integers_is_exact_where_i32_may_not_hold_it(depth: int) -> None:
    """The least numbers of i8, whose products are 2^14, in a sum that begins 2^31."""
    for each in candidates(f"i8[1x{depth}] -> linear(1) -> dequantize"):
        assert (each.arithmetic == "native") == (depth * 2**14 < 2**31)


@pytest.mark.parametrize("target", [SM_90, GFX942], ids=str)
@pytest.mark.parametrize("plan", CONVERTED)
def test_factors_of_another_dtype(plan: str, target: Target) -> None:
    kernel = lowered(plan)
    is_rounded = kernel.prologue and kernel.weight.dtype in ("f16", "bf16")
    slack = 2 * dtype_of(kernel.weight.dtype).epsilon / 2.0**-23 if is_rounded else 8.0
    assert_interpreted(plan, Product, target, slack=slack)


MAPPED = tuple(Product(**{**form.knobs, "maps": True}) for form in FORMS if not form.ahead)


@pytest.mark.parametrize("form", MAPPED, ids=lambda form: form.text)
@pytest.mark.parametrize(
    "plan",
    [
        "bf16[90x72] -> matmul(100) -> bias -> gelu",
        "f32[90x72] -> relu -> matmul(100, transposed=True) -> bias",
        "f16[2x33x40] -> matmul(66, batched=True) -> bias",
    ],
)
@pytest.mark.part(3)
def test_tensor_maps(form: Product, plan: str) -> None:
    arithmetic = "tf32x3" if plan.startswith("f32") else "native"
    template = Product(**{**form.knobs, "arithmetic": arithmetic, "apart": arithmetic == "tf32x3"})
    assert template.maps
    assert_interpreted(plan, template)


@pytest.mark.parametrize(
    "plan", ["f32[90x70] -> matmul(100) -> bias", "f16[2x64x9x9] -> conv2d(33, kernel=1) -> relu"]
)
def test_every_candidate(plan: str) -> None:
    found = candidates(plan)
    assert len({each.text for each in found}) == len(found)
    for each in found:
        assert_interpreted(plan, each)


def test_what_a_prologue_reads_of_each_element_takes_shared_memory() -> None:
    """Such tiles of 64 rows and 256 channels took 278,528 bytes, more than a program on sm_90 has."""
    texts = (f"bf16[2x32x448] -> {each}" for each in ("matmul(784)", "mul -> matmul(784)"))
    tiles = [{(each.rows, each.features, each.depth) for each in candidates(text)} for text in texts]
    assert [(64, 32, 256) in each for each in tiles] == [True, False]


def test_copies_need_sixteen_bytes() -> None:
    assert any(each.maps for each in candidates("f16[90x72] -> matmul(100)"))
    assert any(each.maps for each in candidates("f16[1x4096] -> linear(64)"))
    unaligned = (
        "f16[90x71] -> matmul(100)",
        "f16[2x72x7x7] -> conv2d(64, kernel=1)",
        "f16[1x4097] -> linear(64)",  # one row has no stride, and a copy still takes 16 bytes
    )
    for plan in unaligned:
        assert not any(each.maps for each in candidates(plan))
    assert not any(each.maps for each in candidates("f16[90x72] -> matmul(100)", "triton:gfx942"))


@pytest.mark.parametrize(
    ("plan", "target", "accuracy", "want"),
    [
        ("f32[64x256] -> matmul(64)", SM_90, "default", "tf32x3"),
        ("f32[64x64] -> matmul(64)", SM_90, "default", "tf32x3"),
        ("f32[64x63] -> matmul(64)", SM_90, "default", "ieee"),
        ("f32[64x64] -> matmul(64)", SM_90, "strict", "ieee"),
        ("f32[64x64] -> matmul(64)", GFX942, "default", "ieee"),
        ("f32[64x64] -> matmul(64, precision=tf32)", SM_90, "default", "tf32"),
        ("f32[64x64] -> matmul(64, precision=tf32)", SM_90, "strict", "ieee"),
        ("f32[64x64] -> matmul(64, precision=tf32)", SM_90, 1e-5, "tf32x3"),
        ("f16[64x64] -> matmul(64)", SM_90, "strict", "native"),
        ("f16[64x64] -> relu -> matmul(64)", SM_90, "strict", "ieee"),
        ("f64[64x64] -> matmul(64)", SM_90, "default", "ieee"),
    ],
)
def test_arithmetic(plan: str, target: object, accuracy: str | float, want: str) -> None:
    kernel = lowered(plan)
    found = {each.arithmetic for each in Product.candidates(kernel, target, accuracy)}  # type: ignore
    assert found == {want}


def test_an_accuracy_out_of_reach_is_refused() -> None:
    refusal = first_refusal(Product.limits(lowered("f32[64x64] -> matmul(64)"), SM_90, 1e-12))
    assert refusal is not None
    assert refusal.reason is Reason.ACCURACY


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("f32[2x8x9x9] -> relu", Reason.NO_CONTRACTION),
        ("f32[2x20x3x5, strides=900:3:300:60] -> add -> conv2d(7, kernel=1)", Reason.STRIDED_PROLOGUE),
    ],
)
def test_refusals(plan: str, reason: Reason) -> None:
    refusal = first_refusal(Product.limits(lowered(plan), SM_90, "default"))
    assert refusal is not None
    assert refusal.reason is reason


@pytest.mark.parametrize("swapped", [False, True], ids=["src first", "features first"])
def test_infinities_and_nan_come_through_three_products(swapped: bool) -> None:
    plan = FusionPlan.parse("f32[6x16] -> matmul(8)")
    kernel = lower(match(plan))
    arrays = random_arrays(plan, 3)
    src, weight = arrays["src"].copy(), arrays["weight"].copy()
    src[0, 3], src[1, 2] = np.inf, np.array(0x7FFFFFFF, np.int32).view(np.float32)
    src[2, 5], src[3, 4] = np.finfo(np.float32).max, 0
    weight[4, 7] = -np.inf
    template = Product(16, 16, 16, arithmetic="tf32x3", apart=True, swapped=swapped)
    got = interpret(template, kernel, SM_90, {"src": src, "weight": weight})
    assert (got[0, :7] == np.sign(weight[3, :7]) * np.inf).all()
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[2:, :7]).all()
    assert np.isnan(got[3, 7])
    assert (got[4:, 7] == -np.sign(src[4:, 4]) * np.inf).all()


@pytest.mark.parametrize(
    "template",
    [
        Product(64, 64, 32, arithmetic="tf32x3", apart=True),
        Product(64, 64, 16, arithmetic="tf32x3", apart=True),
        Product(16, 64, 32, arithmetic="tf32x3", apart=True, swapped=True),
    ],
    ids=lambda template: template.text,
)
def test_three_products_are_as_exact_as_f32(template: Product) -> None:
    plan = FusionPlan.parse("f32[64x256] -> matmul(64)")
    kernel, arrays = lower(match(plan)), random_arrays(plan, 5)
    exact = arrays["src"].astype(np.float64) @ arrays["weight"].astype(np.float64)
    scale = np.abs(arrays["src"]).astype(np.float64) @ np.abs(arrays["weight"])
    error = np.abs(interpret(template, kernel, SM_90, arrays) - exact) / scale
    assert error.max() < template.error_bound(kernel) < 256 * 2.0**-23


def test_offsets_of_large_tensors_have_64_bits() -> None:
    text = Product(128, 128, 32).emit(lowered("f16[65536x40000] -> matmul(64)"), SM_90).text
    assert "tl.int64" in text
    assert "tl.int64" not in Product(128, 128, 32).emit(lowered("f16[65536x400] -> matmul(64)"), SM_90).text

"""Parts of an axis in pointwise kernels: both backends against float64, at every rank, dtype and odd size."""

from typing import Any

import numpy as np
import pytest

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.pointwise import Pointwise
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.product import Product
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.data import random_arrays
from fuseplan.ops.parts import PARTED
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

SAMPLES = [str(FusionPlan(text, op)) for kind in PARTED for text, op in kind.samples()]
# Operands of every kind on both sides; an extent of 1, of less than a vector, and of many.
PLANS = (
    "{d}[3x2] -> glu",
    "{d}[1x2x2] -> glu(gelu, interleaved=True)",
    "{d}[33x70] -> bias -> add -> glu -> scale -> add",
    "{d}[5x4x34, bsc] -> bias -> add -> glu(gelu, interleaved=True) -> scale -> add",
    "{d}[3x14x7x9, nhwc] -> batch_norm -> glu(silu, gate=first, axis=c) -> batch_norm -> relu",
    "{d}[3x14x7x9] -> batch_norm -> add -> glu(axis=c) -> prelu(shared=True)",
    "{d}[3x5x7x18] -> batch_norm(per_activation) -> glu(axis=w) -> batch_norm(per_activation) -> gelu",
    "{d}[1x3x2x6x5] -> glu(axis=h) -> bias",
    "{d}[2x64x5x3, strides=2000:30:5:1] -> glu(axis=c)",
    "{d}[2x3x17x64, bhsd] -> bias -> add -> rotary(32) -> scale -> add",
    "{d}[2x17x3x66, bshd] -> bias -> add -> rotary(24, interleaved=True) -> scale -> add",
    "{d}[2x5x3x22, bshd] -> rotary(batched=True) -> gelu -> gelu -> gelu",
    "{d}[2x3x5x6, strides=400:100:10:1 of bhsd] -> rotary(4)",
    "{d}[2x32x4x64, bshd] -> rotary",  # tiles without a rest, whose masks are left out
    "{d}[2x3x17x22, bhsd] -> rotary(whole=True, inverse=True)",
    "{d}[2x3x5x64, strides=4000:100:320:1 of bhsd] -> rotary(whole=True, batched=True) -> relu",
    "{d}[2x9x64, bsc] -> scale -> gelu -> gelu -> glu(mish) -> gelu -> gelu -> bias",
    "{d}[7x3x22, bsc] -> add -> glu(tanh) -> save(kept) -> gelu -> mul(other=kept)",
    "{d}[7x22] -> rotary(interleaved=True) -> save(kept) -> relu -> add(other=kept)",
)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("text", PLANS)
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.part(2)
def test_cpu(text: str, dtype: str, width: int) -> None:
    plan = FusionPlan.parse(text.format(d=dtype))
    assert_close(forced(plan, Pointwise, narrowed(width, threads=2)), random_arrays(plan, 2), slack=80)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", PLANS)
def test_triton(text: str, dtype: str) -> None:
    assert_interpreted(text.format(d=dtype), GpuPointwise, slack=80)


@pytest.mark.parametrize("text", SAMPLES)
def test_every_sample(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert_close(forced(plan, Pointwise, narrowed(32)), random_arrays(plan, 2), slack=80)
    assert_interpreted(plan, GpuPointwise, slack=80)


# Gate and value are features of one tile; operators on both sides, odd features, a single one, any window.
GATED = (
    "{d}[33x40] -> linear(64) -> glu(silu, gate=first)",
    "{d}[7x13] -> linear(34) -> bias -> glu -> scale -> add",
    "{d}[1x3] -> linear(2) -> glu",
    "{d}[7x3] -> linear(2) -> glu -> relu",
    "{d}[2x3x4x5] -> conv2d(2, kernel=3, padding=1) -> bias -> glu(axis=c)",
    "{d}[64x70] -> matmul(514) -> prelu(shared=True) -> glu(relu) -> bias",
    "{d}[2x3x5x7x8, abhsc] -> linear(38) -> glu(interleaved=True)",
    "{d}[2x5x13, bsc] -> scale -> gelu -> linear(46) -> bias -> gelu -> gelu -> glu(gelu, interleaved=True) "
    "-> relu -> save(kept) -> gelu -> gelu -> mul(other=kept)",
    "{d}[3x9x11x12, nhwc] -> conv2d(22, kernel=3, stride=2) -> batch_norm -> glu(axis=c) -> add",
)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("text", GATED)
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.part(3)
def test_gated_products_on_the_cpu(text: str, dtype: str, width: int) -> None:
    plan = FusionPlan.parse(text.format(d=dtype))
    for template in Direct.candidates(lower(match(plan)), narrowed(width, 2), "default"):
        compiled = forced(plan, Direct, narrowed(width, 2), template)
        assert_close(compiled, random_arrays(plan, 2), slack=80)


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("text", GATED)
def test_gated_products_on_gpus(text: str, dtype: str) -> None:
    plan = text.format(d=dtype)
    is_rounded = dtype == "bf16" and lower(match(FusionPlan.parse(plan))).prologue
    assert_interpreted(plan, Product, slack=2**17 if is_rounded else 80)


GATED_FORMS = (
    Product(16, 32, 16, swapped=True),
    Product(16, 16, 16, split=3),
    Product(32, 32, 16, parts=2, split=2),
    Product(32, 16, 16, parts=2, swapped=True),
    Product(16, 32, 16, maps=True, swapped=True, parts=2),
    Product(16, 32, 16, ahead=True, joined=4, swapped=True),
)


@pytest.mark.parametrize("form", GATED_FORMS, ids=lambda form: form.text)
def test_forms_of_gated_products(form: Product) -> None:
    assert_interpreted("f16[33x40] -> linear(70) -> bias -> glu(silu, gate=first) -> mul", form)


@pytest.mark.parametrize("form", [form for form in GATED_FORMS if not form.maps], ids=lambda form: form.text)
def test_forms_of_gated_convolutions(form: Product) -> None:
    plan = "f16[2x20x5x7] -> conv2d(22, kernel=3, padding=1) -> batch_norm -> glu(axis=c, interleaved=True)"
    assert_interpreted(plan, form)


def test_gate_and_value_are_read_in_one_product() -> None:
    kernel = lower(match(FusionPlan.parse("bf16[512x256] -> linear(512) -> bias -> glu(silu)")))
    text = Product(64, 64, 64, parts=2).emit(kernel, parse_target("triton:sm_90")).text
    assert text.count("tl.dot(") == text.count("tl.load(op_bias") == text.count("tl.store(") == 1


def test_nothing_outside_dst_is_written_nor_outside_src_read(guarded: Any) -> None:
    for text in ("f32[3x5x34] -> glu", "f32[3x5x38] -> rotary(12, interleaved=True)"):
        plan = FusionPlan.parse(text)
        arrays, compiled = random_arrays(plan, 8), forced(plan, Pointwise, narrowed(32))
        want = compiled(**arrays)
        src, dst = guarded(plan.src), guarded(plan.output)
        src[...] = arrays.pop("src")
        np.testing.assert_array_equal(compiled(src, out=dst, **arrays), want)


def test_offsets_of_large_tensors_have_64_bits() -> None:
    target = parse_target("triton:sm_90")

    def text(plan: str) -> str:
        kernel = lower(match(FusionPlan.parse(plan)))
        return next(iter(GpuPointwise.candidates(kernel, target, "default"))).emit(kernel, target).text

    assert "int64" not in text("f16[65536x8192] -> glu")
    assert "int64" in text("f16[65536x65536] -> glu")


def test_angles_are_read_once() -> None:
    kernel = lower(match(FusionPlan.parse("f16[2x32x512x128, bhsd] -> rotary")))
    target = parse_target("triton:sm_90")
    source = next(iter(GpuPointwise.candidates(kernel, target, "default"))).emit(kernel, target)
    assert source.text.count("tl.load(op_cos") == 1
    assert source.text.count("tl.load(src") == 2

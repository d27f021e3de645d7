"""Every dtype in kernels for GPUs: interpreted, with all elements and many numbers, and compiled."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from every_number import every_code, exact_codes, floats
from fuseplan.backends.triton.compiler import compile_source
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.product import Product
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target, parse_target
from fuseplan.language.dtypes import CONVERTED, dtype_of, narrow, widen
from fuseplan.ops.conversion import CONVERSIONS
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted, interpret

TARGET = parse_target("triton:sm_90")
SAMPLES = [str(FusionPlan(tensor, op)) for kind in CONVERSIONS for tensor, op in kind.samples()]
OLDER = parse_target("triton:sm_80")  # without instructions for fp8
COMPUTE = ("f32", "f64")


def converted(x: NDArray[Any], before: str, after: str, target: Target = TARGET) -> NDArray[Any]:
    """The elements as a kernel of one cast stores them."""
    kernel = lower(match(FusionPlan.parse(f"{before}[1x{x.size}] -> cast({after})")))
    template = GpuPointwise("flat", 1, 4096, 0, 4)
    with np.errstate(invalid="ignore"):  # of NaN that signal
        return interpret(template, kernel, target, {"src": x.reshape(1, -1)}).reshape(-1)


@pytest.mark.parametrize("plan", SAMPLES)
def test_samples(plan: str) -> None:
    assert_interpreted(plan, GpuPointwise)


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("dtype", [name for name in CONVERTED if name != "f64"])
def test_every_number_is_rounded_as_numpy_does(dtype: str, compute: str) -> None:
    with np.errstate(over="ignore"):
        x = floats(dtype_of(dtype)).astype(dtype_of(compute).array)
    got = widen(converted(x, compute, dtype), dtype)
    np.testing.assert_array_equal(got, widen(narrow(x.astype(np.float64), dtype), dtype))


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("dtype", [name for name in CONVERTED if name not in COMPUTE])
def test_every_element_is_widened_exactly(dtype: str, compute: str) -> None:
    codes = every_code(dtype_of(dtype))
    want = exact_codes(dtype_of(dtype)).astype(dtype_of(compute).array)
    np.testing.assert_array_equal(converted(codes, dtype, compute), want)


@pytest.mark.parametrize("compute", COMPUTE)
def test_bits_make_the_same_fp8_as_instructions(compute: str) -> None:
    with np.errstate(over="ignore"):
        x = floats(dtype_of("f8e4m3")).astype(dtype_of(compute).array)
    got, want = (widen(converted(x, compute, "f8e4m3", target), "f8e4m3") for target in (OLDER, TARGET))
    np.testing.assert_array_equal(got, want)
    codes = every_code(dtype_of("f8e4m3"))
    got, want = (converted(codes, "f8e4m3", compute, target) for target in (OLDER, TARGET))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("tensor", ["3x37", "2x13x9x11, nhwc", "2x5x3x7, strides=500:100:10:1"])
@pytest.mark.parametrize(
    "chain",
    [
        "bias -> cast(f8e4m3) -> relu -> cast(f16)",
        "cast(f64) -> bias -> add -> cast(f8e5m2)",
        "add -> cast(i8) -> cast(f32) -> bias -> cast(bool)",
    ],
)
def test_operators_behind_a_cast_see_the_rounded_number(chain: str, tensor: str) -> None:
    assert_interpreted(f"f16[{tensor}] -> {chain}", GpuPointwise)


@pytest.mark.part(3)
@pytest.mark.parametrize("target", ["triton:sm_80", "triton:sm_90", "triton:gfx942"])
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("dtype", [name for name in CONVERTED if name != "f64"])
def test_every_dtype_compiles(dtype: str, compute: str, target: str) -> None:
    known = parse_target(target)
    for text in (f"{compute}[4x1000] -> cast({dtype})", f"{dtype}[4x1000] -> cast({compute})"):
        kernel = lower(match(FusionPlan.parse(text)))
        template = next(iter(GpuPointwise.candidates(kernel, known, "default")))
        source = template.emit(kernel, known)
        assert compile_source(source, types_of(source, kernel, template, known), known).binary


@pytest.mark.parametrize("swapped", [False, True])
def test_bytes_made_in_registers_stand_on_either_side(swapped: bool) -> None:
    plan = "f16[16x128] -> quantize(i8, per=row) -> linear(64) -> dequantize(f16, per=row)"
    found = Product.candidates(lower(match(FusionPlan.parse(plan))), TARGET, "default")
    assert_interpreted(plan, next(e for e in found if isinstance(e, Product) and e.swapped == swapped))

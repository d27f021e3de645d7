"""Every scalar function as Triton text, interpreted, against a wider reference; and compiled as Gluon.

Errors are in units of the last place of the right result. The interpreter's primitives are NumPy's: what a
GPU's approximations add to the 16-bit forms is measured on one, `docs/measured.md`.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.compiler import compile_source
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.formula import parse_expression
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import FUNCTIONS, NUMPY, Scalar, fold, text
from interpreted import interpret
from last_places import (
    assert_within,
    bases_and_exponents,
    doubles,
    edges,
    every_exponent,
    exact_numpy,
    powers,
    reference,
    ulps,
)

TYPES = {"float": "f32", "double": "f64"}
Array = NDArray[Any]
TARGET = parse_target("triton:sm_90")
TILE = GpuPointwise("flat", 1, 1 << 16, 0, 4)

# The largest seen over an eleventh of all floats: exp 0.92, expm1 1.36, log 1.06, log1p 1.41, tanh 1.09,
# erf 1.58; of doubles: exp 0.69, expm1 2.2, log 0.6, log1p 1.7, tanh 2.7, erf 1.0.
EXACT = {"sqrt": 0.5, "abs": 0.0, "neg": 0.0}
ULPS = {element: dialect.PLACES[dtype] | EXACT for element, dtype in TYPES.items()}
BY_MULTIPLICATION = 2.0  # a power by two roundings
ROUNDED = 0.51  # of a result that is rounded to 16 bits once: half a place, and what comes before it


def evaluated(formula: str, x: Array, dtype: str, **parameters: float) -> Array:
    """The formula of each element, as a pointwise kernel computes it; bf16 is given and made as bits."""
    given = "".join(f", {key}={value!r}" for key, value in parameters.items())
    plan = FusionPlan.parse(f'{dtype}[1x{x.size}] -> elementwise("{formula}"{given})')
    with np.errstate(all="ignore"):  # of NaN that signal
        made: Array = interpret(TILE, lower(match(plan)), TARGET, {"src": x.reshape(1, -1)}, parameters)
    return made.reshape(-1)


def arguments(element: str) -> Array:
    if element == "double":
        return np.concatenate([doubles()[::3], edges(element)])
    dense = np.linspace(-20, 20, 100_001, dtype=np.float32)
    return np.concatenate([every_exponent()[::3], edges(element), dense])


@exact_numpy
@pytest.mark.parametrize("name", [name for name in ULPS["float"] if name != "pow"])
@pytest.mark.parametrize("element", ["float", "double"])
def test_functions_of_one_argument(name: str, element: str) -> None:
    x = arguments(element)
    formula = "-x" if name == "neg" else f"{name}(x)"
    assert_within(ULPS[element][name], evaluated(formula, x, TYPES[element]), reference(name, x), x)


@exact_numpy
@pytest.mark.parametrize("exponent", [0.5, -0.5, 1.0, 2.0, 3.0, 4.0, -1.0, -2.0, 1.7, -3.0])
@pytest.mark.parametrize("element", ["float", "double"])
def test_powers_of_a_number(exponent: float, element: str) -> None:
    x = arguments(element)
    want = powers(x, np.full_like(x, exponent))
    got = evaluated(f"x**{exponent}", x, TYPES[element])
    if exponent in (0.5, -0.5, 1, 2, 3, 4, -1):
        assert_within(BY_MULTIPLICATION, got, want, x)
    else:
        assert_power(got, want, x)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 1.7, -3.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("element", ["float", "double"])
def test_powers_to_a_parameter(exponent: float, element: str) -> None:
    x = edges(element)
    plan = FusionPlan.parse(f'{TYPES[element]}[1x{x.size}] -> elementwise("x**k", k=2.5)')
    given = {"src": x.reshape(1, -1)}
    with np.errstate(all="ignore"):
        got = interpret(TILE, lower(match(plan)), TARGET, given, {"k": exponent}).reshape(-1)
    assert_power(got, powers(x, np.full_like(x, exponent)), x)


def assert_power(got: Array, want: Array, x: Array) -> None:
    """float is rounded once. Of double the error grows with the result's logarithm: 1.6 places each 1."""
    with np.errstate(all="ignore"):
        size = np.where(np.isfinite(want) & (want != 0), np.abs(np.log(np.abs(want))), 0).astype(np.float64)
    bound = 0.6 if got.dtype == np.float32 else 2 + 1.8 * size
    error = ulps(got, want)
    worst = int(np.argmax(error - bound))
    assert (error <= bound).all(), f"{error[worst]} at {x[worst]!r}: {got[worst]!r}, not {want[worst]!r}"


def test_powers_of_a_range() -> None:
    x, y = bases_and_exponents("float")
    chosen = np.unique(y.round(1))[::997]
    for exponent in chosen[np.abs(chosen) < 100]:
        assert_power(evaluated(f"x**{exponent}", x, "f32"), powers(x, np.full_like(x, exponent)), x)


@pytest.mark.parametrize("bound", [0.0, 6.0, -1.5, math.inf, -math.inf, math.nan, 0.1])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("element", ["float", "double"])
def test_extremes_keep_nan(bound: float, name: str, element: str) -> None:
    x = edges(element)
    plan = FusionPlan.parse(f'{TYPES[element]}[1x{x.size}] -> elementwise("{name}(x, k)", k=0)')
    given = {"src": x.reshape(1, -1)}
    got = interpret(TILE, lower(match(plan)), TARGET, given, {"k": bound}).reshape(-1)
    want = NUMPY[name](x, x.dtype.type(bound))
    assert np.array_equal(got, want, equal_nan=True)
    if not math.isnan(bound):
        assert np.array_equal(evaluated(f"{name}({bound:g}, x)", x, TYPES[element]), want, equal_nan=True)


@pytest.mark.parametrize("element", ["float", "double"])
def test_numbers_have_the_compute_type(element: str) -> None:
    x = np.linspace(-1, 1, 64).astype({"float": np.float32, "double": np.float64}[element])
    kind = x.dtype.type
    got = evaluated("where(x > 0.1, 0.1, 0.3) + x * 0.7 - minimum(x, 0.2) / 0.9", x, TYPES[element])
    want = (
        np.where(x > kind(0.1), kind(0.1), kind(0.3)) + x * kind(0.7) - np.minimum(x, kind(0.2)) / kind(0.9)
    )
    assert np.array_equal(got, want)
    overflowed = evaluated("minimum(x, 1e300)", np.full(4, np.inf, x.dtype), TYPES[element])
    assert np.array_equal(
        overflowed, np.full(4, 1e300).astype(x.dtype) if element == "double" else np.full(4, np.inf)
    )


FORMULAS = [
    "exp(x)", "expm1(x)", "log1p(x)", "sqrt(x)", "tanh(x)", "erf(x)", "sigmoid(x)", "softplus(x)", "x**1.7",
    "x**-2", "x / 3", "1 / x", "x * sigmoid(x)", "log(x)",
]  # fmt: skip


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sixteen_bit_results_are_rounded_once(formula: str, dtype: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits if dtype == "bf16" else bits.view(np.float16)
    with np.errstate(all="ignore"):
        exact = wide(x)
        want = np.asarray(fold(parse_expression(formula, ("x",)), {"x": exact}, NUMPY))
        got = wide(evaluated(formula, x, dtype))
    # bf16 has the range of float: what is nearly denormal there may be zero, and of a large power infinite.
    mantissa, lowest, largest = (7, -120, 3.38e38) if dtype == "bf16" else (10, -14, 65472.0)
    compared = (np.abs(want) < largest) & ((np.abs(want) > 2.0**lowest) | (want == 0))
    place = np.ldexp(1.0, np.clip(np.frexp(want)[1], lowest + 1, None) - mantissa - 1)
    with np.errstate(all="ignore"):
        error = np.where(compared, np.abs(got - want) / place, 0)
    worst = int(np.nanargmax(error))
    assert error[worst] <= ROUNDED, f"{error[worst]} at {exact[worst]}: {got[worst]}, not {want[worst]}"
    assert np.array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize(
    "formula", ["1 + tanh(x)", "erf(x) + 1", "0.5 * x * (1 + erf(x))", "2 / (1 + exp(-x))"]
)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_shorter_forms_are_as_exact(formula: str, dtype: str) -> None:
    kind = np.float32 if dtype == "f32" else np.float16
    x = np.linspace(-12, 12, 10_001).astype(kind)
    want = np.asarray(fold(parse_expression(formula, ("x",)), {"x": x.astype(np.float64)}, NUMPY))
    got = evaluated(formula, x, dtype)
    scale = 6e-7 if dtype == "f32" else 5.1e-4
    np.testing.assert_allclose(got, want, rtol=scale, atol=scale / 2)


def written(formula: str, dtype: str = "f16") -> str:
    """The lines that a formula of `x` becomes."""
    lines = Text()
    made = dialect.simplified(parse_expression(formula, ("x",)))
    fold(made, {"x": "x"}, dialect.table(lines, "tl", dtype))
    return str(lines)


@pytest.mark.parametrize("formula", ["sigmoid(x)", "x * sigmoid(x)", "0.5 * x * (1 + tanh(x))", "1 + erf(x)"])
def test_common_activations_take_one_exponential(formula: str) -> None:
    lines = written(formula)
    assert lines.count("tl.exp(") + lines.count("tl.exp2(") == 1
    assert "tl.erf" not in lines


def test_shared_parts_are_computed_once() -> None:
    assert written("exp(x) * exp(x) + exp(x)").count("tl.exp(") == 1


@pytest.mark.parametrize("formula", ["x + tanh(x)", "2 + tanh(x)", "where(x > 0, 1, x) / (1 + x)"])
def test_other_forms_stay(formula: str) -> None:
    made = parse_expression(formula, ("x",))
    assert dialect.simplified(made) == made


def test_numbers_alone_are_folded() -> None:
    assert re.fullmatch(r"product_0 = x \* 7\.38905\d*\n", written("x * exp(2)"))
    assert written("x * where(2 > 1, 3, 4)") == "product_0 = x * 3.0\n"


def test_the_table_is_complete() -> None:
    assert {*FUNCTIONS, "const"} <= set(dialect.table(Text()))


ALL = (
    "maximum(exp(x), expm1(x)) + log(abs(x)) * log1p(x) - sqrt(x) / tanh(x) + erf(x) + pow(x, 1.7) + 2**x"
    " + where(x > 0.1, 0.1, 0.2) + sigmoid(x) * (1 + erf(x)) * (1 + tanh(x)) + x / 3 + minimum(x, -x)"
    " + where(x >= 3, x, 3) + round(x)"
)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_every_function_compiles_as_gluon(dtype: str) -> None:
    made = dialect.simplified(parse_expression(ALL, ("x",)))
    assert functions_of(made) >= set(FUNCTIONS) - {"neg", "add"} | {"one_plus_erf", "sigmoid"}
    lines = Text()
    lines.line(
        "from triton.experimental import gluon", "from triton.experimental.gluon import language as gl"
    )
    lines.line("import triton.language as tl", "@gluon.jit")
    with lines.block("def k(src, dst)"):
        lines.line("at = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))")
        lines.line("x = gl.load(src + at).to(gl.float32)")
        result = fold(made, {"x": "x"}, dialect.table(lines, "gl", dtype))
        lines.line(f"gl.store(dst + at, {result}.to(dst.dtype.element_ty))")
    source = Source(
        str(lines), "k", (Slot("src"), Slot("dst")), language="gluon", options=(("num_warps", 4),)
    )
    kind = {"f32": "*fp32", "f16": "*fp16"}[dtype]
    assert compile_source(source, (kind, kind), TARGET).binary


def functions_of(root: Scalar) -> set[str]:
    below = [arg for arg in root.args if isinstance(arg, Scalar)]
    return {root.fn}.union(*map(functions_of, below))


@pytest.mark.parametrize("kind", ["triton:sm_90", "triton:gfx942"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "f64"])
def test_every_function_compiles(kind: str, dtype: str) -> None:
    kernel = lower(match(FusionPlan.parse(f'{dtype}[1x4096] -> elementwise("{ALL}")')))
    source = GpuPointwise("flat", 1, 512, 0, 4).emit(kernel, parse_target(kind))
    pointer = {"f32": "*fp32", "f16": "*fp16", "f64": "*fp64"}[dtype]
    assert compile_source(source, (pointer, pointer), parse_target(kind)).binary


def test_formulas_print() -> None:
    """What a plan's text says is what was given: the shorter forms are of the generated text alone."""
    assert text(parse_expression("1 + tanh(x)", ("x",))) == "1 + tanh(x)"


def test_the_error_of_a_function_is_that_of_the_stored_dtype() -> None:
    assert dialect.relative_error("add", "f32") == dialect.relative_error("add", "f16") == 2.0**-24
    assert dialect.relative_error("exp", "f64") < dialect.relative_error("exp", "f32")
    assert dialect.relative_error("exp", "f32") < dialect.relative_error("exp", "f16") < 2.0**-16

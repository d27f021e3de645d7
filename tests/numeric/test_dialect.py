"""Every function of the CPU backend's dialect, compiled for this machine and compared with a wider reference.

Errors are in units of the last place of the right result. Functions of one float are compared at every
exponent; double is compared with the C library's long double, whose own error matters only where that is no
wider than a double.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan.backends.cpu import dialect, toolchain
from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import I64, PTR, Module
from fuseplan.kernels.target import host_target
from fuseplan.language.words import WORDS
from fuseplan.scalar import CASTS, FUNCTIONS, INDEXED, NUMPY
from last_places import (
    DTYPES,
    assert_within,
    bases_and_exponents,
    doubles,
    edges,
    every_exponent,
    exact_numpy,
    pairs,
    powers,
    reference,
)

Array = NDArray[Any]
Table = dict[str, Callable[..., Value]]
Formula = Callable[..., Value]  # of the table and the arguments

LANES = {"float": (4, 8, 16), "double": (2, 4, 8)}
ATTRIBUTES = '"min-legal-vector-width"="512" "prefer-vector-width"="512" "no-trapping-math"="true"'

# The largest errors allowed. The largest seen over an eleventh of all floats: exp 1.00, expm1 1.49, log 0.96,
# log1p 1.50, tanh 1.31, erf 1.75.
FLOAT_ULPS = {
    "exp": 1.05, "expm1": 1.6, "log": 1.05, "log1p": 1.6, "sqrt": 0.5, "tanh": 1.4, "erf": 1.85,
    "abs": 0, "neg": 0,
}  # fmt: skip
DOUBLE_ULPS = {
    "exp": 1.2, "expm1": 2.6, "log": 1.5, "log1p": 2.0, "sqrt": 0.5, "tanh": 1.6, "erf": 1.6,
    "abs": 0, "neg": 0,
}  # fmt: skip
ROUNDING = 0.5  # of an operation that IEEE 754 rounds correctly
POW_FLOAT_ULPS, POW_DOUBLE_ULPS = 0.6, 1.2
BY_MULTIPLICATION_ULPS = 2.0  # a power by two roundings


def written(formula: Formula, arity: int, element: str, lanes: int) -> str:
    """A function that applies `formula` to `arity` arrays, a whole number of vectors each."""
    module = Module(ATTRIBUTES, host_target().features)
    pointers = [(PTR, f"x{i}") for i in range(arity)]
    b = Builder(module, "apply", [*pointers, (PTR, "dst"), (I64, "count")], element=element, lanes=lanes)
    *sources, dst, count = b.parameters
    table = dialect.table(b)
    with b.loop(0, count, lanes) as i:
        b.store(formula(table, *(b.load(b.at(source, i)) for source in sources)), b.at(dst, i))
    b.finish()
    return module.text()


def compiled(
    formula: Formula, arity: int = 1, element: str = "float", lanes: int = 8
) -> Callable[..., Array]:
    """`formula` as a function of arrays of one length."""
    code = toolchain.compile_object(written(formula, arity, element, lanes))
    address = toolchain.load_object(code, ("apply",))["apply"]
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (arity + 1), ctypes.c_int64)

    def run(*arrays: Array) -> Array:
        call = kind(address)  # the address keeps the code, and no function of ctypes keeps the address
        padding = np.ones(-arrays[0].size % lanes, DTYPES[element])
        padded = [np.concatenate([array.astype(DTYPES[element]), padding]) for array in arrays]
        dst = np.empty_like(padded[0])
        call(*(array.ctypes.data for array in padded), dst.ctypes.data, dst.size)
        return dst[: arrays[0].size]

    return run


@functools.cache
def function(name: str, element: str = "float", lanes: int = 8) -> Callable[..., Array]:
    """One entry of the table as a function of arrays."""
    return compiled(lambda table, *xs: table[name](*xs), FUNCTIONS[name], element, lanes)


@pytest.mark.parametrize("name", FLOAT_ULPS)
def test_float_functions_of_one_argument(name: str) -> None:
    x = np.concatenate([every_exponent(), edges("float"), np.linspace(-20, 20, 200_001, dtype=np.float32)])
    assert_within(FLOAT_ULPS[name], function(name, "float", 16)(x), reference(name, x), x)


@pytest.mark.parametrize("name", DOUBLE_ULPS)
def test_double_functions_of_one_argument(name: str) -> None:
    x = np.concatenate([doubles(), edges("double")])
    assert_within(DOUBLE_ULPS[name], function(name, "double", 8)(x), reference(name, x), x)


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_arithmetic_is_rounded_once(name: str, element: str) -> None:
    x, y = pairs(element)
    with np.errstate(all="ignore"):
        want = NUMPY[name](x, y)
    got = function(name, element)(x, y)
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremes_keep_nan(name: str, element: str) -> None:
    x, y = pairs(element)
    assert np.array_equal(function(name, element)(x, y), NUMPY[name](x, y), equal_nan=True)


@pytest.mark.parametrize("bound", [0.0, 6.0, -1.5, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
@pytest.mark.parametrize("is_first", [True, False])
def test_extremes_with_a_number_keep_nan(name: str, bound: float, is_first: bool) -> None:
    def formula(table: Table, x: Value) -> Value:
        number = table["const"](bound)
        return table[name](number, x) if is_first else table[name](x, number)

    x = edges("float")
    assert np.array_equal(compiled(formula)(x), NUMPY[name](x, bound), equal_nan=True)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_an_extreme_with_a_number_is_one_instruction_on_x86(name: str) -> None:
    text = written(lambda table, x: table[name](x, table["const"](6.0)), 1, "float", 8)
    lines = toolchain.assembly(text, triple="x86_64-linux-gnu", cpu="haswell").splitlines()
    words = [line.split()[0] for line in lines if line.startswith("\tv")]
    expected = f"v{name[:3]}ps"
    assert [word for word in words if "mov" not in word] == ["vbroadcastss", expected, "vzeroupper"]


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", ["gt", "ge"])
def test_comparisons_choose(name: str, element: str) -> None:
    def formula(table: Table, x: Value, y: Value) -> Value:
        return table["where"](table[name](x, y), x, table["const"](7.0))

    x, y = pairs(element)
    want = np.where(NUMPY[name](x, y), x, DTYPES[element].type(7))
    assert np.array_equal(compiled(formula, 2, element)(x, y), want, equal_nan=True)


@pytest.mark.parametrize("value", [1.0, -0.1, 1e-42, 1e-60, 3.5e38, 1e300, -1e300, math.inf])
@pytest.mark.parametrize("element", DTYPES)
def test_numbers_are_rounded_to_the_type(value: float, element: str) -> None:
    got = compiled(lambda table, x: table["add"](table["const"](value), x), 1, element)(np.zeros(8))
    with np.errstate(over="ignore"):
        assert np.array_equal(got, np.full(8, value).astype(DTYPES[element]))


@pytest.mark.parametrize(("element", "bound"), [("float", POW_FLOAT_ULPS), ("double", POW_DOUBLE_ULPS)])
def test_powers(element: str, bound: float) -> None:
    for x, y in (bases_and_exponents(element), pairs(element)):
        assert_within(bound, function("pow", element)(x, y), powers(x, y), x, y)


@exact_numpy
@pytest.mark.parametrize(
    ("exponent", "bound"),
    [
        (0.0, 0.0), (1.0, 0.0), (math.inf, 0.0), (-math.inf, 0.0),
        (2.0, ROUNDING), (-1.0, ROUNDING), (0.5, ROUNDING),
        (3.0, BY_MULTIPLICATION_ULPS), (4.0, BY_MULTIPLICATION_ULPS), (-0.5, BY_MULTIPLICATION_ULPS),
        (-2.0, POW_FLOAT_ULPS), (1.7, POW_FLOAT_ULPS), (-3.0, POW_FLOAT_ULPS),
    ],
)  # fmt: skip
def test_powers_of_a_number(exponent: float, bound: float) -> None:
    x = np.concatenate([every_exponent(), edges("float")])
    got = compiled(lambda table, x: table["pow"](x, table["const"](exponent)))(x)
    assert_within(bound, got, powers(x, np.full_like(x, exponent)), x)


@pytest.mark.parametrize("base", [2.0, 0.5, -2.0, 1.0, 0.0])
def test_powers_to_a_variable(base: float) -> None:
    y = np.concatenate([every_exponent(), edges("float"), np.arange(-160, 160, dtype=np.float32)])
    got = compiled(lambda table, y: table["pow"](table["const"](base), y))(y)
    assert_within(POW_FLOAT_ULPS, got, powers(np.full_like(y, base), y), y)


def samples(name: str, element: str) -> Sequence[Array]:
    """Arguments of a function of the table, a few thousand."""
    if FUNCTIONS[name] == 2:
        return pairs(element)
    return [np.concatenate([edges(element), np.linspace(-100, 100, 999).astype(DTYPES[element])])]


NUMERIC = [name for name in FUNCTIONS if name not in ("where", "gt", "ge")]


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", NUMERIC)
def test_every_width_gives_the_same_bits(name: str, element: str) -> None:
    arguments = samples(name, element)
    first, *others = (function(name, element, lanes)(*arguments) for lanes in LANES[element])
    for other in others:
        assert np.array_equal(other, first, equal_nan=True)
        assert np.array_equal(np.signbit(other[first == 0]), np.signbit(first[first == 0]))


def test_the_table_is_complete() -> None:
    table = dialect.table(Builder(Module(), "apply", []))
    assert set(table) == {*FUNCTIONS, *CASTS, *INDEXED, *WORDS, "const", "exp_below"}


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("name", NUMERIC)
@pytest.mark.part(2)
def test_every_function_compiles_for_aarch64(name: str, element: str) -> None:
    text = written(lambda table, *xs: table[name](*xs), FUNCTIONS[name], element, LANES[element][0])
    assembly = toolchain.assembly(text, triple="aarch64-linux-gnu")
    calls = {line.split()[1] for line in assembly.splitlines() if line.startswith("\tbl\t")}
    of_libm = {"erf", "pow"} if element == "double" else set()
    assert calls == {name} & of_libm

"""Numbers as bits, and the polynomials of the elementary functions.

Three formats: FLOAT and DOUBLE compute a function to about the last place of their type. WIDE computes in
double what will be rounded to float, with shorter polynomials: it carries what a power needs beyond float.

The polynomials are minimax (Remez's exchange; for FLOAT the coefficients were rounded one at a time from the
lowest, the others fitted again by linear programming). Each is fitted to the function's relative error on the
whole of its interval:

| field | is the polynomial of | interval | relative error of FLOAT, DOUBLE, WIDE |
| --- | --- | --- | --- |
| `exp` | (e^r - 1 - r) / r^2 | abs(r) <= ln(2)/2 | 2^-31.1, 2^-55.6, 2^-34.2 |
| `log` | (log(1 + f) - f) / f^2 | sqrt(1/2) <= 1 + f <= sqrt(2) | 2^-27.8, 2^-56.8, 2^-35.7 |
| `tanh` | (tanh(x) - x) / x^3, in x^2 | abs(x) <= 0.5625 | 2^-29.4, 2^-54.8, as DOUBLE |
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, replace
from fractions import Fraction

from fuseplan.backends import polynomials
from fuseplan.backends.cpu.ir import Builder, Operand, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point type and how functions are computed in it.

    Attributes:
        element: LLVM's name of the type.
        integer: the integer of its width.
        fraction: bits of the significand that are stored.
        bias: what is added to an exponent where it is stored.
        exp_range: below it exp is 0, above it infinity.
        expm1_low: at and below it expm1 is -1.
        tanh_high: at and above it tanh is 1.
        exp, log, tanh: coefficients, the constant first; see the module.
        has_denormals: whether an argument of log may be denormal.
    """

    element: str
    integer: str
    fraction: int
    bias: int
    exp_range: tuple[float, float]
    expm1_low: float
    tanh_high: float
    exp: tuple[float, ...]
    log: tuple[float, ...]
    tanh: tuple[float, ...]
    has_denormals: bool = True

    def rounder(self, offset: int = 0) -> float:
        """Added to a small number, it leaves the nearest integer plus `offset` in the low bits of the sum."""
        return 1.5 * 2.0**self.fraction + offset


FLOAT = Format(
    element="float",
    integer="i32",
    fraction=23,
    bias=127,
    exp_range=(-104.0, 89.0),
    expm1_low=-18.0,
    tanh_high=10.0,
    exp=polynomials.EXP,
    log=polynomials.LOG,
    tanh=polynomials.TANH,
)

DOUBLE = Format(
    element="double",
    integer="i64",
    fraction=52,
    bias=1023,
    exp_range=(-746.0, 710.0),
    expm1_low=-38.0,
    tanh_high=20.0,
    exp=(
        0.5000000000000006, 0.16666666666666588, 0.041666666666576105, 0.008333333333389944,
        0.0013888888931795115, 0.0001984126971837416, 2.4801504978820914e-05, 2.7557407836233484e-06,
        2.762616142552938e-07, 2.5053785491042203e-08,
    ),
    log=(
        -0.5000000000000003, 0.33333333333333026, -0.24999999999974926, 0.20000000000085222,
        -0.16666666671354982, 0.14285714279618866, -0.12499999604538935, 0.11111111099062812,
        -0.10000017937649913, 0.09090927440811489, -0.08332864101120947, 0.07691433219857023,
        -0.07149937516168399, 0.06685933309294277, -0.061943630312752525, 0.05658980059226694,
        -0.056781313613854884, 0.06529515003839152, -0.060060414556755135, 0.026173607494391245,
    ),
    tanh=(
        -0.33333333333331777, 0.13333333333093533, -0.05396825383985586, 0.0218694851237245,
        -0.008863183245867769, 0.003591630126428665, -0.00145277935986829, 0.0005778542596098962,
        -0.00020822977456174963, 4.96038523978506e-05,
    ),
)  # fmt: skip

WIDE = replace(
    DOUBLE,
    exp=(
        0.5000000068037193, 0.16666665864594396, 0.04166629363530673, 0.008333497672666803,
        0.0013944758512469716, 0.00019790244841429443,
    ),
    log=(
        -0.5000000002151931, 0.33333334043681845, -0.2499999482906107, 0.19999898135452196,
        -0.16666927469630308, 0.1429057126672614, -0.1249741239186279, 0.1100960992334507,
        -0.09927305755961004, 0.10015392565786962, -0.09871904347175464, 0.053586715017855086,
    ),
    has_denormals=False,
)  # fmt: skip

_LN2 = Fraction("0.69314718055994530941723212145817656807550013436025525412068")


def rounded(value: float | Fraction, element: str) -> float:
    """The number of the type `float` or `double` that is nearest to `value`; too large a one is infinite."""
    return ctypes.c_float(float(value)).value if element == "float" else float(value)


def bits(value: float, form: Format) -> int:
    """A number as the integer of its bits."""
    kind, integer = ("f", "i") if form.element == "float" else ("d", "q")
    stored: int = struct.unpack(integer, struct.pack(kind, value))[0]
    return stored


def ln2(element: str) -> tuple[float, float]:
    """ln 2 in two parts: the nearest number of the type, and what it lacks."""
    first = rounded(_LN2, element)
    return first, float(_LN2 - Fraction(first))


def format_of(x: Value) -> Format:
    """The format of a vector's elements."""
    return FLOAT if "float" in x.type else DOUBLE


def polynomial(b: Builder, x: Value, square: Value, coefficients: tuple[float, ...]) -> Value:
    """c0 + c1*x + c2*x^2 + ..., given x and x^2.

    Even and odd powers are two chains. A single one takes twice as long, and a processor does not look far
    enough ahead to fill its multipliers with the next vectors meanwhile: erf was a fifth slower.
    """
    even, odd = _chain(b, square, coefficients[::2]), _chain(b, square, coefficients[1::2])
    return b.fma(odd, x, even)


def _chain(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """A polynomial by Horner's rule."""
    total = b.const(coefficients[-1], x.type)
    for coefficient in reversed(coefficients[:-1]):
        total = b.fma(total, x, coefficient)
    return total


def bitwise(b: Builder, word: str, a: Value, other: Value | int) -> Value:
    """An operation on integers as LLVM names it: `and`, `xor`, `shl`, `lshr`, ..."""
    return b.op(a.type, f"{word} {a.type} {a.name}, {b.const(other, a.type).name}")


def absolute(b: Builder, x: Value) -> Value:
    """x without its sign."""
    return b.intrinsic("llvm.fabs", x.type, x)


def signed_as(b: Builder, magnitude: Value, sign: Value) -> Value:
    """`magnitude` with the sign of `sign`, also of a negative zero."""
    return b.intrinsic("llvm.copysign", magnitude.type, magnitude, sign)


def at_least(b: Builder, x: Value, low: Operand) -> Value:
    """The larger of x and `low`, a number; a NaN x stays. In this order, one instruction on x86."""
    bound = b.const(low, x.type)
    return b.select(b.compare("ogt", bound, x), bound, x)


def at_most(b: Builder, x: Value, high: Operand) -> Value:
    """The smaller of x and `high`, a number; a NaN x stays."""
    bound = b.const(high, x.type)
    return b.select(b.compare("olt", bound, x), bound, x)


def scales(b: Builder, kind: str) -> bool:
    """Whether vectors of a type are multiplied by powers of two in one instruction."""
    is_wide = BITS[element_of(kind)] * lanes_of(kind) == 512
    return is_wide and "+avx512f" in b.module.features


def scaled(b: Builder, value: Value, power: Value) -> Value:
    """value * 2^power, rounded once; where `scales` says so."""
    kind, count = value.type, lanes_of(value.type)
    word = f"llvm.x86.avx512.mask.scalef.p{'s' if count == 16 else 'd'}.512"
    b.module.declarations.add(f"declare {kind} @{word}({kind}, {kind}, {kind}, i{count}, i32)")
    given = f"{kind} {value.name}, {kind} {power.name}, {kind} {value.name}"
    return b.op(kind, f"call {kind} @{word}({given}, i{count} -1, i32 4)")

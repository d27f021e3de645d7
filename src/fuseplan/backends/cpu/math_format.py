"""Numbers as bits, and the polynomials of the elementary functions.

Three formats: FLOAT and DOUBLE compute a function to about the last place of their type. WIDE computes in
double what will be rounded to float, with shorter polynomials: it carries what a power needs beyond float.

The polynomials are minimax (Remez's exchange; for FLOAT the coefficients were rounded one at a time from the
lowest, the others fitted again by linear programming). Each is fitted to the function's relative error on the
whole of its interval:

| field | is the polynomial of | interval | relative error of FLOAT, DOUBLE, WIDE |
| --- | --- | --- | --- |
| `exp` | (e^r - 1 - r) / r^2 | abs(r) <= ln 2 | 2^-26.0, 2^-56.5, 2^-30.7 |
| `expm1` | (e^r - 1 - r) / r^2 | abs(r) <= ln(2)/2 | 2^-31.1, 2^-55.6 |
| `log` | (log(1 + f) - f) / f^2 | sqrt(1/2) <= 1 + f <= sqrt(2) | 2^-27.8, 2^-56.8, 2^-35.7 |
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from fractions import Fraction

from fuseplan.backends.cpu.ir import Builder, Operand, Value


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
        exp, expm1, log: coefficients, the constant first; see the module.
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
    expm1: tuple[float, ...]
    log: tuple[float, ...]
    has_denormals: bool = True

    def exponent(self, power: int) -> int:
        """The bits of 2^power."""
        return (power + self.bias) << self.fraction

    def rounder(self, offset: int = 0) -> float:
        """Added to a small number, it leaves the nearest integer plus `offset` in the low bits of the sum."""
        return 1.5 * 2.0**self.fraction + offset


_EXP_DOUBLE = (
    0.4999999999999993, 0.1666666666666694, 0.04166666666670236, 0.008333333333269431, 0.0013888888883543437,
    0.00019841269893091878, 2.4801590846926278e-05, 2.755730056712731e-06, 2.75561542837712e-07,
    2.50550420126098e-08, 2.1062633798988336e-09, 1.593542673133883e-10,
)  # fmt: skip
_EXPM1_DOUBLE = (
    0.5000000000000006, 0.16666666666666588, 0.041666666666576105, 0.008333333333389944, 0.0013888888931795115,
    0.0001984126971837416, 2.4801504978820914e-05, 2.7557407836233484e-06, 2.762616142552938e-07,
    2.5053785491042203e-08,
)  # fmt: skip
_LOG_DOUBLE = (
    -0.5000000000000003, 0.33333333333333026, -0.24999999999974926, 0.20000000000085222, -0.16666666671354982,
    0.14285714279618866, -0.12499999604538935, 0.11111111099062812, -0.10000017937649913, 0.09090927440811489,
    -0.08332864101120947, 0.07691433219857023, -0.07149937516168399, 0.06685933309294277, -0.061943630312752525,
    0.05658980059226694, -0.056781313613854884, 0.06529515003839152, -0.060060414556755135, 0.026173607494391245,
)  # fmt: skip

FLOAT = Format(
    element="float",
    integer="i32",
    fraction=23,
    bias=127,
    exp_range=(-104.0, 89.0),
    expm1_low=-18.0,
    tanh_high=10.0,
    exp=(
        0.5000003576278687, 0.166666179895401, 0.041661228984594345, 0.008335934951901436, 0.0014104777947068214,
        0.00019629750750027597,
    ),
    expm1=(
        0.5, 0.1666666567325592, 0.04166649281978607, 0.008333544246852398, 0.0013932340079918504,
        0.0001976343774003908,
    ),
    log=(
        -0.49999988079071045, 0.33333325386047363, -0.25001609325408936, 0.20002004504203796, -0.16608411073684692,
        0.14180852472782135, -0.13248062133789062, 0.12912946939468384, -0.07619082927703857,
    ),
)  # fmt: skip

DOUBLE = Format(
    element="double",
    integer="i64",
    fraction=52,
    bias=1023,
    exp_range=(-746.0, 710.0),
    expm1_low=-38.0,
    tanh_high=20.0,
    exp=_EXP_DOUBLE,
    expm1=_EXPM1_DOUBLE,
    log=_LOG_DOUBLE,
)

WIDE = Format(
    element="double",
    integer="i64",
    fraction=52,
    bias=1023,
    exp_range=(-746.0, 710.0),
    expm1_low=-38.0,
    tanh_high=20.0,
    exp=(
        0.5000000107018711, 0.16666673905037227, 0.0416665247757708, 0.008332524788495745, 0.0013893720895012814,
        0.00020110327405872006, 2.4439470484179882e-05,
    ),
    expm1=_EXPM1_DOUBLE,
    log=(
        -0.5000000002151931, 0.33333334043681845, -0.2499999482906107, 0.19999898135452196, -0.16666927469630308,
        0.1429057126672614, -0.1249741239186279, 0.1100960992334507, -0.09927305755961004, 0.10015392565786962,
        -0.09871904347175464, 0.053586715017855086,
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


def ln2(element: str, times: int = 1) -> tuple[float, float]:
    """`times` ln 2 in two parts: the nearest number of the type, and what it lacks."""
    whole = times * _LN2
    first = rounded(whole, element)
    return first, float(whole - Fraction(first))


def format_of(x: Value) -> Format:
    """The format of a vector's elements."""
    return FLOAT if "float" in x.type else DOUBLE


def polynomial(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """c0 + c1*x + c2*x^2 + ..., by Horner's rule."""
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
    """The larger of x and `low`, a number; a NaN x stays. On x86 one instruction, in this order of operands."""
    bound = b.const(low, x.type)
    return b.select(b.compare("ogt", bound, x), bound, x)


def at_most(b: Builder, x: Value, high: Operand) -> Value:
    """The smaller of x and `high`, a number; a NaN x stays."""
    bound = b.const(high, x.type)
    return b.select(b.compare("olt", bound, x), bound, x)

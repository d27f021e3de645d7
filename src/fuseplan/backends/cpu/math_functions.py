"""exp, expm1, tanh, erf, log, log1p and pow of vectors.

The reduction of exponentials is Cody and Waite's ("Software Manual for the Elementary Functions", 1980): x =
n*ln 2 + r, with ln 2 in two parts. A fused multiply-add makes n times the first part exact, so that part may
be ln 2 rounded to the type.

Of logarithms x = 2^e * m with m between sqrt(1/2) and sqrt(2); log x = e*ln 2 + log m. The split subtracts
the bits of sqrt(1/2) from those of x, as musl's logf does, and leaves e in place in the exponent's bits.
"""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import lanes_of, vector
from fuseplan.backends.cpu.math_format import (
    WIDE,
    Format,
    absolute,
    at_least,
    at_most,
    bits,
    bitwise,
    format_of,
    ln2,
    polynomial,
    scaled,
    scales,
    signed_as,
)
from fuseplan.backends.polynomials import ERF, ERF_END, TANH_SMALL


def exp(b: Builder, x: Value, form: Format | None = None) -> Value:
    """e^x."""
    form = form or format_of(x)
    low, high = form.exp_range
    within = at_most(b, at_least(b, x, low), high)
    if scales(b, x.type):
        q, n, _ = _reduced(b, form, within, 0)
        return scaled(b, q + 1, n)
    q, _, total = _reduced(b, form, within, 2 * form.bias)
    # 2^n in two factors, because n leaves the range of normal numbers where e^x is denormal or overflows.
    lower = bitwise(b, "and", bitwise(b, "shl", total, form.fraction - 1), bits(math.inf, form))
    upper = bitwise(b, "shl", total, form.fraction) - lower
    return (q + 1) * b.convert("bitcast", lower, form.element) * b.convert("bitcast", upper, form.element)


def exp_below(b: Builder, x: Value) -> Value:
    """e^x of x that are at most 0: below the normal numbers, 0."""
    form = format_of(x)
    q, scale = _scaled_expm1(b, form, at_least(b, x, -form.bias * math.log(2)), 0)
    return b.fma(scale, q, scale)


def expm1(b: Builder, x: Value) -> Value:
    """e^x - 1."""
    form = format_of(x)
    within = at_most(b, at_least(b, x, form.expm1_low), form.exp_range[1])
    # Half of it, because 2^n overflows where e^x does not yet.
    q, scale = _scaled_expm1(b, form, within, -1)
    result = b.fma(scale, q, scale - 0.5) * 2
    # Equal only where x is so small that it is the result. Half a denormal x loses a bit, and -0 its sign.
    return b.select(b.compare("oeq", q, x), x, result)


def tanh(b: Builder, x: Value) -> Value:
    """1 - 2/(e^2t + 1) with t = abs(x), which is accurate for large t; for small t the odd polynomial."""
    form = format_of(x)
    t = at_most(b, absolute(b, x), form.tanh_high)
    q, scale = _scaled_expm1(b, form, t + t, 0)
    large = 1 - 2 / b.fma(scale, q, scale + 1)
    square = x * x
    small = b.fma(x * square, polynomial(b, square, square * square, form.tanh), x)
    return signed_as(b, b.select(b.compare("olt", t, TANH_SMALL), small, large), x)


def erf(b: Builder, x: Value) -> Value:
    """The error function: -expm1(log(erfc(t))) with t = abs(x), one formula for small and large t.

    float by a polynomial, double by the C library's function, lane by lane.
    """
    form = format_of(x)
    if form.element == "double":
        return _erf_of_lanes(b, x)
    t = at_least(b, -absolute(b, x), -ERF_END)
    q, scale = _scaled_expm1(b, form, b.fma(t, polynomial(b, t, t * t, ERF), t), 0)
    return signed_as(b, b.fma(scale, q, scale - 1), x)


def _reduced(b: Builder, form: Format, x: Value, offset: int) -> tuple[Value, Value, Value]:
    """e^r - 1, n, and n + offset in the low bits of an integer; x = n*ln 2 + r, abs(r) <= ln(2)/2."""
    rounder = form.rounder(offset)
    total = b.fma(x, 1 / math.log(2), rounder)
    n = total - rounder
    first, second = ln2(form.element)
    r = b.fma(n, -second, b.fma(n, -first, x))
    square = r * r
    q = b.fma(square, polynomial(b, r, square, form.exp), r)
    return q, n, b.convert("bitcast", total, form.integer)


def _scaled_expm1(b: Builder, form: Format, x: Value, power: int) -> tuple[Value, Value]:
    """q = e^r - 1 and s = 2^(n + power), so that e^x * 2^power = s + s*q."""
    q, _, total = _reduced(b, form, x, form.bias + power)
    return q, b.convert("bitcast", bitwise(b, "shl", total, form.fraction), form.element)


def _erf_of_lanes(b: Builder, x: Value) -> Value:
    b.module.declarations.add("declare double @erf(double)")
    result = b.const(0.0, x.type)
    for lane in range(lanes_of(x.type)):
        one = b.op("double", f"extractelement {x.type} {x.name}, i32 {lane}")
        value = b.op("double", f"call double @erf(double {one.name})")
        result = b.op(x.type, f"insertelement {x.type} {result.name}, double {value.name}, i32 {lane}")
    return result


def log(b: Builder, x: Value, form: Format | None = None) -> Value:
    """The natural logarithm: -inf of zeros, NaN of negative numbers."""
    form = form or format_of(x)
    normal, places = _normal(b, form, x) if form.has_denormals else (x, None)
    stored = b.convert("bitcast", normal, form.integer)
    exponent = _exponent_in_place(b, form, stored)
    f = b.convert("bitcast", stored - exponent, form.element) - 1
    return _with_limits(b, x, _sum(b, form, exponent if places is None else exponent - places, f))


def log1p(b: Builder, x: Value) -> Value:
    """log(1 + x).

    Only the exponent is taken from 1 + x, which is rounded; f = x*2^-e + (2^-e - 1) is rounded once.
    """
    form = format_of(x)
    one_more = x + 1
    exponent = _exponent_in_place(b, form, b.convert("bitcast", one_more, form.integer))
    # Four times 2^-e, because 2^-e is denormal for the largest e.
    scale = b.convert("bitcast", b.const(bits(4.0, form), exponent.type) - exponent, form.element)
    f = b.fma(x, scale, scale - 4) * 0.25
    return signed_as(b, _with_limits(b, one_more, _sum(b, form, exponent, f)), x)


def _normal(b: Builder, form: Format, x: Value) -> tuple[Value, Value]:
    """x, or if it is denormal 2^fraction * x; and what that added to the exponent, in place."""
    is_small = b.compare("olt", x, 2.0 ** (1 - form.bias))
    integers = vector(lanes_of(x.type), form.integer)
    places = b.select(is_small, b.const(form.fraction << form.fraction, integers), 0)
    return b.select(is_small, x * 2.0**form.fraction, x), places


def _exponent_in_place(b: Builder, form: Format, stored: Value) -> Value:
    """2^fraction * e, of the bits of a number."""
    above = stored - bits(math.sqrt(0.5), form)
    return bitwise(b, "and", above, -(1 << form.fraction))


def _sum(b: Builder, form: Format, exponent: Value, f: Value) -> Value:
    """e*ln 2 + log(1 + f)."""
    places = form.fraction
    if form.integer == "i64":  # AVX2 converts only 32-bit integers; the upper half has all of e
        exponent = b.convert("trunc", bitwise(b, "lshr", exponent, 32), "i32")
        places -= 32
    e = b.convert("sitofp", exponent, form.element)
    square = f * f
    log_m = b.fma(square, polynomial(b, f, square, form.log), f)
    # ln 2 rounded to the type is good enough here: it is off by a twentieth of a place in float.
    return b.fma(e, ln2(form.element)[0] * 2.0**-places, log_m)


def _with_limits(b: Builder, x: Value, result: Value) -> Value:
    """`result` where x is positive and finite, else what the logarithm of x is."""
    is_finite = b.compare("olt", x, math.inf)
    limit = b.select(b.compare("oeq", x, 0.0), b.const(-math.inf, x.type), math.nan)
    return b.select(b.compare("ole", x, 0.0), limit, b.select(is_finite, result, x))


def power(b: Builder, x: Value, y: Value) -> Value:
    """x^y as IEEE 754's pow has it.

    float is computed in double and rounded once; double by the C library's function, lane by lane.
    """
    if format_of(x).element == "double":
        return b.intrinsic("llvm.pow", x.type, x, y)
    size = absolute(b, x)
    wide = b.convert("fpext", y, "double") * log(b, b.convert("fpext", size, "double"), WIDE)
    result = b.convert("fptrunc", exp(b, wide, WIDE), "float")
    whole, odd = _integer(b, y)
    result = b.select(_both(b, odd, _is_signed(b, x)), -result, result)
    below = _both(b, b.compare("olt", x, 0.0), b.compare("ogt", x, -math.inf))
    result = b.select(_both(b, below, b.compare("une", whole, y)), math.nan, result)
    return b.select(_is_one(b, x, size, y), 1.0, result)


def constant_power(b: Builder, x: Value, y: float) -> Value:
    """x^y for a number y: by multiplications or a square root where that is as accurate, else `power`."""
    if y == 0:
        return b.const(1.0, x.type)
    if y in (1, 2, 3, 4):
        square = x * x
        return {1: x, 2: square, 3: square * x, 4: square * square}[int(y)]
    if y == -1:
        return 1 / x
    if abs(y) == 0.5:
        root = _root(b, x)
        return root if y > 0 else 1 / root
    return power(b, x, b.const(y, x.type))


def _root(b: Builder, x: Value) -> Value:
    """The square root, but as a power: of -0 it is 0, of -inf it is inf."""
    root = b.intrinsic("llvm.sqrt", x.type, x) + 0.0
    return b.select(b.compare("oeq", x, -math.inf), math.inf, root)


def _integer(b: Builder, y: Value) -> tuple[Value, Value]:
    """y without its fraction, and whether y is an odd integer; a large float is even, infinity too."""
    whole, half = b.intrinsic("llvm.trunc", y.type, y), y * 0.5
    is_odd = b.compare("one", b.intrinsic("llvm.trunc", y.type, half), half)
    return whole, _both(b, is_odd, b.compare("oeq", whole, y))


def _is_one(b: Builder, x: Value, size: Value, y: Value) -> Value:
    """Where the power is 1 whatever the other is, a NaN too; and of -1 to an infinity."""
    always = _either(b, b.compare("oeq", y, 0.0), b.compare("oeq", x, 1.0))
    endless = b.compare("oeq", absolute(b, y), math.inf)
    return _either(b, always, _both(b, b.compare("oeq", size, 1.0), endless))


def _is_signed(b: Builder, x: Value) -> Value:
    return b.compare("slt", b.convert("bitcast", x, "i32"), 0)


def _both(b: Builder, left: Value, right: Value) -> Value:
    return bitwise(b, "and", left, right)


def _either(b: Builder, left: Value, right: Value) -> Value:
    return bitwise(b, "or", left, right)

"""exp, expm1, tanh and erf of vectors.

The reduction is Cody and Waite's ("Software Manual for the Elementary Functions", 1980): x = n*ln 2 + r, with
ln 2 in two parts. A fused multiply-add makes n times the first part exact, so that part may be ln 2 rounded
to the type.
"""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import lanes_of
from fuseplan.backends.cpu.math_format import (
    Format,
    absolute,
    at_least,
    at_most,
    bits,
    bitwise,
    format_of,
    ln2,
    polynomial,
    signed_as,
)
from fuseplan.backends.polynomials import ERF, ERF_END, TANH_SMALL


def exp(b: Builder, x: Value, form: Format | None = None) -> Value:
    """e^x."""
    form = form or format_of(x)
    low, high = form.exp_range
    q, total = _reduced(b, form, at_most(b, at_least(b, x, low), high), 2 * form.bias)
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


def _reduced(b: Builder, form: Format, x: Value, offset: int) -> tuple[Value, Value]:
    """e^r - 1, and n + offset in the low bits of an integer; x = n*ln 2 + r, abs(r) <= ln(2)/2."""
    rounder = form.rounder(offset)
    total = b.fma(x, 1 / math.log(2), rounder)
    n = total - rounder
    first, second = ln2(form.element)
    r = b.fma(n, -second, b.fma(n, -first, x))
    square = r * r
    q = b.fma(square, polynomial(b, r, square, form.exp), r)
    return q, b.convert("bitcast", total, form.integer)


def _scaled_expm1(b: Builder, form: Format, x: Value, power: int) -> tuple[Value, Value]:
    """q = e^r - 1 and s = 2^(n + power), so that e^x * 2^power = s + s*q."""
    q, total = _reduced(b, form, x, form.bias + power)
    return q, b.convert("bitcast", bitwise(b, "shl", total, form.fraction), form.element)


def _erf_of_lanes(b: Builder, x: Value) -> Value:
    b.module.declarations.add("declare double @erf(double)")
    result = b.const(0.0, x.type)
    for lane in range(lanes_of(x.type)):
        one = b.op("double", f"extractelement {x.type} {x.name}, i32 {lane}")
        value = b.op("double", f"call double @erf(double {one.name})")
        result = b.op(x.type, f"insertelement {x.type} {result.name}, double {value.name}, i32 {lane}")
    return result

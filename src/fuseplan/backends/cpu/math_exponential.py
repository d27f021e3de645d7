"""exp, expm1, tanh and erf of vectors.

The reduction is Cody and Waite's ("Software Manual for the Elementary Functions", 1980): x = n*ln 2 + r, with ln 2 in
two parts. A fused multiply-add makes n times the first part exact, so that part may be ln 2 rounded to the type.
"""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Value, lanes_of
from fuseplan.backends.cpu.math_format import (
    Format,
    absolute,
    at_least,
    at_most,
    bitwise,
    format_of,
    ln2,
    polynomial,
    signed_as,
)

# log(erfc(t)) = -(t + t*P(-t)) for 0 <= t <= 3.95, beyond which erf rounds to 1. P has degree 8 and is fitted to the
# relative error of erf: 2^-27.8. The leading 1 is kept apart because 2/sqrt(pi) rounded to float is half a place off.
_ERF_END = 3.95
_ERF = (
    0.12837916612625122, -0.6366195678710938, 0.10277630388736725, 0.019147824496030807, -0.00016949418932199478,
    -0.0016756574623286724, -0.0006373475189320743, -0.00011885527055710554, -9.387120371684432e-06,
)  # fmt: skip


def exp(b: Builder, x: Value, form: Format | None = None) -> Value:
    """e^x."""
    form = form or format_of(x)
    low, high = form.exp_range
    # e^x = e^r * 2^m * 2^m: both factors are normal numbers also where the result is denormal or infinite.
    r, scale = _reduced(b, form, at_most(b, at_least(b, x, low), high), 2)
    return (b.fma(r * r, polynomial(b, r, form.exp), r) + 1) * scale * scale


def expm1(b: Builder, x: Value) -> Value:
    """e^x - 1."""
    form = format_of(x)
    within = at_most(b, at_least(b, x, form.expm1_low), form.exp_range[1])
    # Halved, because 2^n overflows where e^x does not yet.
    q, half = _scaled_expm1(b, form, within, -1)
    return signed_as(b, b.fma(half, q, half - 0.5) * 2, x)


def tanh(b: Builder, x: Value) -> Value:
    """(e^2t - 1) / (e^2t + 1) with t = abs(x); the division's two sides come from expm1(2t)."""
    form = format_of(x)
    t = at_most(b, absolute(b, x), form.tanh_high)
    q, scale = _scaled_expm1(b, form, t + t, 0)
    ratio = b.fma(scale, q, scale - 1) / b.fma(scale, q, scale + 1)
    return signed_as(b, ratio, x)


def erf(b: Builder, x: Value) -> Value:
    """The error function: -expm1(log(erfc(t))) with t = abs(x), one formula for small and large t.

    float by a polynomial, double by the C library's function, lane by lane.
    """
    form = format_of(x)
    if form.element == "double":
        return _erf_of_lanes(b, x)
    t = at_least(b, -absolute(b, x), -_ERF_END)
    q, scale = _scaled_expm1(b, form, b.fma(t, polynomial(b, t, _ERF), t), 0)
    return signed_as(b, b.fma(scale, q, scale - 1), x)


def _reduced(b: Builder, form: Format, x: Value, step: int, power: int = 0) -> tuple[Value, Value]:
    """r and 2^(n + power) with x = step*n*ln 2 + r and abs(r) <= step*ln(2)/2."""
    rounder = form.rounder(form.bias + power)
    sum_ = b.fma(x, 1 / (step * math.log(2)), rounder)
    n = sum_ - rounder
    first, second = ln2(form.element, step)
    r = b.fma(n, -second, b.fma(n, -first, x))
    stored = bitwise(b, "shl", b.convert("bitcast", sum_, form.integer), form.fraction)
    return r, b.convert("bitcast", stored, form.element)


def _scaled_expm1(b: Builder, form: Format, x: Value, power: int) -> tuple[Value, Value]:
    """q = e^r - 1 and s = 2^(n + power), so that e^x * 2^power = s + s*q."""
    r, scale = _reduced(b, form, x, 1, power)
    return b.fma(r * r, polynomial(b, r, form.expm1), r), scale


def _erf_of_lanes(b: Builder, x: Value) -> Value:
    b.module.declarations.add("declare double @erf(double)")
    result = b.const(0.0, x.type)
    for lane in range(lanes_of(x.type)):
        one = b.op("double", f"extractelement {x.type} {x.name}, i32 {lane}")
        value = b.op("double", f"call double @erf(double {one.name})")
        result = b.op(x.type, f"insertelement {x.type} {result.name}, double {value.name}, i32 {lane}")
    return result

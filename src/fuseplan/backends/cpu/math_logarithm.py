"""log and log1p of vectors.

x = 2^e * m with m between sqrt(1/2) and sqrt(2); log x = e*ln 2 + log m. The split subtracts the bits of
sqrt(1/2) from those of x, as musl's logf does, and leaves e in place in the exponent's bits.
"""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import lanes_of, vector
from fuseplan.backends.cpu.math_format import (
    Format,
    bits,
    bitwise,
    format_of,
    ln2,
    polynomial,
    signed_as,
)


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

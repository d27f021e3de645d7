"""Powers of vectors."""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.math_exponential import exp
from fuseplan.backends.cpu.math_format import WIDE, absolute, bitwise, format_of
from fuseplan.backends.cpu.math_logarithm import log


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
    result = _negated(b, result, _both(b, odd, _is_signed(b, x)))
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


def _negated(b: Builder, x: Value, where: Value) -> Value:
    return b.select(where, -x, x)


def _both(b: Builder, left: Value, right: Value) -> Value:
    return bitwise(b, "and", left, right)


def _either(b: Builder, left: Value, right: Value) -> Value:
    return bitwise(b, "or", left, right)

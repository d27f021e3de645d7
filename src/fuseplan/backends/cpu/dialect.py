"""The functions of `fuseplan.scalar` as LLVM IR, for vectors that are in registers.

Every function keeps IEEE meaning: a NaN stays one, infinities have their limits, zeros their signs, and
denormal numbers are computed. Of a zero and a negative zero, `maximum` and `minimum` give either.

The largest errors seen, in units of the last place; `tests/numeric/test_dialect.py` holds the bounds:

|        | exp | expm1 | log | log1p | tanh | erf | pow |
| ------ | --- | ----- | --- | ----- | ---- | --- | --- |
| float  | 1.0 | 1.5   | 1.0 | 1.5   | 1.3  | 1.8 | 0.6 |
| double | 1.1 | 2.3   | 1.4 | 1.7   | 1.4  | 1.0 | 1.0 |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import vector
from fuseplan.backends.cpu.math_format import absolute, at_least, at_most, bitwise, rounded
from fuseplan.backends.cpu.math_functions import (
    constant_power,
    erf,
    exp,
    exp_below,
    expm1,
    log,
    log1p,
    power,
    tanh,
)
from fuseplan.language.words import random
from fuseplan.scalar import CASTS, COMPARISONS


def table(builder: Builder) -> dict[str, Callable[..., Value]]:
    """The meaning of each scalar function where `builder` writes.

    Values are vectors of `float` or `double`; those of `gt` and `ge` are conditions, the first argument of
    `where`. A `const` too large for a float is infinite. `exp_below` is `exp` of numbers up to 0.
    """
    b = builder
    numbers: dict[str, float] = {}  # of the constants made here, by how the text writes them

    def const(value: float) -> Value:
        written = b.number(number := rounded(value, b.element))
        numbers[written.name] = number
        return written

    def pow_(x: Value, y: Value) -> Value:
        return constant_power(b, x, numbers[y.name]) if y.name in numbers else power(b, x, y)

    def frozen(value: Value) -> Value:
        return value if value.name in numbers else b.op(value.type, f"freeze {value.type} {value.name}")

    def where(condition: Value, x: Value, y: Value) -> Value:
        # What is frozen is loaded first: a load under the mask would wait for the condition.
        return b.select(condition, frozen(x), frozen(y))

    def bounded(bound: Callable[[Builder, Value, Value], Value], word: str, x: Value, y: Value) -> Value:
        if x.name in numbers or y.name in numbers:
            return bound(b, y, x) if x.name in numbers else bound(b, x, y)
        # x86 looks for a NaN in the first argument: in a long chain x is the one that is made last.
        return b.intrinsic(word, x.type, y, x, flags="nsz ")

    table: Table = {
        "const": const,
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "neg": lambda x: -x,
        "abs": partial(absolute, b),
        "maximum": partial(bounded, at_least, "llvm.maximum"),
        "minimum": partial(bounded, at_most, "llvm.minimum"),
        "pow": pow_,
        "exp": partial(exp, b),
        "exp_below": partial(exp_below, b),
        "expm1": partial(expm1, b),
        "log": partial(log, b),
        "log1p": partial(log1p, b),
        "sqrt": lambda x: b.intrinsic("llvm.sqrt", x.type, x),
        "tanh": partial(tanh, b),
        "erf": partial(erf, b),
        "round": lambda x: b.intrinsic("llvm.roundeven", x.type, x),
        "where": where,
        **{name: partial(b.compare, f"o{name}") for name in COMPARISONS},
        **{fn: partial(storage.held, b, dtype) for fn, dtype in CASTS.items()},
    }
    return added(b, table)


Table = dict[str, Callable[..., Value]]


def added(b: Builder, table: Table) -> Table:
    """The table with the meanings of `number` and `random`, and of each function of `words.WORDS`."""

    def wide(x: Value, y: Value) -> Value:
        return b.convert("zext", x, "i64") * b.convert("zext", y, "i64")

    def low(index: Value) -> Value:
        return b.convert("trunc", index, "i32")

    def high(index: Value) -> Value:
        return low(bitwise(b, "lshr", index, 32))

    rows: Table = {
        "number": lambda x: b.convert("sitofp", x, b.element),
        "low": low,
        "high": high,
        "word": lambda x: storage.narrow(b, "i32", x),
        "bits": lambda number: b.const(number, vector(b.lanes, "i32")),
        "mul_low": lambda x, y: x * y,
        "mul_high": lambda x, y: high(wide(x, y)),
        "plus": lambda x, y: x + y,
        "xor": lambda x, y: b.op(x.type, f"xor {x.type} {x.name}, {y.name}"),
        "spread": lambda x: bitwise(b, "ashr", x, 31),
    }
    known = table | rows
    return known | {"random": partial(random, known)}

"""Functions of an element's index as LLVM IR: vectors of whole numbers, of 64 bits and of words of 32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import vector
from fuseplan.backends.cpu.math_format import bitwise
from fuseplan.language.words import random

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

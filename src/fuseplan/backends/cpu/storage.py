"""Moves elements between memory and vectors: f16 and bf16 are widened when read, rounded when written."""

from __future__ import annotations

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of, vector
from fuseplan.backends.cpu.lanes import lane, with_lane

# What LLVM is told lies in memory. bf16 is moved as bits: its own type is scalarised where the processor
# lacks it.
STORED = {"f64": "double", "f32": "float", "f16": "half", "bf16": "i16"}
COMPUTED = {"f64": "double", "f32": "float", "f16": "float", "bf16": "float"}


def read(b: Builder, dtype: str, pointer: Value, lanes: int, *, count: int | None = None) -> Value:
    """`count` elements (all `lanes` unless told) at an address, as a vector in the compute type."""
    stored = b.load_first(pointer, count or lanes, vector(lanes, STORED[dtype]))
    return widen(b, dtype, stored)


def read_one(b: Builder, dtype: str, pointer: Value) -> Value:
    """The element at an address, as a scalar in the compute type."""
    return widen(b, dtype, b.load(pointer, STORED[dtype]))


def read_at(b: Builder, dtype: str, pointer: Value, offset: Index, count: int, step: int = 1) -> Value:
    """`count` elements from element `offset` on, `step` apart, as a vector; other lanes are zero."""
    kind = element_type(dtype)
    if step == 1 or count == 1:
        return read(b, dtype, b.at(pointer, offset, kind), b.lanes, count=count)
    gathered = Value(b, b.vector, "zeroinitializer")
    for number in range(count):
        apart: Index = offset + number * step
        gathered = with_lane(b, gathered, number, read_one(b, dtype, b.at(pointer, apart, kind)))
    return gathered


def write_at(
    b: Builder,
    dtype: str,
    value: Value,
    pointer: Value,
    offset: Index,
    count: int,
    step: int = 1,
    *,
    stream: bool = False,
) -> None:
    """Stores the first `count` lanes from element `offset` on, `step` apart, rounded once to nearest even."""
    kind = element_type(dtype)
    if step == 1:
        write(b, dtype, value, b.at(pointer, offset, kind), count=count, stream=stream)
        return
    stored = narrow(b, dtype, value)
    for number in range(count):
        b.store(lane(b, stored, number), b.at(pointer, offset + number * step, kind))


def widen(b: Builder, dtype: str, stored: Value) -> Value:
    """Stored elements in the compute type; exact."""
    if dtype == "f16":
        return b.convert("fpext", stored, "float")
    if dtype == "bf16":
        return b.convert("bitcast", shifted(b, b.convert("zext", stored, "i32"), "shl"), "float")
    return stored


def write(
    b: Builder, dtype: str, value: Value, pointer: Value, *, count: int | None = None, stream: bool = False
) -> None:
    """Stores the first `count` lanes (all unless told), rounded once to nearest even."""
    stored = narrow(b, dtype, value)
    if count is not None and count < lanes_of(value.type):
        return b.store_first(stored, pointer, count)
    align = lanes_of(stored.type) * BITS[element_of(stored.type)] // 8 if stream else None
    return b.store(stored, pointer, align=align, stream=stream)


def narrow(b: Builder, dtype: str, value: Value) -> Value:
    """Computed values as they are stored."""
    if dtype == "f16":
        return b.convert("fptrunc", value, "half")
    if dtype == "bf16":
        return _round_to_bf16(b, value)
    return value


def _round_to_bf16(b: Builder, value: Value) -> Value:
    bits = b.convert("bitcast", value, "i32")
    lowest = _and(b, shifted(b, bits, "lshr"), 1)
    rounded = bits + lowest + 0x7FFF
    # A NaN must stay one: adding could carry out of its payload, so its quiet bit is set instead.
    quiet = b.op(bits.type, f"or {bits.type} {bits.name}, {b.const(0x400000, bits.type).name}")
    chosen = b.select(b.compare("uno", value, value), quiet, rounded)
    return b.convert("trunc", shifted(b, chosen, "lshr"), "i16")


def shifted(b: Builder, value: Value, word: str, by: int = 16) -> Value:
    """An integer shifted as LLVM names it: `shl`, `lshr` or `ashr`."""
    return b.op(value.type, f"{word} {value.type} {value.name}, {b.const(by, value.type).name}")


def _and(b: Builder, value: Value, mask: int) -> Value:
    return b.op(value.type, f"and {value.type} {value.name}, {b.const(mask, value.type).name}")


def is_stored_as_computed(dtype: str) -> bool:
    """Whether elements need no conversion."""
    return STORED[dtype] == COMPUTED[dtype]


def element_type(dtype: str) -> str:
    """The type of one element in memory, for address arithmetic."""
    return element_of(STORED[dtype])

"""Moves elements between memory and vectors: widened when read, rounded when written, once to nearest even.

`dtypes` has LLVM's type of an element in memory. bf16 and fp8 are moved as bits: bf16's own type is
scalarised where the processor lacks it, and LLVM has none for fp8.
"""

from __future__ import annotations

import math

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of, vector
from fuseplan.backends.cpu.lanes import lane, widened, with_lane
from fuseplan.backends.cpu.math_format import absolute, at_least, at_most, bitwise
from fuseplan.language.dtypes import FP8, DType, dtype_of

COMPUTED = {"f64": "double", "f32": "float"}


def read(b: Builder, dtype: str, pointer: Value, lanes: int, *, count: int | None = None) -> Value:
    """`count` elements (all `lanes` unless told) at an address, as a vector in the compute type."""
    stored = b.load_first(pointer, count or lanes, vector(lanes, element_type(dtype)))
    return widen(b, dtype, stored)


def read_one(b: Builder, dtype: str, pointer: Value) -> Value:
    """The element at an address, as a scalar in the compute type."""
    return widen(b, dtype, b.load(pointer, element_type(dtype)))


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
    """Stored elements in the function's compute type; exact, but for an i32 beyond 2^24 in float."""
    row = dtype_of(dtype)
    if not row.is_float:
        return b.convert("sitofp" if row.least < 0 else "uitofp", stored, b.element)
    value = stored
    if dtype == "bf16":
        value = b.convert("bitcast", bitwise(b, "shl", b.convert("zext", stored, "i32"), 16), "float")
    elif dtype in FP8:
        value = _widen_fp8(b, dtype, stored)
    return value if element_of(value.type) == b.element else b.convert("fpext", value, b.element)


def _widen_fp8(b: Builder, dtype: str, code: Value) -> Value:
    """Both lie in the upper bits of a half; e4m3 has a bit of exponent less, and one NaN of each sign."""
    bits = b.convert("zext", code, "i16")
    if dtype == "f8e5m2":
        return b.convert("fpext", b.convert("bitcast", bitwise(b, "shl", bits, 8), "half"), "float")
    size = bitwise(b, "and", bits, 0x7F)
    sign = bitwise(b, "shl", bitwise(b, "and", bits, 0x80), 8)
    half = b.convert("bitcast", bitwise(b, "or", bitwise(b, "shl", size, 7), sign), "half")
    value = b.convert("fpext", half, "float") * 256.0
    return b.select(b.compare("eq", size, 0x7F), math.nan, value)


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
    """Computed values as they are stored; `dtypes.narrow` is the same for NumPy's arrays."""
    row = dtype_of(dtype)
    if dtype == "bool":
        return b.convert("zext", b.compare("une", value, 0.0), row.llvm)
    if not row.is_float:
        return _integer(b, row, value)
    if element_of(value.type) == row.llvm:
        return value
    if row.llvm == "float":
        return b.convert("fptrunc", value, "float")
    if element_of(value.type) == "double":
        value = _odd(b, value)
    if dtype == "f16":
        return b.convert("fptrunc", value, "half")
    return _round_to_bf16(b, value) if dtype == "bf16" else _round_to_fp8(b, dtype, value)


def held(b: Builder, dtype: str, value: Value) -> Value:
    """Computed values, rounded to elements of a dtype."""
    return widen(b, dtype, narrow(b, dtype, value))


def _integer(b: Builder, row: DType, value: Value) -> Value:
    """Without the fraction, saturated; NaN becomes 0. A float has no 2^31 - 1."""
    wide = widened(b, value) if row.itemsize == 4 else value
    number = b.select(b.compare("uno", wide, wide), 0.0, wide)
    word = "fptosi" if row.least < 0 else "fptoui"
    return b.convert(word, at_most(b, at_least(b, number, row.least), row.largest), row.llvm)


def _odd(b: Builder, value: Value) -> Value:
    """double as float, cut off, with the last bit set where inexact: a second rounding cannot meet a tie."""
    near = b.convert("fptrunc", value, "float")
    back, bits = widened(b, near), b.convert("bitcast", near, "i32")
    is_larger = b.compare("ogt", absolute(b, back), absolute(b, value))
    inexact = b.convert("zext", b.compare("une", back, value), "i32")
    return b.convert("bitcast", bitwise(b, "or", b.select(is_larger, bits - 1, bits), inexact), "float")


def _round_to_bf16(b: Builder, value: Value) -> Value:
    bits = b.convert("bitcast", value, "i32")
    lowest = bitwise(b, "and", bitwise(b, "lshr", bits, 16), 1)
    rounded = bits + lowest + 0x7FFF
    # A NaN must stay one: adding could carry out of its payload, so its quiet bit is set instead.
    quiet = bitwise(b, "or", bits, 0x400000)
    chosen = b.select(b.compare("uno", value, value), quiet, rounded)
    return b.convert("trunc", bitwise(b, "lshr", chosen, 16), "i16")


def _round_to_fp8(b: Builder, dtype: str, value: Value) -> Value:
    fp8 = FP8[dtype]
    bits = b.convert("bitcast", value, "i32")
    size = bitwise(b, "and", bits, 0x7FFFFFFF)
    lowest = bitwise(b, "and", bitwise(b, "lshr", size, fp8.cut), 1)
    normal = bitwise(b, "lshr", size + lowest + fp8.rounder, fp8.cut)
    # Added to this number, a float loses the bits that a denormal result has not, rounded to nearest even.
    small = b.convert("bitcast", b.convert("bitcast", size, "float") + fp8.unit, "i32") - fp8.denormal
    code = b.select(b.compare("slt", size, fp8.normal), small, normal)
    code = b.select(b.compare("slt", code, fp8.top), code, b.const(fp8.top, code.type))
    code = b.select(b.compare("uno", value, value), b.const(fp8.nan, code.type), code)
    sign = bitwise(b, "and", bitwise(b, "lshr", bits, 24), 0x80)
    return b.convert("trunc", bitwise(b, "or", code, sign), "i8")


def element_type(dtype: str) -> str:
    """The type of one element in memory, for address arithmetic."""
    return dtype_of(dtype).llvm

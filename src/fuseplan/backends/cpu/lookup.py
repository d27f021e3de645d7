"""Reads src where it lies, or the rows of a table that it is."""

from __future__ import annotations

import math

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import lane, with_lane
from fuseplan.kernels.lookup import Lookup


def read_src(frame: Frame, offset: Index, count: int, step: int = 1) -> Value:
    """`count` elements from a place of src on, `step` apart, as a vector in the compute type."""
    b, kernel, src = frame.body, frame.kernel, frame.pointer("src")
    if kernel.lookup is None:
        return storage.read_at(b, kernel.src.dtype, src, offset, count, step)
    if step == 1 or count == 1:
        return _row(frame, kernel.lookup, offset, count)
    made = Value(b, b.vector, "zeroinitializer")
    for number in range(count):  # each lane is of another row
        one = _row(frame, kernel.lookup, offset + number * step, 1)
        made = with_lane(b, made, number, lane(b, one, 0))
    return made


def _row(frame: Frame, lookup: Lookup, offset: Index, count: int) -> Value:
    """Elements of one row, NaN where the table has none: then its first row is read."""
    b, dtype = frame.body, frame.kernel.src.dtype
    index = _index(b, lookup, b.at(frame.pointer("src"), offset // lookup.pitch, lookup.indices))
    is_row = b.compare("ult", index, lookup.rows)
    begin = b.select(is_row, index, 0) * lookup.features
    table = frame.pointer("operand", lookup.key)
    found = storage.read_at(b, dtype, table, begin + offset % lookup.pitch, count)
    return b.select(is_row, found, math.nan)


def _index(b: Builder, lookup: Lookup, pointer: Value) -> Value:
    found = b.load(pointer, lookup.indices)
    index = found if lookup.indices == I64 else b.convert("sext", found, I64)
    if not lookup.from_end:
        return index
    return b.select(b.compare("slt", index, 0), index + lookup.rows, index)

"""The memory of a graph's values: one arena, whose places are shared by values that do not live at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fuseplan.graph.op import Tensor
from fuseplan.tensors.arrays import lasting_bytes

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass
class Buffer:
    """A place for one tensor.

    Attributes:
        shape, strides: in elements and logical order.
        dtype: NumPy's.
        first, last: the steps that write it first and use it last.
        offset: in the arena, in bytes, once it is planned.
        line: bytes that it begins and ends on a multiple of.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    first: int
    last: int
    offset: int = 0
    line: int = ALIGNMENT

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up to whole lines."""
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))
        return -(-span * self.dtype.itemsize // self.line) * self.line if 0 not in self.shape else 0

    def array(self, memory: Tensor) -> Tensor:
        """The tensor in a memory of bytes."""
        begin = memory[self.offset : self.offset + max(self.nbytes, self.dtype.itemsize)].view(self.dtype)
        return as_strided(begin, self.shape, [step * self.dtype.itemsize for step in self.strides])

    def alone(self) -> Tensor:
        """A tensor that lies in the same way, in memory of its own that nobody touches."""
        memory = np.empty(max(self.nbytes, ALIGNMENT), np.uint8).view(self.dtype)
        return as_strided(memory, self.shape, [step * self.dtype.itemsize for step in self.strides])


@dataclass(frozen=True)
class Span:
    """A view that reaches along an axis, to an extent, over what lies beside a tensor in its memory."""

    axis: int
    extent: int

    def evaluate(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The view."""
        (array,), shape = given, [*given[0].shape]
        shape[self.axis] = self.extent
        return (as_strided(array, shape, array.strides),)


def are_beside(arrays: Sequence[Tensor], axis: int) -> bool:
    """Whether each array begins where the one before ends along an axis, with the same strides."""
    ends = [each.ctypes.data + each.shape[axis] * each.strides[axis] for each in arrays]
    begins = [each.ctypes.data for each in arrays]
    return begins[1:] == ends[:-1] and len({each.strides for each in arrays}) == 1


def plan(buffers: Sequence[Buffer]) -> int:
    """Gives each buffer its offset, and returns the bytes of the arena.

    The largest are placed first, each at the lowest offset where no buffer lies that lives at the same time.
    """
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda each: -each.nbytes):
        beside = [each for each in placed if each.first <= buffer.last and buffer.first <= each.last]
        offset = 0
        for other in sorted(beside, key=lambda each: each.offset):
            if offset + buffer.nbytes <= other.offset:
                break
            offset = max(offset, other.offset + other.nbytes)
        buffer.offset = offset
        placed.append(buffer)
    return max((each.offset + each.nbytes for each in buffers), default=0)


def arena(nbytes: int) -> Tensor:
    """Memory of so many bytes, aligned."""
    return lasting_bytes(nbytes + ALIGNMENT)

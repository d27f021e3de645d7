"""How a kernel reads an operand: a chain of steps from the operand's logical shape, as data.

A template states a `Packing`; NumPy packs by it here, and torch on a GPU. Both give the same bytes. A file
holds a packing as names and numbers, so a saved kernel packs operands without its template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.language.tensor import TensorSpec

Array = NDArray[Any]
Shape = tuple[int, ...]
CHUNK = 1 << 15  # elements that a cache holds with what is made of them
# Multiplications of a product in float64 at once: for more, OpenBLAS has its threads join in, which wait for
# cores that others hold: 64 x 64 filters take 0.81 ms at once on two cores, and 0.12 so; 256 x 256 19, and 3.
PRODUCTS = 1 << 18
LINE_BYTES = 64  # of a CPU's cache
LINE = 16  # elements of 64 bytes of f32: no vector has more
LARGE = float.fromhex("0x1.ffp127")  # the least number that rounds to an infinity of bf16
HALF_UNIT = 1 << 12  # half of the last of 11 bits, in the bits of f32


class Step:
    """One step of a packing; its fields are numbers, or tuples of them.

    Attributes:
        makes: the dtype of the array after the step; empty for that of the array before.
    """

    makes: ClassVar[str] = ""

    def after(self, shape: Shape) -> Shape:
        """The shape that an array of `shape` has after the step."""
        raise NotImplementedError

    def of(self, array: Array) -> Array:
        """The array after the step; a view where no element moves."""
        raise NotImplementedError


@dataclass(frozen=True)
class Reshape(Step):
    """The same elements in row-major order, with another shape."""

    shape: Shape

    def after(self, shape: Shape) -> Shape:
        return self.shape

    def of(self, array: Array) -> Array:
        return array.reshape(self.shape)


@dataclass(frozen=True)
class Transpose(Step):
    """`axes` names the axis that stands at each place, outermost first."""

    axes: tuple[int, ...]

    def after(self, shape: Shape) -> Shape:
        return tuple(shape[axis] for axis in self.axes)

    def of(self, array: Array) -> Array:
        return array.transpose(self.axes)


@dataclass(frozen=True)
class Pad(Step):
    """Zeros follow the last element of each axis, up to the extents of `shape`."""

    shape: Shape

    def after(self, shape: Shape) -> Shape:
        return self.shape

    def of(self, array: Array) -> Array:
        if array.shape == self.shape:
            return array
        padded = np.zeros(self.shape, array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        return padded


@dataclass(frozen=True)
class Take(Step):
    """The elements of an axis at these places."""

    axis: int
    places: tuple[int, ...]

    def after(self, shape: Shape) -> Shape:
        return (*shape[: self.axis], len(self.places), *shape[self.axis + 1 :])

    def of(self, array: Array) -> Array:
        return array.take(self.places, self.axis)


@dataclass(frozen=True)
class Tiles(Step):
    """Splits an axis into tiles of `extent`, two axes; the last tile begins early where it would be short."""

    axis: int
    extent: int

    def after(self, shape: Shape) -> Shape:
        tiles = -(-shape[self.axis] // self.extent)
        return (*shape[: self.axis], tiles, self.extent, *shape[self.axis + 1 :])

    def of(self, array: Array) -> Array:
        size = array.shape[self.axis]
        if size % self.extent == 0:
            return array.reshape(self.after(array.shape))
        begins = [min(begin, size - self.extent) for begin in range(0, size, self.extent)]
        ahead = (slice(None),) * self.axis
        return np.stack([array[(*ahead, slice(each, each + self.extent))] for each in begins], self.axis)


@dataclass(frozen=True)
class Product(Step):
    """A matrix times the outermost axis, summed in float64 and rounded once.

    A sum that exceeds the array's dtype becomes infinite, and so makes itself known in the results.
    """

    matrix: tuple[tuple[float, ...], ...]

    def after(self, shape: Shape) -> Shape:
        return (len(self.matrix), *shape[1:])

    def of(self, array: Array) -> Array:
        matrix, columns = _factors(self.matrix), array.reshape(array.shape[0], -1)
        count = max(1, PRODUCTS // matrix.size)
        made: Array = np.empty((len(matrix), columns.shape[1]), array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            for begin in range(0, columns.shape[1], count):
                part = columns[:, begin : begin + count]
                made[:, begin : begin + count] = matrix @ part.astype(np.float64)
        return made.reshape(self.after(array.shape))


@lru_cache(maxsize=64)
def _factors(matrix: tuple[tuple[float, ...], ...]) -> Array:
    return np.array(matrix)


@dataclass(frozen=True)
class Halves(Step):
    """Of f32: elements rounded to the 11 bits that a tensor core multiplies, and behind them the remainders.

    A half is rounded up. An infinity is all in the remainder: the other factor's whole stands against it,
    which has its sign.
    """

    def after(self, shape: Shape) -> Shape:
        return (2, *shape)

    def of(self, array: Array) -> Array:
        whole = array.astype(np.float32)
        rounded = np.where(
            np.isnan(whole), whole, _to_11_bits(whole)
        )  # a NaN's bits might carry into the sign
        rounded = np.where(np.isinf(rounded), np.float32(0), rounded)
        return np.stack([rounded, whole - rounded])


@dataclass(frozen=True)
class Rounded(Step):
    """Of f32: elements rounded to the 11 bits that a tensor core multiplies.

    A tensor core cuts the other bits, so that all factors are too small, and a sum's error grows with its
    length. A half is rounded up. Infinities, NaN, and numbers that would become infinite stay as they are.
    """

    def after(self, shape: Shape) -> Shape:
        return shape

    def of(self, array: Array) -> Array:
        whole = array.astype(np.float32)
        rounded = _to_11_bits(whole)
        return np.where(np.isfinite(rounded) & np.isfinite(whole), rounded, whole)


def _to_11_bits(whole: Array) -> Array:
    bits = (whole.view(np.int32) + np.int32(HALF_UNIT)) & np.int32(-2 * HALF_UNIT)
    return bits.view(np.float32)


@dataclass(frozen=True)
class Thirds(Step):
    """Of f32: three numbers of bf16, whose sum an element is, as bits along a new axis.

    Each is what the earlier ones leave, rounded to nearest even. An infinity is all in the last: the other
    factor's first stands against it, which has its sign. So are NaN, and numbers that bf16 makes infinite.
    """

    makes: ClassVar[str] = "bf16"
    axis: int

    def after(self, shape: Shape) -> Shape:
        return (*shape[: self.axis], 3, *shape[self.axis :])

    def of(self, array: Array) -> Array:
        outer, inner = prod(array.shape[: self.axis]), prod(array.shape[self.axis :])
        whole = np.ascontiguousarray(array, np.float32).reshape(outer, inner)
        made = np.empty((outer, 3, inner), np.uint16)
        count = max(1, CHUNK // max(1, inner))
        for begin in range(0, outer, count):
            made[begin : begin + count] = _thirds(whole[begin : begin + count])
        return made.reshape(self.after(array.shape))


def _thirds(whole: Array) -> Array:
    """Rows of f32 as three rows of bf16 each."""
    is_large = ~(np.abs(whole) < LARGE)  # or NaN
    left = np.where(is_large, np.float32(0), whole)
    made = np.empty((len(whole), 3, whole.shape[1]), np.uint16)
    for number in range(3):
        bits = left.view(np.uint32)
        rounded = bits + (bits >> 16 & 1) + 0x7FFF
        made[:, number] = rounded >> 16
        left -= (rounded & 0xFFFF0000).view(np.float32)
    large = whole[is_large].view(np.uint32) >> 16
    made[:, 2][is_large] = np.where(np.isnan(whole[is_large]), large | 0x40, 0x7F80 | large & 0x8000)
    return made


@dataclass(frozen=True)
class Join(Step):
    """Several chains of the same array, their results flat, one after another."""

    chains: tuple[tuple[Step, ...], ...]

    def after(self, shape: Shape) -> Shape:
        return (sum(prod(shape_after(chain, shape)) for chain in self.chains),)

    def of(self, array: Array) -> Array:
        parts = [_applied(chain, array) for chain in self.chains]
        ends = [*accumulate(part.nbytes for part in parts)]
        memory = np.empty(ends[-1] + LINE_BYTES, np.uint8)
        begin = -memory.ctypes.data % LINE_BYTES  # a kernel reads an aligned array in place
        memory = memory[begin : begin + ends[-1]]
        for part, end in zip(parts, ends, strict=True):
            memory[end - part.nbytes : end].view(part.dtype).reshape(part.shape)[...] = part
        return memory.view(parts[0].dtype)


@dataclass(frozen=True)
class Packing:
    """How a kernel reads an operand.

    Attributes:
        shape: the operand's logical shape.
        dtype: of the elements that the steps are given: the operand's own, or the compute dtype.
        steps: from an array of `shape` to the kernel's, which lies dense.
    """

    shape: Shape
    dtype: str
    steps: tuple[Step, ...] = ()

    @property
    def extents(self) -> Shape:
        """The shape of the packed array."""
        return shape_after(self.steps, self.shape)

    @property
    def made(self) -> str:
        """The dtype of the packed array."""
        return next((step.makes for step in reversed(self.steps) if step.makes), self.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether a dense array of its dtype is read where it lies."""
        array = np.empty(self.shape, np.int8)
        made = self.of(array)
        return made.size == array.size and made.flags.c_contiguous and np.may_share_memory(made, array)

    @property
    def only_moves(self) -> bool:
        """Whether its elements are those of the operand, and zeros."""
        chains = (step.chains if isinstance(step, Join) else ((step,),) for step in self.steps)
        moves = (each for some in chains for chain in some for each in chain)
        return all(isinstance(each, Reshape | Transpose | Pad | Take | Tiles) for each in moves)

    @property
    def seconds(self) -> float:
        """The estimate of the time to pack an operand of a call on a CPU.

        Measured on a Zen 4 core for weights of 2,304 to 65,536 elements, of each that is made: 0.2 to 0.4 ns
        where their order alone is another, 1.1 where zeros are between, 2.7 to 4 of Winograd's filters.
        """
        shape, is_view = self.shape, True
        for step in self.steps:
            is_uneven = isinstance(step, Tiles) and shape[step.axis] % step.extent
            is_changed = isinstance(step, Pad | Take | Join) and step.after(shape) != shape
            is_view &= not is_uneven and not is_changed
            shape = step.after(shape)
        return 3e-6 + prod(shape) * (2.8e-9 if not self.only_moves else 0.35e-9 if is_view else 1.1e-9)

    @property
    def padded(self) -> int:
        """How many elements are the operand's in order with zeros behind them; 0 where they are moved."""
        *front, last = self.steps or (None,)
        is_flat = (
            isinstance(last, Pad) and len(last.shape) == 1 and Packing(self.shape, "", (*front,)).is_plain
        )
        return prod(self.extents) if is_flat else 0

    def of(self, array: Array) -> Array:
        """The array, of the operand's size, packed: perhaps a view, with any strides."""
        return _applied(self.steps, array.reshape(self.shape))

    def after(self, order: tuple[int, ...]) -> Packing:
        """The packing of an array with its axes in another order: `order` are those of this packing."""
        shape = tuple(self.shape[place] for place in np.argsort(order))
        return Packing(shape, self.dtype, (Transpose(order), *self.steps))

    def behind(self, first: Packing) -> Packing:
        """The packing of the array that another one makes this one's array of."""
        return Packing(first.shape, self.dtype, (*first.steps, *self.steps))

    def at(self, extent: int) -> Packing:
        """The same with another extent of its first axis, in order; zeros follow to the end of a vector."""
        shape = (extent, *self.shape[1:])
        line = -(-prod(shape) // LINE) * LINE
        return Packing(shape, self.dtype, (Reshape((prod(shape),)), Pad((line,))))

    def to_json(self) -> list[Any]:
        """The packing as JSON values."""
        return [list(self.shape), self.dtype, _written(self.steps)]

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Packing:
        """The packing that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        shape, dtype, steps = told
        return cls(_tuples(shape), str(dtype), _read(steps))


STEPS: dict[str, type[Any]] = {
    kind.__name__.lower(): kind
    for kind in (Reshape, Transpose, Pad, Take, Tiles, Product, Halves, Rounded, Thirds, Join)
}


def shape_after(steps: Sequence[Step], shape: Shape) -> Shape:
    """The shape that an array of `shape` has after the steps."""
    for step in steps:
        shape = step.after(shape)
    return shape


def _applied(steps: Sequence[Step], array: Array) -> Array:
    for step in steps:
        array = step.of(array)
    return array


def _written(steps: Sequence[Any]) -> list[Any]:
    """Each step as its name and its fields."""
    return [
        [type(step).__name__.lower(), *map(_written, step.chains)]
        if isinstance(step, Join)
        else [type(step).__name__.lower(), *(getattr(step, field.name) for field in fields(step))]
        for step in steps
    ]


def _read(told: Sequence[Any]) -> tuple[Step, ...]:
    return tuple(
        Join(tuple(map(_read, values))) if name == "join" else STEPS[name](*map(_tuples, values))
        for name, *values in told
    )


def _tuples(value: Any) -> Any:
    """Lists, at any depth, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def storage_axes(spec: TensorSpec) -> tuple[int, ...]:
    """Axes of one image (c and spatial) of a tensor, outermost first as it is stored."""
    strides = spec.element_strides[1:]
    return tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))

"""Reading src under the taps of a window: axes whose taps are loops, and what lies where there is padding.

`Joining` says how an element under a tap is joined to those of its window: its product is added, or as a pool
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from fuseplan.backends.cpu.dialect import table
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I1, I64, literal
from fuseplan.backends.cpu.loops import nested, offset_of, places
from fuseplan.kernels.contraction import Contraction


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution: output o reads src at o*stride + tap*dilation - low.

    Attributes:
        out: output positions.
        size: elements of src.
        kernel: taps.
        stride, dilation: steps in src, from one output to the next and from one tap to the next.
        low: padding before the first element.
        counted: the first position whose taps count for a mean, and that behind the last; None: all do.
    """

    out: int
    size: int
    kernel: int
    stride: int
    dilation: int
    low: int
    counted: tuple[int, int] | None = None

    def reach(self, count: int) -> int:
        """Elements from the first to the last that `count` outputs side by side read."""
        return (count - 1) * self.stride + (self.kernel - 1) * self.dilation + 1

    def users(self, count: int) -> Mapping[int, list[tuple[int, int]]]:
        """The (output, tap) pairs of `count` outputs that read each element, counted from the first read."""
        found: dict[int, list[tuple[int, int]]] = {}
        for out in range(count):
            for tap in range(self.kernel):
                found.setdefault(out * self.stride + tap * self.dilation, []).append((out, tap))
        return dict(sorted(found.items()))

    def first(self, out: int) -> int:
        """The element under the first tap of an output; negative where that is padding."""
        return out * self.stride - self.low

    def at(self, out: int, tap: int) -> int | None:
        """The element under a tap of an output; None for padding."""
        found = self.first(out) + tap * self.dilation
        return found if 0 <= found < self.size else None

    def is_inside(self, out: int, count: int) -> bool:
        """Whether `count` outputs from `out` on read no padding."""
        return self.first(out) >= 0 and self.first(out) + self.reach(count) <= self.size

    def padded(self, size: int) -> Axis:
        """The axis of a copy with its padding, of so many elements."""
        ends = self.counted and (self.counted[0] + self.low, self.counted[1] + self.low)
        return replace(self, size=size, low=0, counted=ends)

    @property
    def is_padded(self) -> bool:
        """Whether any output reads padding."""
        return not self.is_inside(0, self.out)

    @property
    def edges(self) -> int:
        """Outputs that read padding."""
        before, _, behind = self.starts(1)
        return len(before) + len(behind) + (not self.is_inside(self.out - 1, 1))

    def tiles(self, count: int) -> int:
        """Tiles of `count` outputs that cover the axis; the last starts early instead of being smaller."""
        return -(-self.out // count)

    def starts(self, count: int) -> tuple[range, range, range]:
        """First outputs of all tiles but the last: before, among and behind the tiles without padding."""
        starts = range(0, self.out, count)[:-1]
        step = count * self.stride
        first = -(-self.low // step)
        end = max(first, (self.size + self.low - self.reach(count)) // step + 1)
        return starts[:first], starts[first:end], starts[end:]


NO_AXIS = Axis(out=1, size=1, kernel=1, stride=1, dilation=1, low=0)


def axes(conv: Contraction) -> tuple[Axis, ...]:
    """The spatial axes of a convolution that reads src itself."""
    lows = (low for low, _ in conv.padding)
    numbers = zip(
        conv.dst_spatial, conv.src_spatial, conv.kernel, conv.stride, conv.dilation, lows, strict=True
    )
    found = tuple(Axis(*each) for each in numbers)
    if conv.pool is None or not conv.pool.counted:
        return found
    return tuple(map(_counting, found, conv.pool.counted))


def _counting(axis: Axis, ends: tuple[int, int]) -> Axis:
    """The axis with these ends, where a window reaches beyond them."""
    first, last = axis.first(0), axis.first(axis.out - 1) + axis.reach(1)
    return axis if ends[0] <= first and last <= ends[1] else replace(axis, counted=ends)


def counted_taps(axis: Axis, first: int) -> int:
    """How many taps of an output count for its mean; `first` is the position under its first tap."""
    begin, end = axis.counted or (first, first + axis.reach(1))
    return sum(begin <= first + tap * axis.dilation < end for tap in range(axis.kernel))


def counted(b: Builder, axis: Axis, first: Index) -> Index:
    """The same where the position is known at run time."""
    if axis.counted is None or isinstance(first, int):
        return counted_taps(axis, first if isinstance(first, int) else 0)
    begin, end = (_taps_before(b, axis, at - first) for at in axis.counted)
    return end - begin


def _taps_before(b: Builder, axis: Axis, distance: Value) -> Index:
    """How many taps of an output stand in front of a position so far behind its first tap."""
    above = b.select(b.compare("sgt", distance, 0), distance, 0)
    most = axis.kernel * axis.dilation
    return (b.smaller(above, most) + (axis.dilation - 1)) // axis.dilation


def inside(b: Builder, axis: Axis, position: Index) -> Value:
    """Whether a position is one of src's; always true on an axis without padding."""
    if not axis.is_padded:
        return Value(b, I1, "true")
    return b.compare("ult", b.const(position, I64), axis.size)


class FarTaps:
    """The axes of a window whose taps are loops.

    Args:
        axes: outermost first.
        strides: elements of src from one position to the next along each.
    """

    def __init__(self, b: Builder, axes: Sequence[Axis], strides: Sequence[int]) -> None:
        self.b, self._axes = b, list(zip(axes, strides, strict=True))

    def under(self, number: Index) -> tuple[tuple[Index, ...], Index, Index]:
        """What lies under the first tap of an output, by its number.

        Returns:
            its position in src along each axis; the offset of all of these; the count of outer things that
            the number has besides.
        """
        count, *outs = places(number, [1, *(axis.out for axis, _ in self._axes)])
        moved = zip(outs, self._axes, strict=True)
        found = tuple(out * axis.stride - axis.low for out, (axis, _) in moved)
        return found, offset_of(found, (stride for _, stride in self._axes)), count

    @contextmanager
    def each(self, under: Sequence[Index]) -> Iterator[tuple[Index, Index, list[Value]]]:
        """Loops over the taps: the number of a tap, its offset in src, and whether it is there."""
        tap: Index = 0
        with nested(self.b, [axis.kernel for axis, _ in self._axes], "tap") as at:
            for (axis, _), index in zip(self._axes, at, strict=True):
                tap = index + tap * axis.kernel
            offset = offset_of(at, (axis.dilation * stride for axis, stride in self._axes))
            moved = zip(self._axes, at, under, strict=True)
            tests = [
                inside(self.b, axis, index * axis.dilation + position) for (axis, _), index, position in moved
            ]
            yield tap, offset, tests


def guarded(
    b: Builder, conditions: Sequence[Value], count: int, values: Iterator[Value], fill: float = 0.0
) -> list[Value]:
    """`count` vectors, which are read where all conditions hold; `fill` elsewhere."""
    condition = b.both(conditions)
    if condition.name == "true":
        return list(values)
    places = [b.variable(b.vector, b.number(fill)) for _ in range(count)]
    with b.when(condition):
        for place, value in zip(places, values, strict=True):
            place.set(value)
    return [place.get() for place in places]


Count = Index | tuple[int, ...]  # of all lanes, or of each


class Joining:
    """The join of a contraction's windows in a kernel that is being written.

    Attributes:
        weight: the address of the weight; of a pool, of nothing.
    """

    def __init__(self, frame: Frame) -> None:
        kernel, self.b = frame.kernel, frame.body
        self._pool = kernel.contraction.pool
        self._join = table(self.b)[self._pool.join] if self._pool else None
        self.weight = self.b.parameters[0]
        if self._pool is None:
            self.weight = frame.pointer("operand", kernel.weight.key)

    def join(self, x: Value, before: Value, weight: Callable[[], Value]) -> Value:
        """What is made of an element and of those before it; `weight` gives the element's factor."""
        return self._join(before, x) if self._join else self.b.fma(x, weight(), before)

    def finished(self, value: Value, counts: Callable[[], Iterable[Count]]) -> Value:
        """A window's value: of a mean, over the product of the counts along the axes."""
        if self._pool is None or not self._pool.counted:
            return value
        b = self.b
        lanes, rest = [1] * b.lanes, None
        for count in counts():
            if isinstance(count, Value):
                rest = count if rest is None else rest * count
            else:
                each = (count,) * b.lanes if isinstance(count, int) else count
                lanes = [one * other for one, other in zip(lanes, each, strict=True)]
        numbers = (literal(1 / count if count else inf, b.element) for count in lanes)
        value = value * Value(b, b.vector, f"<{', '.join(f'{b.element} {number}' for number in numbers)}>")
        return value if rest is None else value / b.splat(b.convert("uitofp", rest, b.element))

"""Reading src under the taps of a window: axes whose taps are loops, and zeros where there is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I1, I64
from fuseplan.backends.cpu.loops import nested, offset_of, places
from fuseplan.backends.cpu.windows import Axis


def inside(b: Builder, axis: Axis, position: Index) -> Value:
    """Whether a position is one of src's; always true on an axis without padding."""
    if not axis.is_padded:
        return Value(b, I1, "true")
    return b.compare("ult", b.const(position, I64), axis.size)


class FarTaps:
    """The axes of a window whose taps are loops.

    Args:
        b: the function being written.
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


def guarded(b: Builder, conditions: Sequence[Value], count: int, values: Iterator[Value]) -> list[Value]:
    """`count` vectors, which are read where all conditions hold; zeros elsewhere."""
    condition = b.both(conditions)
    if condition.name == "true":
        return list(values)
    places = [b.variable(b.vector, b.number(0.0)) for _ in range(count)]
    with b.when(condition):
        for place, value in zip(places, values, strict=True):
            place.set(value)
    return [place.get() for place in places]

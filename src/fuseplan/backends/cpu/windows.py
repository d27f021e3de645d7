"""Which elements of src the taps of an output position reach, one spatial axis at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuseplan.kernel import Convolution


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution: output o reads src at o*stride + tap*dilation - low.

    Attributes:
        out: output positions.
        size: elements of src.
        kernel: taps.
        stride, dilation: steps in src, from one output to the next and from one tap to the next.
        low: padding before the first element.
    """

    out: int
    size: int
    kernel: int
    stride: int
    dilation: int
    low: int

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


def axes(conv: Convolution) -> tuple[Axis, ...]:
    """The spatial axes of a convolution that reads src itself."""
    lows = (low for low, _ in conv.padding)
    numbers = zip(
        conv.dst_spatial, conv.src_spatial, conv.kernel, conv.stride, conv.dilation, lows, strict=True
    )
    return tuple(Axis(*each) for each in numbers)

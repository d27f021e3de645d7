"""Windows that move over spatial axes: what convolutions and pools share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, ClassVar

from fuseplan.errors import PlanError, near_miss
from fuseplan.language.arithmetic import Arithmetic
from fuseplan.language.declarations import Array, Shape
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import positive, refused
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op

Pair = tuple[int, int]
PerAxis = int | tuple[int, ...]
Padding = int | str | tuple[int | Pair, ...]
COLUMNS_BYTES = 1 << 25  # of windows in float64 that are in memory at once, but for those of one image


@dataclass(frozen=True)
class Window:
    """How a window moves over a src: one entry a spatial axis, padding as (low, high)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[Pair, ...]
    dst: tuple[int, ...]


class Windowed(Op):
    """An operator whose window moves over the spatial axes: `class Conv2d(Conv, axes=2)`, torch's `conv2d`.

    Fields are kept in one form: a number where all axes agree, else a number an axis. Padding is a number,
    a number or (low, high) pair an axis, `same`, or `valid`, which is 0.

    Attributes:
        axes: how many spatial axes src has.
        nothing: what an output without elements means.
    """

    kind = "contraction"
    reads = "channels"

    axes: ClassVar[int]
    nothing: ClassVar[str] = "the kernel is larger than its padded input"
    kernel: PerAxis
    stride: PerAxis | None
    padding: Padding
    dilation: PerAxis

    def __init_subclass__(cls, axes: int = 0) -> None:
        super().__init_subclass__()
        if axes:
            cls.axes, cls.torch = axes, cls.torch and f"{cls.torch}{axes}d"

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements of src from one window to the next, along each axis: without a stride, the kernel."""
        return self.per_axis(self.kernel if self.stride is None else self.stride)

    def _set_numbers(self, *names: str) -> None:
        """Gives fields of numbers an axis their form."""
        for name in names:
            values = self._axes_of(name, getattr(self, name))
            self._set(name, shortest(tuple(positive(self.name, name, value) for value in values)))

    def _axes_of(self, name: str, value: Any) -> tuple[Any, ...]:
        """The value for each spatial axis."""
        if not isinstance(value, tuple | list):
            return (value,) * self.axes
        if len(value) != self.axes:
            raise refused(
                self.name,
                name,
                f"must be one number, or one for each of {self.axes} spatial axes",
                got=shown(value),
            )
        return tuple(value)

    def _canonical_padding(self) -> Padding:
        if isinstance(self.padding, str):
            if self.padding in ("same", "valid"):
                return "same" if self.padding == "same" else 0
            raise refused(
                self.name,
                "padding",
                f"is not {shown(self.padding)}",
                want="same, valid, a number, or a number or (low, high) pair for each axis",
                remedy=near_miss(self.padding, ("same", "valid")),
            )
        pairs = tuple(self._pair(value) for value in self._axes_of("padding", self.padding))
        is_symmetric = all(low == high for low, high in pairs)
        return shortest(tuple(low for low, _ in pairs)) if is_symmetric else pairs

    def _pair(self, value: Any) -> Pair:
        pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2 or not all(is_integer(side) and 0 <= side < 2**31 for side in pair):
            raise refused(
                self.name,
                "padding",
                "must be 0 to 2^31 - 1 at the low and the high end of each axis",
                got=shown(self.padding),
                want=f"such as 1, {(1,) * self.axes} or {((0, 1),) * self.axes}",
            )
        return int(pair[0]), int(pair[1])

    def per_axis(self, value: PerAxis) -> tuple[int, ...]:
        """One of `kernel`, `stride`, `dilation`, as a number a spatial axis."""
        return (value,) * self.axes if isinstance(value, int) else value

    def window(self, src: TensorSpec) -> Window:
        """How the window moves over `src`, `same` padding resolved; an output extent may be 0 or less."""
        kernel, dilation = map(self.per_axis, (self.kernel, self.dilation))
        reaches = tuple(map(reach, kernel, dilation))
        padding = self._padding_of(src.spatial, reaches, self.steps)
        dst = tuple(map(self._count, src.spatial, padding, reaches, self.steps))
        return Window(kernel, self.steps, dilation, padding, dst)

    def _count(self, extent: int, padding: Pair, over: int, stride: int) -> int:
        """Windows along an axis, each over so many elements."""
        return (extent + sum(padding) - over) // stride + 1

    def check_window(self, src: TensorSpec, remedy: str) -> None:
        """Checks that the window moves over the spatial axes of src.

        Args:
            remedy: the operator for a src without spatial axes, or with others.

        Raises:
            PlanError: src has another number of them; an extent of the output would be 0.
        """
        if len(src.spatial) != self.axes:
            raise PlanError(
                f"{self.name} takes a tensor with {self.axes} spatial axes",
                got=f"{src}, which has {len(src.spatial)}",
                want=f"rank {self.axes + 2}",
                remedy=f"This tensor is taken by {remedy}",
            )
        if min(self.window(src).dst) < 1:
            raise PlanError(
                f"{self.name}: {self.nothing}",
                got=f"kernel={self.kernel}, dilation={self.dilation}, padding={self.padding} over {src}",
                want="an output of 1 or more along each axis",
            )

    def _padding_of(self, spatial: Shape, reaches: Shape, stride: Shape) -> tuple[Pair, ...]:
        if self.padding == "same":
            return tuple(map(_same, spatial, reaches, stride))
        return tuple(self._pair(value) for value in self._axes_of("padding", self.padding))


def taps_of(src: Array, window: Window, by: Arithmetic, fill: float = 0.0) -> Iterator[Array]:
    """What each position of the kernel meets of the padded src: (n, c, *dst), a view."""
    ends = list(zip(src.shape[2:], window.padding, strict=True))
    padded = by.empty((*src.shape[:2], *(extent + sum(pair) for extent, pair in ends)))
    padded[...] = fill
    padded[(..., *(slice(low, low + extent) for extent, (low, _) in ends))] = src
    for tap in product(*map(range, window.kernel)):
        starts = (at * apart for at, apart in zip(tap, window.dilation, strict=True))
        under = [
            slice(start, start + (extent - 1) * step + 1, step)
            for start, step, extent in zip(starts, window.stride, window.dst, strict=True)
        ]
        yield padded[(..., *under)]


def columns_of(src: Array, window: Window, groups: int, by: Arithmetic) -> Iterator[tuple[slice, Any]]:
    """Of some images at a time, a matrix for each group: a row a channel and tap, a column a position."""
    size = src.shape[1] * prod(window.kernel) * prod(window.dst)
    images = max(1, COLUMNS_BYTES // (8 * size))
    for some in (slice(begin, begin + images) for begin in range(0, len(src), images)):
        seen = list(taps_of(src[some], window, by))
        made = by.empty((len(src[some]), src.shape[1], len(seen), *window.dst))
        for tap, each in enumerate(seen):
            made[:, :, tap] = each
        yield some, made.reshape(len(made), groups, -1, prod(window.dst))


def reach(taps: int, dilation: int) -> int:
    """Elements from the kernel's first tap to its last."""
    return dilation * (taps - 1) + 1


def _same(extent: int, reach: int, stride: int) -> Pair:
    """Padding that makes ceil(extent/stride) of an axis; an odd element goes to the high end, as in ONNX."""
    total = max(0, (-(-extent // stride) - 1) * stride + reach - extent)
    return total // 2, total - total // 2


def shortest(values: tuple[int, ...]) -> PerAxis:
    """One number where all axes agree."""
    return values[0] if len(set(values)) == 1 else values

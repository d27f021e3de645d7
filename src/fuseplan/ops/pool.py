"""Pools in one, two and three spatial axes: the largest or the mean element under a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import reduce
from typing import ClassVar

import numpy as np

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import Array
from fuseplan.language.reduction import JOINS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Given, Op, operator
from fuseplan.ops.windows import Padding, Pair, PerAxis, Window, Windowed, reach, taps_of


@dataclass(frozen=True)
class Pool(Windowed):
    """What pools of any number of spatial axes share: each channel has windows of its own.

    Without a stride, windows lie side by side. With `ceil_mode` the last window along an axis may reach
    beyond the padding, if it begins inside src or the low padding, as in PyTorch.

    Attributes:
        join: how two elements under a window become one: a function of `JOINS`.
    """

    join: ClassVar[str]

    kernel: PerAxis
    _: KW_ONLY
    stride: PerAxis | None = None
    padding: Padding = 0
    dilation: PerAxis = 1
    ceil_mode: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_numbers("kernel", "dilation")
        if self.stride is not None:
            self._set_numbers("stride")
            self._set("stride", None if self.stride == self.kernel else self.stride)
        self._set("padding", self._canonical_padding())

    def _count(self, extent: int, padding: Pair, over: int, stride: int) -> int:
        found = super()._count(extent, padding, over, stride)
        is_begun = found * stride < extent + padding[0]
        return found + (self.ceil_mode and is_begun and (extent + sum(padding) - over) % stride > 0)

    def window(self, src: TensorSpec) -> Window:
        """How the window moves over `src`; the high padding is as large as the last window reaches."""
        found = super().window(src)
        ends = [
            (out - 1) * step + over - extent - low
            for out, step, over, extent, (low, _) in zip(
                found.dst,
                found.stride,
                map(reach, found.kernel, found.dilation),
                src.spatial,
                found.padding,
                strict=True,
            )
        ]
        pairs = tuple((low, max(high, end)) for (low, high), end in zip(found.padding, ends, strict=True))
        return replace(found, padding=pairs)

    def output(self, src: TensorSpec) -> TensorSpec:
        """n, c, and along each axis (extent + padding - dilation*(kernel - 1) - 1)//stride + 1.

        Raises:
            PlanError: src has another rank, or an extent would be 0.
        """
        word = self.name[: -len("1d")]
        self.check_window(src, f"{word}{len(src.spatial)}d" if src.spatial else "amax or mean")
        return src.with_shape((src.batch, src.channels, *self.window(src).dst))

    def counted(self, src: TensorSpec) -> tuple[Pair, ...]:
        """For a mean, along each axis: the first position whose taps count, and that behind the last."""
        return ()

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The windows in float64, joined; for a mean over the number of taps that count."""
        window = self.window(given.spec)
        return pool(given.src, window, self.join, self.counted(given.spec), given.by), {}


def pool(src: Array, window: Window, join: str, counted: Sequence[Pair], by: Arithmetic = ARRAYS) -> Array:
    """The elements under each window joined, in float64; for a mean over the number of taps that count."""
    made: Array = reduce(by.table[join], taps_of(src, window, by, JOINS[join]))
    for axis, ends in enumerate(counted):
        spread = [1] * len(src.shape)
        spread[2 + axis] = window.dst[axis]
        made = made / by.table["const"](taps_counted(window, axis, ends)).reshape(spread)
    return made


def taps_counted(window: Window, axis: int, ends: Pair) -> Array:
    """How many taps of each window along an axis lie between two positions."""
    begins = np.arange(window.dst[axis]) * window.stride[axis] - window.padding[axis][0]
    taps = begins[:, None] + np.arange(window.kernel[axis]) * window.dilation[axis]
    found: Array = ((taps >= ends[0]) & (taps < ends[1])).sum(1).astype(np.float64)
    return found


@dataclass(frozen=True)
class MaxPool(Pool):
    """The largest element under each window: NaN where there is one, -inf where there is none."""

    onnx = "MaxPool"
    torch = "max_pool"
    join = "maximum"


@dataclass(frozen=True)
class AvgPool(Pool):
    """The mean of the elements under each window."""

    onnx = "AveragePool"
    torch = "avg_pool"
    join = "add"

    _: KW_ONLY
    count_include_pad: bool = True

    def counted(self, src: TensorSpec) -> tuple[Pair, ...]:
        """src; with `count_include_pad` its padding too, but not what lies beyond it."""
        if not self.count_include_pad:
            return tuple((0, extent) for extent in src.spatial)
        padding = Windowed.window(self, src).padding
        return tuple((-low, extent + high) for extent, (low, high) in zip(src.spatial, padding, strict=True))


@operator
class MaxPool1d(MaxPool, axes=1):
    """dst[n, c, o] = max over k of src[n, c, o*stride + k*dilation - padding]

    src: (n, c, w); dst: (n, c, output). The fields have the meaning of `max_pool2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x11]", cls(3)
        yield "f32[2x5x9, nwc]", cls(2, stride=3, padding=1, dilation=2, ceil_mode=True)


@operator
class MaxPool2d(MaxPool, axes=2):
    """dst[n, c, o, p] = max over k, l of src[n, c, o*stride + k*dilation - padding, ..]

    The largest element under each window, as torch.nn.functional.max_pool2d finds it: NaN where there is one.
    Padding is no element, and -inf where a window has nothing else. src: (n, c, h, w); dst: (n, c, *output).

    `kernel`, `stride` and `dilation` are a number for both axes, or one for each; without a stride, windows
    lie side by side. `padding` is a number or two too, or a pair (low, high) for each axis, or `same` or
    `valid`, as `conv2d` has them. Along each axis the output has
    (extent + low + high - dilation*(kernel - 1) - 1)//stride + 1 elements; with `ceil_mode` the quotient is
    rounded up, but no window begins behind src.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x5x9x8, nhwc]", cls(3, stride=2, padding=1)
        yield "f32[2x3x7x9]", cls(3, stride=2, padding=1)
        yield "f32[1x3x8x6, nhwc]", cls((2, 3), stride=(2, 1), padding=((0, 1), (1, 0)), dilation=(1, 2))
        yield "f32[1x5x8x7]", cls(2, ceil_mode=True)


@operator
class MaxPool3d(MaxPool, axes=3):
    """dst[n, c, o..] = max over k.. of src[n, c, o*stride + k*dilation - padding, ..]

    src: (n, c, d, h, w); dst: (n, c, *output). The fields have the meaning of `max_pool2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[1x3x4x5x6]", cls(2, stride=1, padding=1)
        yield "f32[2x4x5x3x7, ndhwc]", cls((1, 3, 2), stride=(2, 1, 3), padding="same")


@operator
class AvgPool1d(AvgPool, axes=1):
    """dst[n, c, o] = mean over k of src[n, c, o*stride + k*dilation - padding]

    src: (n, c, w); dst: (n, c, output). The fields have the meaning of `avg_pool2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x3x11]", cls(3, stride=2, padding=1)
        yield "f32[2x5x9, nwc]", cls(2, stride=3, padding=1, ceil_mode=True, count_include_pad=False)


@operator
class AvgPool2d(AvgPool, axes=2):
    """dst[n, c, o, p] = mean over k, l of src[n, c, o*stride + k*dilation - padding, ..]

    The mean under each window, as torch.nn.functional.avg_pool2d finds it. Padding counts as zeros, or with
    `count_include_pad=False` not at all; positions beyond it, which `ceil_mode` may reach, never count. The
    other fields, and the shapes, are those of `max_pool2d`.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[2x5x9x8, nhwc]", cls(3, stride=2, padding=1)
        yield "f32[2x3x7x9]", cls(2)
        yield (
            "f32[1x3x8x6, nhwc]",
            cls((2, 3), stride=(2, 1), padding=((0, 1), (1, 0)), count_include_pad=False),
        )
        yield "f32[1x5x8x7]", cls(3, padding=1, ceil_mode=True, count_include_pad=False)


@operator
class AvgPool3d(AvgPool, axes=3):
    """dst[n, c, o..] = mean over k.. of src[n, c, o*stride + k*dilation - padding, ..]

    src: (n, c, d, h, w); dst: (n, c, *output). The fields have the meaning of `avg_pool2d`'s.
    """

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[1x3x4x5x6]", cls(2, stride=1, padding=1, count_include_pad=False)
        yield "f32[2x4x5x3x7, ndhwc]", cls((1, 3, 2), stride=(2, 1, 3), padding="same")


MAX_POOLS: tuple[type[MaxPool], ...] = (MaxPool1d, MaxPool2d, MaxPool3d)
AVG_POOLS: tuple[type[AvgPool], ...] = (AvgPool1d, AvgPool2d, AvgPool3d)
POOLS = (*MAX_POOLS, *AVG_POOLS)

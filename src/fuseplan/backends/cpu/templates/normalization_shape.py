"""How a kernel with reductions sees its tensor: rows that are summed, and where vectors lie.

Lanes are columns where neighbours in storage belong to different sums (channels last, per activation): each
lane has sums of its own. They are a run where neighbours belong to the same sum (channels first). There, runs
too short to be worth a sum of lanes may be columns as well, a column for each position: `fold` of them are
added up in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from fuseplan.backends.cpu.ir import Index
from fuseplan.backends.cpu.loops import ceil_div
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.walk import Axis, merged
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.layouts import image_strides
from fuseplan.language.tensor import TensorSpec

TILE = 8  # rows of columns in one tile: their sum is rounded three times
CHUNK = 2048  # most elements of a run in one tile, which the first cache holds for the second look
PART = 1 << 16  # about as many elements of a sum are one part, where there are many
PARTS = 32  # most parts
LINE = 64  # bytes of a line of the caches


@dataclass(frozen=True)
class Shape:
    """The loops over a tensor whose elements are summed by channel or by place.

    Attributes:
        columns: whether lanes are columns.
        rows: the axes that are summed, outermost first; without the run.
        run: along which lanes lie; dst is dense along it.
        outer: axes around a run of columns that does not hold them all.
        cells: how many sums there are: channels, or places of an image.
        channel: of runs, a step to the next channel.
        fold: columns that belong to one sum.
        chunk: of runs, elements in one tile.
        part: rows in a part; of runs, tiles.
        images: whether a row of columns is an image, so that a column is the same place of each.
    """

    columns: bool
    rows: tuple[Axis, ...]
    run: Axis
    outer: tuple[Axis, ...]
    cells: int
    channel: Axis
    fold: int
    chunk: int
    part: int
    images: bool = False

    @property
    def row_count(self) -> int:
        """Rows of columns; of runs, tiles over all that is summed."""
        return prod(axis.extent for axis in self.rows) * self.chunks

    @property
    def chunks(self) -> int:
        """Tiles of a run."""
        return 1 if self.columns else -(-self.run.extent // self.chunk)

    @property
    def parts(self) -> int:
        """Parts in which a sum is made; they depend on the kernel alone, so that results do as well."""
        return -(-self.row_count // self.part)

    @property
    def width(self) -> int:
        """All columns; as many as sums, where lanes are not columns."""
        return self.cells * self.fold

    @property
    def segments(self) -> int:
        """Runs of columns."""
        return prod(axis.extent for axis in self.outer)

    def elements(self, part: int) -> int:
        """Elements of a column, or of a run's sum, in a part."""
        return self._before(min((part + 1) * self.part, self.row_count)) - self._before(part * self.part)

    def _before(self, row: int) -> int:
        if self.columns:
            return row
        return row // self.chunks * self.run.extent + row % self.chunks * self.chunk


@dataclass(frozen=True)
class NormalizationKnobs(CpuTemplate):
    """The choice of `Normalization`.

    Attributes:
        folded: the lanes of a vector are channels or places with sums of their own; otherwise they are
            positions of one channel.
        whole: a task computes all of its sums and then its part of dst; otherwise tasks compute parts of
            sums, and all tasks wait for all parts.
        block: columns or channels in a task.
        stream: writes go past the caches.
    """

    folded: bool
    whole: bool
    block: int
    stream: bool


@dataclass(frozen=True)
class Unit:
    """Columns, or one channel, that are gone through together.

    Attributes:
        low, high: the first and the one behind the last, of their run.
        first: the first, of all.
        dst, src, image: where their run begins.
    """

    low: Index
    high: Index
    first: Index
    dst: Index = 0
    src: Index = 0
    image: Index = 0


def shape_of(kernel: Kernel, folded: bool, width: int) -> Shape:
    """The loops for a kernel and vectors of `width` lanes; `folded`: short runs become columns."""
    axes, dst = _axes(kernel), kernel.dst
    image = dst.size // dst.batch
    channel = _one(axes[1])
    if kernel.reduction.per == "activation" and image > 1:
        return _columns(axes[:1], axes[1:], channel, 1, images=True)
    if dst.element_strides[1] == 1 and dst.channels > 1:
        return _columns([axes[0], *axes[2:]], axes[1:2], channel, 1, images=False)
    if folded and can_fold(kernel):
        return _columns(axes[:1], axes[1:], channel, image // dst.channels, images=True)
    *rows, run = _ordered([axes[0], *axes[2:]])
    return _runs(tuple(rows), run, channel, width)


def can_fold(kernel: Kernel) -> bool:
    """Whether the positions of all channels are one run in src as in dst, and channels are not."""
    dst = kernel.dst
    if kernel.reduction.per == "activation" or dst.element_strides[1] == 1 or dst.channels == 1:
        return False
    if any(operand.is_inside and 1 not in operand.axes for operand in kernel.operands):
        return False  # whose lanes may not reach from one channel to the next
    columns = _ordered(_axes(kernel)[1:])
    return len(columns) == 1 and columns[0].src == 1


def _axes(kernel: Kernel) -> list[Axis]:
    """One loop for each axis, in logical order."""
    dst, src = kernel.dst, kernel.src
    image = _places(kernel, dst)
    return [
        Axis(extent, dst.element_strides[i], src.element_strides[i], image[i])
        for i, extent in enumerate(dst.shape)
    ]


def _places(kernel: Kernel, dst: TensorSpec) -> tuple[int, ...]:
    """A step's distance within an image, where an operand per activation asks for it."""
    asked = any(operand.is_inside for operand in kernel.operands)
    return image_strides(dst.shape, dst.element_strides) if asked else (0,) * dst.rank


def _one(axis: Axis) -> Axis:
    return axis if axis.extent > 1 else Axis(1, 0, 0)


def _ordered(axes: Iterable[Axis]) -> list[Axis]:
    """Axes as dst stores them, those that are one loop merged; at least one."""
    listed = sorted((axis for axis in axes if axis.extent > 1), key=lambda axis: -axis.dst)
    return merged(listed) or [Axis(1, 1, 1, 1)]


def _columns(rows: list[Axis], columns: list[Axis], channel: Axis, fold: int, *, images: bool) -> Shape:
    *outer, run = _ordered(columns)
    summed = tuple(_ordered(rows)) if any(axis.extent > 1 for axis in rows) else ()
    width = prod(axis.extent for axis in (*outer, run))
    count = prod(axis.extent for axis in summed)
    longest = max(8 * TILE, 2 * PART // width, -(-count // PARTS))
    part = _even(count, longest, TILE)
    return Shape(True, summed, run, tuple(outer), width // fold, channel, fold, 0, part, images)


def _runs(rows: tuple[Axis, ...], run: Axis, channel: Axis, width: int) -> Shape:
    chunk = _even(run.extent, CHUNK, 4 * width)
    chunks, count = -(-run.extent // chunk), prod(axis.extent for axis in rows)
    if count == 1:
        part = _even(chunks, max(PART // chunk, -(-chunks // PARTS), 1), 1)
    else:
        part = _even(count, max(PART // run.extent, -(-count // PARTS), 1), 1) * chunks
    return Shape(False, rows, run, (), channel.extent, channel, 1, chunk, part)


def in_lines(size: Any) -> Any:
    """So many bytes in whole lines of the caches; a value of a value."""
    return ceil_div(size, LINE) * LINE


def _even(extent: int, most: int, step: int) -> int:
    """The length of equal parts of at most about `most`, in whole steps."""
    return -(-extent // (-(-extent // most) * step)) * step

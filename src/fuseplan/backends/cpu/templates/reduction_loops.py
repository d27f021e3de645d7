"""The loops of kernels with statistics: blocks of cells, parts and chunks of elements, vectors of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, number_of
from fuseplan.backends.cpu.loops import by_length, ceil_div, offset_of, pieces, places, streamed, within
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.lattice import Axis, Lattice

UNROLL = 4  # vectors, or rows, that are visited at a time
CHUNK = 512  # vectors of a cell whose state is merged into that of the chunks before
ROWS = 64  # rows of a chunk where lanes are cells: with 256, sums of 512 rows are 1.4 times as far as torch's
PART = 1 << 16  # about as many elements of a cell are one part, where there are many
PARTS = 32  # most parts
FEW = 8  # cells, or vectors of columns, whose parts one task gathers

Offsets = tuple[Index, ...]  # of each of the lattice's tensors


@dataclass(frozen=True)
class Cut(CpuTemplate):
    """The knobs of `Reduction`: how the loops of a kernel become tasks.

    Attributes:
        cells: cells of a task, or columns where lanes are columns.
        parts: parts of the elements of a cell; their states are gathered in order.
        split: each part of a block is a task, and all tasks wait for the statistics of all parts; otherwise a
            task computes all parts of its cells and their elements of dst.
        near: the elements of a cell, or of the columns of a task, stay in the second cache: each level of a
            statistic's parts has a pass of its own.
        stream: writes go past the caches.
        folded: lanes are columns of which several belong to a cell; otherwise, elements of one cell or cells.
    """

    cells: int
    parts: int = 1
    split: bool = False
    near: bool = False
    stream: bool = False
    folded: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether the state of a cell never leaves its task."""
        return not self.split and self.parts == 1

    def greatest(self, lattice: Lattice, lanes: int) -> float:
        """The part of a cell's elements that the longest task has."""
        _, size, pieces = chunking(lattice, lanes)
        chunks = -(-pieces // size)
        return min(1.0, -(-chunks // self.parts) * size / pieces) if self.split else 1.0


@dataclass(frozen=True)
class Chunk:
    """Pieces of the elements of a cell, rows or runs, from `first` up to, not including, `stop`."""

    first: Index
    stop: Index
    backwards: bool


@dataclass(frozen=True)
class Unit:
    """Cells that a task goes through together: one, or columns `low` to `high` of the run.

    Attributes:
        offsets: of its first cell, without the columns.
        slot: the place of that cell among all states of the workspace.
    """

    offsets: Offsets
    slot: Index
    low: Index = 0
    high: Index = 1


class Loops:
    """The loops of one kernel.

    Args:
        cut: how they become tasks.
        line: elements of a cache line of dst, where dst is written past the caches; otherwise 0.
        count: how many cells there are, where no number says it.
        block: cells of a task, likewise.

    Attributes:
        width: columns of a block, and a vector that may begin anywhere in it.
        slots: states of all cells in the workspace.
        chunk_count: chunks of all elements of a cell.
        share: chunks of a part.
        is_single: every part is one chunk.
    """

    def __init__(
        self,
        builder: Builder,
        lattice: Lattice,
        cut: Cut,
        line: int,
        count: Index | None = None,
        block: Index | None = None,
    ) -> None:
        self.b, self.lattice, self.lanes, self.parts = builder, lattice, builder.lanes, cut.parts
        self.line = line
        self.cell_count: Any = lattice.cell_count if count is None else count
        step, run = lcm(lattice.fold, self.lanes), lattice.run.extent
        self._few = rounded(min(cut.cells, FEW * step), step)
        columns = rounded(min(cut.cells, run), step)
        self.block: Any = columns
        self.width, self._pitch = columns + self.lanes, rounded(run, self.lanes)
        if lattice.is_along:
            self.block, self._few = cut.cells if block is None else block, FEW
            self.width, self._pitch = self.lanes, 1
        self.slots = _count(lattice.outer_cells) * self._pitch + self.lanes
        self._piece, self._size, self._pieces = chunking(lattice, self.lanes)
        self.chunk_count = -(-self._pieces // self._size)
        self.share = -(-self.chunk_count // cut.parts)
        self.is_single = self.share == 1 and self.parts <= self.chunk_count

    def blocks(self, *, few: bool = False) -> Any:
        """Blocks of cells; `few`: as small as they are when parts are gathered."""
        size = self._few if few else self.block
        if self.lattice.is_along:
            return ceil_div(self.cell_count, size)
        extent = self.lattice.run.extent
        return self.cell_count * self.lattice.fold // extent * ceil_div(extent, size)

    @contextmanager
    def units(self, index: Index, *, few: bool = False) -> Iterator[Unit]:
        """The cells of a block: one after the other, or columns side by side."""
        b, lattice, size = self.b, self.lattice, self._few if few else self.block
        if lattice.is_along:
            low, high = within(b, index, size, self.cell_count)
            with b.loop(low, high, name="cell") as cell:
                yield Unit(self.offsets(lattice.outer_cells, cell), cell)
            return
        extent = lattice.run.extent
        across = ceil_div(extent, size)
        low, high = within(b, index % across, size, extent)
        outer = index // across
        yield Unit(self.offsets(lattice.outer_cells, outer), outer * self._pitch, low, high)

    def offsets(self, axes: Sequence[Axis], index: Index) -> Offsets:
        """Where a place along some axes begins in each tensor."""
        at = places(index, [axis.extent for axis in axes])
        return tuple(
            offset_of(at, [axis.steps[tensor] for axis in axes])
            for tensor in range(len(self.lattice.tensors))
        )

    def vectors(self, unit: Unit, visit: Callable[[Index, int], None]) -> None:
        """visit(at, count) for the vectors of a unit's cells, `at` elements behind its first."""
        if self.lattice.is_along:
            visit(0, self.lanes)
            return
        low, extent = unit.low, self.lattice.run.extent
        pieces(
            self.b,
            extent,
            self.lanes,
            lambda first, count: visit(first - low, count),
            name="column",
            within=(low, unit.high),
        )

    def cells(self, unit: Unit, visit: Callable[[Index, int], None]) -> None:
        """visit(at, count) for the cells of a unit: one, several in a vector, or each one's first column."""
        fold = self.lattice.fold
        if self.lattice.is_along:
            visit(0, 1)
        elif fold == 1:
            self.vectors(unit, visit)
        else:
            with self.b.loop(0, unit.high - unit.low, fold, name="cell") as at:
                visit(at, 1)

    def folded(self, at: Index, visit: Callable[[Index, int], None]) -> None:
        """visit(column, count) for the vectors of the columns of one cell."""
        pieces(self.b, self.lattice.fold, self.lanes, lambda i, count: visit(at + i, count), name="fold")

    @contextmanager
    def chunks(self, part: Index, *, backwards: bool) -> Iterator[Chunk]:
        """The chunks of a part; backwards, they and their pieces meet what caches hold of the pass before."""
        b, size = self.b, self._size
        first = part * self.share
        listed = Chunk(first, b.smaller(first + self.share, self.chunk_count), backwards)
        with self._each(listed, "chunk") as chunk:
            yield Chunk(chunk * size, b.smaller(chunk * size + size, self._pieces), backwards)

    @contextmanager
    def _each(self, listed: Chunk, name: str) -> Iterator[Value]:
        with self.b.loop(listed.first, listed.stop, name=name) as number:
            yield listed.first + (listed.stop - 1) - number if listed.backwards else number

    def elements(
        self,
        unit: Unit,
        chunk: Chunk,
        visit: Callable[[Sequence[Offsets], int, Index, bool], None],
        lead: Callable[[Offsets], Value] | None = None,
        group: int = UNROLL,
    ) -> None:
        """visit(places, count, at, stream) for all elements of a chunk, a few vectors or rows at a time.

        `lead`: elements from offsets to dst's next cache line, where dst is written past the caches.
        """
        if not self.lattice.is_along:
            self._rows(unit, chunk, visit, lead, group)
            return
        b, extent, size = self.b, self.lattice.run.extent, self._piece
        across = -(-extent // size)
        with self._each(chunk, "piece") as piece:
            begin, start = self.offsets(self.lattice.outer_elements, piece // across), piece % across * size
            stop = b.smaller(start + size, extent) if across > 1 else extent

            def plain() -> None:
                self._vectors(begin, start, stop, visit, group)

            def past() -> None:
                assert lead is not None
                streamed(b, lead(self._along(begin, start)), self.line, start, stop, UNROLL, single)

            def single(at: Index, count: int, *, stream: bool = False) -> None:
                visit([self._along(begin, at)], count, 0, stream)

            if lead is None:
                plain()
            else:
                by_length(b, stop - start, self.line, past, plain)

    def _vectors(
        self,
        begin: Offsets,
        start: Index,
        stop: Index,
        visit: Callable[[Sequence[Offsets], int, Index, bool], None],
        group: int,
    ) -> None:
        """The vectors of a piece of the run, and what is left at its end."""
        b, lanes = self.b, self.lanes

        def vectors(first: Index, count: int) -> None:
            visit([self._along(begin, first + i * lanes) for i in range(count)], lanes, 0, False)

        self._grouped((start, start + (stop - start) // lanes * lanes, lanes, group), vectors)
        extent, rest = self.lattice.run.extent, self.lattice.run.extent % lanes
        if rest:
            with b.when(b.compare("eq", b.const(stop, "i64"), extent)):
                visit([self._along(begin, extent - rest)], rest, 0, False)

    def _rows(
        self,
        unit: Unit,
        chunk: Chunk,
        visit: Callable[[Sequence[Offsets], int, Index, bool], None],
        lead: Callable[[Offsets], Value] | None,
        group: int,
    ) -> None:
        """The columns of a few rows at a time, which share all that columns have."""
        width, axes = unit.high - unit.low, self.lattice.outer_elements
        rows = chunk.first, chunk.stop, 1, group

        def plain() -> None:
            self._grouped(rows, lambda row, count: self.vectors(unit, few(row, count)))

        def past() -> None:
            assert lead is not None
            ahead, line = lead(self.nowhere), self.line
            self._grouped(
                rows, lambda row, count: streamed(self.b, ahead, line, 0, width, 1, few(row, count))
            )

        def few(first: Index, count: int) -> Any:
            listed = [self.offsets(axes, first + number) for number in range(count)]

            def write(at: Index, count: int, *, stream: bool = False) -> None:
                visit(listed, count, at, stream)

            return write

        if lead is None:
            plain()
        else:
            by_length(self.b, width, self.line, past, plain)

    def _along(self, begin: Offsets, at: Index) -> Offsets:
        """Offsets of an element of the run."""
        return tuple(at * step + base for base, step in zip(begin, self.lattice.run.steps, strict=True))

    def _grouped(self, steps: tuple[Index, Index, int, int], visit: Callable[[Index, int], None]) -> None:
        """visit(first, count) for steps of start..stop-1, so many at a time, then the rest.

        The rest is together where its number is known: their functions overlap.
        """
        start, stop, step, group = steps
        whole = start + (stop - start) // (step * group) * (step * group)
        with self.b.loop(start, whole, step * group, name="group") as first:
            visit(first, group)
        left = number_of(self.b.const(stop - whole, I64).name)
        if left is not None:
            if left:
                visit(whole, left // step)
            return
        with self.b.loop(whole, stop, step, name="single") as first:
            visit(first, 1)

    @property
    def nowhere(self) -> Offsets:
        """Offsets of zero."""
        return (0,) * len(self.lattice.tensors)

    def column(self, unit: Unit, at: Index, tensor: int) -> Index:
        """The offset in a tensor of a column `at` behind a unit's first; 0 where lanes are elements."""
        lattice = self.lattice
        if lattice.is_along:
            return 0
        if lattice.tensors[tensor] in lattice.uneven:
            return (unit.low + at) // lattice.fold * lattice.cell_steps[tensor]
        return (unit.low + at) * lattice.run.steps[tensor]


def chunking(lattice: Lattice, lanes: int) -> tuple[int, int, int]:
    """Elements of the run in a piece, pieces in a chunk, pieces of a cell; a row of columns is a piece."""
    rows = _count(lattice.outer_elements)
    if not lattice.is_along:
        return 1, ROWS, rows
    piece = min(CHUNK * lanes, lattice.run.extent)
    return piece, max(1, CHUNK * lanes // piece), rows * -(-lattice.run.extent // piece)


def usual_parts(lattice: Lattice, lanes: int) -> int:
    """Parts in which statistics are made: they depend on the kernel alone, so that results do as well."""
    _, size, listed = chunking(lattice, lanes)
    columns = 1 if lattice.is_along else _count(lattice.cells)
    elements = lattice.element_count * columns // lattice.fold * size // listed  # of a chunk
    return max(1, min(PARTS, -(-listed // size) // max(1, PART * (1 + (columns > 1)) // elements)))


def rounded(size: int, step: int) -> int:
    """The least multiple of a step that is no less."""
    return -(-size // step) * step


def _count(axes: Sequence[Axis]) -> int:
    return prod(axis.extent for axis in axes)

"""The loops of kernels with statistics over any axes: blocks of cells, chunks of elements, their vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from fuseplan.backends.cpu.ir import Builder, Index
from fuseplan.backends.cpu.ir_text import I64, number_of
from fuseplan.backends.cpu.loops import ceil_div, offset_of, pieces, places
from fuseplan.backends.lattice import Axis, Lattice

UNROLL = 4  # vectors, or rows, that are visited at a time
CHUNK = 2048  # elements of a cell whose state is merged into that of the chunks before
ROWS = 256  # rows of a chunk where lanes are cells

Offsets = tuple[Index, ...]  # of each of the lattice's tensors


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
        builder: the function that they are written in.
        lattice: the kernel's loops.
        cells: cells of a task, or columns where lanes are cells.
        parts: parts of the elements of a cell.
        count: how many cells there are, where no number says it.

    Attributes:
        pitch: states of one row of the run in the workspace; whole vectors.
        slots: states of all cells in the workspace.
        run_count: runs of the elements of a cell; rows where lanes are cells.
        chunk_count: chunks of all elements of a cell.
    """

    def __init__(
        self, builder: Builder, lattice: Lattice, cells: int, parts: int, count: Index | None = None
    ) -> None:
        self.b, self.lattice, self.lanes = builder, lattice, builder.lanes
        self.cells, self.parts = cells, parts
        self.cell_count: Any = lattice.cell_count if count is None else count
        self.columns = rounded(min(cells, lattice.run.extent), self.lanes)
        self.width = self.lanes if lattice.is_along else self.columns
        self.pitch, self.slots = rounded(lattice.run.extent, self.lanes), lattice.cell_count
        if not lattice.is_along:
            self.slots = _count(lattice.outer_cells) * self.pitch
        # Elements of the run in a piece, and pieces of a chunk; of rows, one and as many.
        piece = min(CHUNK, lattice.run.extent)
        self._chunk = (piece, max(1, CHUNK // piece)) if lattice.is_along else (1, ROWS)
        run = -(-lattice.run.extent // piece) if lattice.is_along else 1
        self.run_count = _count(lattice.outer_elements)
        self._pieces = self.run_count * run
        self.chunk_count = -(-self._pieces // self._chunk[1])

    @property
    def blocks(self) -> Any:
        """Tasks of one part: blocks of cells."""
        if self.lattice.is_along:
            return ceil_div(self.cell_count, self.cells)
        extent = self.lattice.run.extent
        return self.cell_count // extent * ceil_div(extent, self.columns)

    @contextmanager
    def units(self, block: Index) -> Iterator[Unit]:
        """The cells of a block: one after the other, or columns side by side."""
        b, lattice, cells = self.b, self.lattice, self.lattice.outer_cells
        if lattice.is_along:
            first, stop = block * self.cells, self.cell_count
            with b.loop(first, b.smaller(first + self.cells, stop), name="cell") as cell:
                yield Unit(self.offsets(cells, cell), cell)
            return
        across = -(-lattice.run.extent // self.columns)
        low, outer = block % across * self.columns, block // across
        high = b.smaller(low + self.columns, lattice.run.extent)
        yield Unit(self.offsets(cells, outer), outer * self.pitch, low, high)

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

    @contextmanager
    def chunks(self, part: Index) -> Iterator[tuple[Index, Index]]:
        """The chunks of a part: the first piece of each, and the one behind its last."""
        b, size = self.b, self._chunk[1]
        share = -(-self.chunk_count // self.parts)
        first = part * share
        with b.loop(first, b.smaller(first + share, self.chunk_count), name="chunk") as chunk:
            yield chunk * size, b.smaller(chunk * size + size, self._pieces)

    def elements(
        self,
        unit: Unit,
        chunk: tuple[Index, Index],
        visit: Callable[[Sequence[Offsets], int, Index], None],
    ) -> None:
        """visit(places, count, at) for all elements of a chunk, a few vectors or rows at a time."""
        b, axes = self.b, self.lattice.outer_elements
        if not self.lattice.is_along:

            def rows(first: Index, count: int) -> None:
                listed = [self.offsets(axes, first + number) for number in range(count)]
                self.vectors(unit, lambda at, lanes: visit(listed, lanes, at))

            self._grouped(*chunk, 1, rows)
            return
        extent, size = self.lattice.run.extent, self._chunk[0]
        across = -(-extent // size)
        with b.loop(*chunk, name="piece") as piece:
            begin, start = self.offsets(axes, piece // across), piece % across * size
            stop = b.smaller(start + size, extent) if across > 1 else extent

            def vectors(first: Index, count: int) -> None:
                visit([self.along(begin, first + i * self.lanes) for i in range(count)], self.lanes, 0)

            self._grouped(start, start + (stop - start) // self.lanes * self.lanes, self.lanes, vectors)
            rest = extent % self.lanes
            if rest:
                with b.when(b.compare("eq", b.const(stop, "i64"), extent)):
                    visit([self.along(begin, extent - rest)], rest, 0)

    def along(self, begin: Offsets, at: Index) -> Offsets:
        """Offsets of an element of the run."""
        return tuple(at * step + base for base, step in zip(begin, self.lattice.run.steps, strict=True))

    def _grouped(self, start: Index, stop: Index, step: int, visit: Callable[[Index, int], None]) -> None:
        """visit(first, count) for steps of start..stop-1: `UNROLL` at a time, then the rest.

        The rest is together where its number is known: their functions overlap.
        """
        size = step * UNROLL
        whole = start + (stop - start) // size * size
        with self.b.loop(start, whole, size, name="group") as first:
            visit(first, UNROLL)
        left = number_of(self.b.const(stop - whole, I64).name)
        if left is not None:
            if left:
                visit(whole, left // step)
            return
        with self.b.loop(whole, stop, step, name="single") as first:
            visit(first, 1)

    def column(self, unit: Unit, at: Index) -> Offsets:
        """Offsets of a column `at` behind a unit's first; where lanes are elements there is one."""
        if self.lattice.is_along:
            return (0,) * len(self.lattice.tensors)
        return tuple((unit.low + at) * step for step in self.lattice.run.steps)


def rounded(size: int, step: int) -> int:
    """The least multiple of a step that is no less."""
    return -(-size // step) * step


def _count(axes: Sequence[Axis]) -> int:
    return prod(axis.extent for axis in axes)

"""Sums over all cells beside statistics of each: programs go through shares of the tiles, and meet once.

A program keeps its sums in registers where these hold a cell's elements, else in its rows of the workspace.
When all have arrived, each adds the rows of some columns in the order of the programs: the same bits in every
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    number,
    power_of_two,
)
from fuseplan.backends.triton.resources import MOST, REGISTERS
from fuseplan.backends.triton.storage import Storage, named
from fuseplan.backends.triton.templates.meeting import Meeting
from fuseplan.backends.triton.templates.reduction_tiles import ReductionKnobs
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import COUNTER_BYTES, Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of
from fuseplan.scalar import leaves_of

NARROWEST = 32  # columns that a program adds at a time, at least: a line of the cache
# Of a thread's registers, for sums of a cell whose elements are read again: of RMS norm's gradients of 16384
# rows of as many, 457 us on an H200, and 898 where sums go through the second cache.
HELD = 0.51
ADDED = 16  # numbers of each thread meanwhile, at most


def shares(kernel: Kernel, target: Target, knobs: ReductionKnobs) -> int:
    """Programs of a launch: as many as run at a time, or as there are tiles, where that is known."""
    most = target.processors * max(1, knobs.resident)
    if kernel.open_axis is not None:
        return most
    tiles = ceil_div(Lattice(kernel).cell_count, knobs.cells)
    return ceil_div(tiles, ceil_div(tiles, most))


def holds_sums(kernel: Kernel, knobs: ReductionKnobs, warp: int) -> bool:
    """Whether the registers of a program hold its sums of all columns: half of them, or it holds all else."""
    threads = knobs.warps * warp
    columns = ceil_div(kernel.reduced_count, knobs.elements) * knobs.elements * knobs.cells
    each = len(kernel.sums) * columns / threads * dtype_of(kernel.compute_dtype).itemsize / 4
    room = min(MOST, REGISTERS // (threads * max(1, knobs.resident)))
    return knobs.holds(kernel.reduced_count) or each <= HELD * room


def shared_columns(kernel: Kernel, lattice: Lattice) -> list[str]:
    """The operands of which all cells read the same elements in formulas behind the prologue.

    There are none of an axis in parts: each part has elements of its own.
    """
    if len(lattice.starts) > 1:
        return []
    formulas = [stage.expression for stage in kernel.epilogue] + [each.expression for each in kernel.sums]
    formulas += [part.term for each in kernel.statistics for part in each.parts]
    used = frozenset[str]().union(*map(leaves_of, formulas))
    places = {each.key: lattice.tensors.index(each.key) for each in kernel.operands if each.key in used}
    return [key for key, at in places.items() if not any(axis.steps[at] for axis in lattice.cells)]


def _spread(along: Index) -> Index:
    """Offsets of columns, of a single one too as a tile."""
    return along if along.constant is None else Index(f"tl.zeros((1, 1), tl.int32) + {along}", is_vector=True)


class ColumnSums:
    """Writes the sums of one kernel.

    Attributes:
        programs: of the launch.
        workspace_bytes: counters, and a row of the columns for each sum and program; 0 without sums.
    """

    def __init__(
        self, text: Text, knobs: ReductionKnobs, kernel: Kernel, target: Target, tile: tuple[int, ...]
    ) -> None:
        self.text, self.kernel, self.tile = text, kernel, (knobs.cells, *tile)
        self.compute = named(kernel.compute_dtype, "tl")
        self.programs = shares(kernel, target, knobs) if kernel.sums else 1
        self.threads = knobs.warps * target.warp
        self.storage = Storage(text, "tl", kernel.compute_dtype)
        self.meeting = Meeting(text, self.programs, 1, 0, 0, self.compute, repeats=False)
        self.columns = max((each.nbytes // dtype_of(each.dtype).itemsize for each in kernel.sums), default=0)
        each = dtype_of(kernel.compute_dtype).itemsize * self.columns
        self.workspace_bytes = COUNTER_BYTES + self.programs * len(kernel.sums) * each if each else 0
        self.is_held = bool(kernel.sums) and holds_sums(kernel, knobs, target.warp)
        self.rooms, self.totals = dict[str, Index](), dict[str, list[str]]()

    def begin(self, places: Iterable[tuple[Mapping[str, Index], Mask]]) -> Index:
        """Writes where the program leaves its sums, and zeros for those in registers, at the places given.

        Which program it is.
        """
        text, size = self.text, max(1, len(self.kernel.sums))
        self.program, _ = self.meeting.begin(as_index(1))
        text.line(f"partial = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({self.compute}))")
        self.places = list(places)
        for place, each in enumerate(self.kernel.sums):
            row = (self.program.wide() * size + place) * self.columns
            self.rooms[each.key] = text.index(text.name("row"), row)
            zeros = f"tl.zeros({self.tile}, {self.compute})"
            self.totals[each.key] = [text.let(each.key, zeros) for _ in self.places]
        return self.program

    def add(self, key: str, term: str, has_cell: Mask, along: Index, exists: Mask, block: Index) -> None:
        """Adds the terms of a tile."""
        text = self.text
        seen = f"tl.where({has_cell}, {term}, 0.0)" if has_cell else term
        if self.places:
            text.line(f"{self.totals[key][block.constant or 0]} += {seen}")
            return
        one = text.let("term", f"tl.sum({seen}, 0, keep_dims=True)")
        where = f"partial + {self.rooms[key] + _spread(along)}"
        before = text.let("before", f"tl.load({where}{exists.guard()}, cache_modifier='.cg')")
        made = f"{one} + tl.where(group == {self.program}, 0.0, {before})"
        text.line(f"tl.store({where}, {made}{exists.guard(other='')}, cache_modifier='.cg')")

    def end(self) -> None:
        """The sums of all programs, a few columns at a time."""
        text, meeting = self.text, self.meeting
        text.line("# sums of all programs")
        for key, totals in self.totals.items():
            for total, (along, exists) in zip(totals, self.places, strict=True):
                one = text.let("own", f"tl.sum({total}, 0, keep_dims=True)")
                where = f"partial + {self.rooms[key] + _spread(along[key])}"
                text.line(f"tl.store({where}, {one}{exists.guard(other='')}, cache_modifier='.cg')")
        if meeting.is_needed:
            meeting.meet()
        width = max(NARROWEST, power_of_two(ceil_div(self.columns * len(self.kernel.sums), self.programs)))
        width = min(width, power_of_two(self.columns), self.threads * ADDED)
        slices = ceil_div(self.columns, width)
        with text.block(
            f"for slice in range({self.program}, {slices * len(self.kernel.sums)}, {self.programs})"
        ):
            for place in range(len(self.kernel.sums)):
                is_one = len(self.kernel.sums) == 1
                with nullcontext() if is_one else text.block(f"if slice // {slices} == {place}"):
                    self._add_rows(place, width, slices)
        meeting.end()

    def _add_rows(self, place: int, width: int, slices: int) -> None:
        """One sum's columns of a slice, of all programs."""
        text, each, count = self.text, self.kernel.sums[place], len(self.kernel.sums)
        rows = max(1, min(power_of_two(self.programs), self.threads * ADDED // width))
        column = text.index(
            text.name("column"), number("slice", slices * count) % slices * width + arange(width)
        )
        has_column = text.mask(text.name("has_column"), column < self.columns)
        total = text.let("all", f"tl.zeros(({rows}, {width}), {self.compute})")
        with text.block(f"for start in range(0, {self.programs}, {rows})"):
            row = text.index(text.name("member"), number("start", self.programs) + arange(rows))
            has_row = text.mask(text.name("has_member"), row < self.programs)
            at = (row.wide() * count + place).at(DOWN) * self.columns + column.at(ACROSS)
            guard = (has_row.at(DOWN) & has_column.at(ACROSS)).guard()
            text.line(f"{total} += tl.load(partial + {at}{guard}, cache_modifier='.cg')")
        made = self.storage.narrow(each.dtype, text.let("made", f"tl.sum({total}, 0)"))
        pointer = argument(Slot("result", each.key))
        text.line(f"tl.store({pointer} + {column}, {made}{has_column.guard(other='')})")

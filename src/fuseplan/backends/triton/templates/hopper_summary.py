"""Writes what a group of warps for Hopper does with a sum whose rows have statistics: none of it is stored.

Each tile leaves its rows' states. When all programs have theirs there, they merge them in the order of the
features: the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import ACROSS, DOWN, Index, number, sliced
from fuseplan.backends.triton.templates.hopper_copying import arrive, wait_for_groups
from fuseplan.backends.triton.templates.hopper_finishing import Finishing
from fuseplan.backends.triton.templates.hopper_schedule import Schedule
from fuseplan.backends.triton.templates.hopper_spread import Spread
from fuseplan.backends.triton.templates.summary_rows import RowStatistics
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import COUNTER_BYTES
from fuseplan.scalar import leaves_of

COUNTER = f"workspace + {COUNTER_BYTES // 4 - 2}"  # beside that of copies of src


class Summarizing(Finishing, RowStatistics):
    """The lines after the sum of a tile whose rows have statistics."""

    namespace, over_rows, over_features = "gl", DOWN, ACROSS

    def __init__(self, text: Text, schedule: Schedule, spread: Spread) -> None:
        super().__init__(text, schedule, spread)
        self.summarize(self.kernel)
        self.slots = (*self.between.slots, *self.row_slots, *self.result_slots)
        self.tile_rows, self.across = prod(schedule.own), schedule.across

    def arange(self, size: int) -> Index:
        return sliced(size, 1, "layout")

    def along(self, size: int) -> Index:
        return sliced(size, 0, "layout")

    def begin(self) -> None:
        self.begin_states(f"workspace + {(COUNTER_BYTES + self.schedule.padded_bytes) // 4}")

    def prepare(self) -> None:
        """The tile's rows, beside the sum where registers hold them."""
        if not self.schedule.is_crowded:
            self._begin_rows()

    def _begin_rows(self) -> None:
        """The tile's rows, and what their statistics read."""
        first = self.schedule.first[0]
        self._lie(first)
        self.row_tile = self.text.index("row_tile", first // self.tile_rows)
        self._known = self.leaves()
        keys = {each.key for each in self.kernel.operands if each.role == "epilogue"}
        for key in sorted(keys & frozenset().union(*(leaves_of(part.term) for part in self.state))):
            self._known[key]

    def _lie(self, first: Index) -> None:
        self.row = self.text.index("position", first + self.arange(self.tile_rows))
        self.has_row = self.text.mask("has_row", self.row < self.schedule.extents[0])

    def _finish(self, halves: Sequence[str]) -> None:
        if self.schedule.is_crowded:
            self._begin_rows()
        pieces = []
        for part, x in zip(self.schedule.parts, halves, strict=True):
            column = self._column(part)
            exists = str(self.text.mask(self.text.name("exists"), self._has_channel(column)))
            channel = str(column.at(self.over_features))
            pieces.append((self.between.apply(x, Place("", channel, "", "", exists)), column, exists))
        self.feature_tile = Index("feature", 0, (self.across - 1) * self.schedule.made) // self.schedule.made
        self.leave(self.reduced(pieces, self._known))

    def end(self) -> None:
        """All groups of all programs meet, and then merge the states of some tiles of rows each."""
        text, groups = self.text, self.knobs.groups
        text.line("gl.barrier()", arrive(COUNTER, "release"))
        wait_for_groups(text, COUNTER, groups, groups)
        text.line("gl.barrier()")
        tiles, programs = self.schedule.row_tiles, Index("gl.num_programs(0)")
        first = Index("gl.program_id(0)") + number("group", groups) * programs
        with text.block(f"for row_tile in range({first}, {tiles}, {programs * groups})"):
            self.row_tile = number("row_tile", tiles)
            self._lie(self.row_tile * self.tile_rows)
            self.merge(self.schedule.part_width)

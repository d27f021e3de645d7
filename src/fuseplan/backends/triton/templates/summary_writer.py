"""Writes a product whose tiles of rows have statistics, in the place of stores to dst: for any GPU."""

from __future__ import annotations

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import WIDE, Index, arange
from fuseplan.backends.triton.shell import last_to_arrive
from fuseplan.backends.triton.templates.product_sum import BlockedSum
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles, sum_dtype
from fuseplan.backends.triton.templates.summary_rows import STATES, RowStatistics, state_bytes
from fuseplan.kernels.emit import COUNTER_BYTES, Slot
from fuseplan.kernels.kernel import Kernel


class SummaryWriter(BlockedSum, RowStatistics):
    """Writes one kernel."""

    entry = "summary"

    def __init__(self, knobs: Knobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title)
        self.summarize(kernel)
        self.tile_rows, self.across = knobs.rows, self.tiles.across
        self.workspace_bytes = COUNTER_BYTES + states_of(kernel, knobs)
        self.is_wide = self.is_wide or self.workspace_bytes >= WIDE
        self.width = "tl.int64" if self.is_wide else "tl.int32"
        stages = *self.prologue.slots, *self.between.slots
        self.tensors = (*self._factors(), *stages, *self.row_slots, Slot("dst"), *self.result_slots)

    def along(self, size: int) -> Index:
        return arange(size)

    def _finish(self) -> None:
        """The statistics of the tile's rows; and of whole rows, in the program that comes last to them."""
        x, exists = self._finished_sum(), str(self.has_feature.at(self.over_features))
        made = self.reduced([(x, self.feature, exists)], self.leaves())
        self.begin_states(f"workspace + {COUNTER_BYTES // 4}")
        self.leave(made)
        with last_to_arrive(self.text, Index("workspace") + self.row_tile, self.across):
            self.merge(min(STATES, 1 << (self.across - 1).bit_length()))

    def _finished_sum(self) -> str:
        """The tile of the product behind the stages between."""
        text, summed = self.text, "total"
        if sum_dtype(self.knobs, self.kernel) != self.kernel.compute_dtype:
            text.line(f"total = total.to({self.compute})")
        if self.is_turned:
            text.line("turned = total.trans(1, 0)")
            summed = "turned"
        axes = self.over_features
        lying = Place("", str(self.feature.at(axes)), "", "", str(self.has_feature.at(axes)))
        return self.between.apply(summed, lying)


def states_of(kernel: Kernel, knobs: Knobs) -> int:
    """Bytes of the states of all tiles."""
    tiles = Tiles(kernel, knobs)
    return state_bytes(kernel, tiles.count // tiles.across * knobs.rows, tiles.across)

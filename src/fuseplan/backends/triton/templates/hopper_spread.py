"""Writes how programs of the kernel for Hopper share the sums of the last tiles, where these leave some idle.

All programs have equal runs of the blocks of these tiles, in their order. A run may end inside of a tile: the
program leaves its part of the sum in the workspace, and does so before anything else. A program with the last
block of a tile adds the parts of the programs before it, in their order, and finishes the tile. It waits for
programs of lower numbers alone, which leave their parts before they wait: even one at a time would end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from fuseplan.backends.triton.index import ACROSS, DOWN, WIDE, Index
from fuseplan.backends.triton.templates.hopper_schedule import Schedule
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import COUNTER_BYTES

FEWEST_BLOCKS = 16  # of a program's run: with fewer, parts take longer than they save


class Spread:
    """The tiles that programs share: the tiles of a turn that is not full, and one full turn if there is one.

    Attributes:
        can_be: whether programs would be idle without, and have blocks enough with it.
        workspace_bytes: counters of tiles and groups, and one part of a sum for each program.
    """

    def __init__(self, schedule: Schedule, grid: int) -> None:
        self.schedule, self.grid, knobs = schedule, grid, schedule.knobs
        self.tiles = schedule.tiles if schedule.tiles < grid else grid + schedule.tiles % grid
        self.work = self.tiles * schedule.blocks
        fits = schedule.tiles % grid and self.tiles * knobs.groups <= COUNTER_BYTES // 4
        fits = fits and schedule.tiles * schedule.blocks * grid < WIDE
        is_known = schedule.shares_tile and schedule.geometry.taps == 1 and not schedule.is_open
        # a copy of src has the workspace, crowded sums leave no registers for where parts lie
        is_known = is_known and not schedule.geometry.padded and not schedule.is_crowded
        is_known = is_known and not schedule.geometry.is_summed  # by 3 to 12 % slower
        self.can_be = bool(fits and is_known and self.work >= FEWEST_BLOCKS * grid)
        parts = grid * prod(knobs.box) * knobs.columns
        self.workspace_bytes = COUNTER_BYTES + 4 * parts if knobs.spread else 0

    @contextmanager
    def turns(self, text: Text, start: str, step: int) -> Iterator[None]:
        """Lines for each tile of a program, from `start` on or of its run, with `begin` and `end` there."""
        schedule, blocks, grid = self.schedule, self.schedule.blocks, self.grid
        if not schedule.knobs.spread:
            with text.block(f"for tile in range({start}, {schedule.launched * schedule.across}, {step})"):
                yield
            return
        text.line(
            "program = gl.program_id(0)",
            f"low = program * {self.work} // {grid}",
            f"high = (program + 1) * {self.work} // {grid}",
            f"top = (high - 1) // {blocks}",
            f"pieces = top - low // {blocks} + 1",
        )
        count, tile, end = "pieces", "top - item", f"gl.minimum(high - tile * {blocks}, {blocks})"
        if schedule.tiles > self.tiles:  # whole tiles follow
            count = f"pieces + {(schedule.tiles - self.tiles) // grid}"
            tile = f"gl.where(item < pieces, {tile}, {self.tiles} + program + (item - pieces) * {grid})"
            end = f"gl.where(tile < {self.tiles}, {end}, {blocks})"
        with text.block(f"for item in range({count})"):
            text.line(f"tile = {tile}", f"begin = gl.maximum(low - tile * {blocks}, 0)", f"end = {end}")
            yield

    @contextmanager
    def ended(self, text: Text, halves: list[str], row: str, column: str) -> Iterator[list[str]]:
        """Lines for a tile that ends here, with its whole sum; `halves` are the program's part of the sum."""
        if not self.schedule.knobs.spread:
            yield halves
            return
        groups, width, blocks = self.schedule.knobs.groups, self.schedule.part_width, self.schedule.blocks
        each = self.schedule.sum_shape[0] * width
        text.line(
            f"counter = workspace + tile * {groups} + group",
            f"row = {row}",
            f"column = {column}",
            f"row = row // 8 * {8 * width} + row % 8 * 8",  # neighbouring threads write neighbours
            f"within = row{DOWN} + (column // 8 * 64 + column % 8){ACROSS}",
            f"sums = (workspace + {COUNTER_BYTES // 4}).to(gl.pointer_type(gl.float32))",
            f"sums = sums + group * {len(halves) * each}",
        )
        step = groups * len(halves) * each
        with text.block(f"if end < {blocks}"):
            for place, half in enumerate(halves):
                at = f"sums + ({Index('program') * step + place * each}) + within"
                text.line(f"gl.store({at}, {half}, cache_modifier='.cg')")
            text.line("gl.barrier()", "gl.atomic_add(counter, 1, sem='release', scope='gpu')")
        with text.block("else"):
            text.line(f"owner = ((tile * {blocks} + 1) * {self.grid} - 1) // {self.work}")
            with text.block("if begin > 0"):
                arrived = "gl.atomic_add(counter, 0, sem='acquire', scope='gpu')"
                with text.block(f"while {arrived} < program - owner"):
                    text.line("pass")
                text.line("gl.barrier()", "gl.atomic_xchg(counter, 0, sem='relaxed', scope='gpu')")
            wholes = [text.let("whole", half) for half in halves]
            with text.block("for other in range(owner, program)"):
                for place, whole in enumerate(wholes):
                    at = f"sums + ({Index('other') * step + place * each}) + within"
                    text.line(f"{whole} += gl.load({at}, cache_modifier='.cg')")
            yield wholes

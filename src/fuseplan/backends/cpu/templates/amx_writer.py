"""The code of products by tiles: tasks, a copy of a task's rows, their products and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.features import Features
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I64, vector
from fuseplan.backends.cpu.loops import LINE_BYTES, ceil_div, even, pieces, places, within
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.templates.amx_rows import BLOCK, Rows, RowTiles, steps_of
from fuseplan.backends.cpu.tile_registers import LANES, ROW_BYTES, ROWS, Tiles, factors_of
from fuseplan.backends.cpu.tiling import is_per_image, sheet
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target

PANEL = 2 * LANES  # features of two tiles
SUMS_BYTES = 2 * ROW_BYTES  # of a row of a panel


@dataclass(frozen=True)
class AmxKnobs(model.SumOfProducts):
    """The fields of `Amx`, which says what they mean."""

    rows: int
    panels: int
    depth: int
    extent: int


def panels_of(conv: Contraction) -> int:
    """Panels of a group's features."""
    return -(-conv.features_per_group // PANEL)


@dataclass(frozen=True)
class Panel:
    """A panel of the weight for a task's rows: where it begins, and the sums of the first block of rows."""

    rows: Rows
    number: Index
    features: int
    weight: Value
    sums: Value


class AmxWriter:
    """Writes one kernel."""

    def __init__(self, knobs: AmxKnobs, planned: Kernel, target: Target) -> None:
        known = as_rows(planned)
        factors = factors_of(known)
        assert factors is not None  # by the template's limits
        self.frame = Frame(knobs, known, target, workspace=True, planned=planned)
        self.knobs, self.kernel, self.factors = knobs, self.frame.kernel, factors
        self.conv = conv = self.kernel.contraction
        self.b: Builder = self.frame.body
        self.steps, self.panels = steps_of(self.kernel), panels_of(conv)
        self.count = sheet(self.kernel)
        self.per_image = is_per_image(self.kernel)
        self.tiles = Tiles(self.b, factors, min(ROWS, knobs.rows))
        self.results = Features(self.frame)
        self.rows = RowTiles(self.frame, factors, knobs.rows, knobs.extent)
        self.step_bytes, self.held = self.rows.step_bytes, self.rows.held
        blocks = -(-knobs.rows // BLOCK)
        # Beside the products of one or two blocks, lines come too late, and hold up tiles.
        self.lines = self.step_bytes // LINE_BYTES // blocks if blocks > 2 else 0
        self.is_whole = knobs.depth >= self.steps
        # Sums stay in memory while other blocks of rows come; and other panels, if not all channels do.
        # Those of the last block of rows stay until results are made of them beside the products of the next.
        kept = (knobs.panels if knobs.extent < self.steps else 1) * blocks
        self.panel_bytes = 0 if kept == blocks else blocks * BLOCK * SUMS_BYTES
        # A thread's own part of the workspace: a task's rows, behind them sums, and what is gathered.
        gathered = self.rows.nbytes + BLOCK * SUMS_BYTES * (2 if self.is_whole else kept)
        self.own_bytes = gathered + self.rows.window_bytes
        self.room = self.b.at(self.frame.pointer("workspace"), self.frame.thread * self.own_bytes, "i8")
        self.sums = self.b.at(self.room, self.rows.nbytes, "i8")
        self.rows.place(self.room, self.b.at(self.room, gathered, "i8"))

    def source(self) -> Source:
        """A task is a block of rows x a block of panels."""
        knobs, conv, b = self.knobs, self.conv, self.b
        images = conv.batch if self.per_image else 1
        blocks = ceil_div(self.count, knobs.rows)
        parts = images * blocks * conv.groups
        is_sliced = knobs.extent < self.steps
        share = knobs.panels if is_sliced else even(self.frame, self.panels, parts, knobs.panels)
        panel_blocks = ceil_div(self.panels, share)
        self.tiles.begin()
        held = b.variable(I64, -1)
        with self.frame.tasks(parts * panel_blocks) as task:
            image, block, group, panel_block = places(task, (images, blocks, conv.groups, panel_blocks))
            first, stop = within(b, block, knobs.rows, self.count)
            panels = within(b, panel_block, share, self.panels)
            rows = Rows(image if self.per_image else None, group, first, stop - first)
            if not is_sliced:  # a thread's tasks follow one another, most of them of the same rows
                same = task // panel_blocks
                with b.when(b.compare("ne", held.get(), same)):
                    self.rows.copy(rows, 0, self.steps)
                held.set(same)
            self._panels(rows, panels)
        self.tiles.end()
        return self.frame.source(per_thread=self.own_bytes)

    # ---- products

    def _panels(self, rows: Rows, panels: tuple[Index, Index]) -> None:
        """A part of a panel of the weight stays in the first cache for all rows of the task."""
        b, conv = self.b, self.conv
        matrix = rows.group
        if rows.image is not None and conv.weight_per_batch:
            matrix = rows.image * conv.groups + rows.group
        weight = self.frame.pointer("operand", self.kernel.weight.key)

        def panel_of(begin: Index, extent: int, number: Index, features: int) -> None:
            own = b.at(weight, (matrix * self.panels + number) * (self.steps * self.step_bytes), "i8")
            kept = b.at(self.sums, (number - panels[0]) * self.panel_bytes, "i8")
            panel = Panel(rows, number, features, own, kept)
            # A slice of a panel in one part is followed by that of the next panel.
            follows = self.steps if self.knobs.depth >= extent else self.knobs.depth

            def part(start: Index, steps: int) -> None:
                src = b.at(self.room, (start if conv.taps == 1 else begin + start) * self.step_bytes, "i8")
                self._blocks(panel, src, begin + start, steps, follows)

            pieces(b, extent, self.knobs.depth, part, name="step")

        def slice_of(begin: Index, extent: int) -> None:
            if self.knobs.extent < self.steps and conv.taps == 1:
                self.rows.copy(rows, begin, extent)
            run = partial(panel_of, begin, extent)
            pieces(b, conv.features_per_group, PANEL, run, name="panel", within=panels, numbered=True)

        if self.knobs.extent < self.steps and conv.taps > 1:
            self.rows.copy(rows, 0, self.steps)
        pieces(b, self.steps, self.knobs.extent, slice_of, name="slice")

    def _blocks(self, panel: Panel, src: Value, step: Index, steps: int, follows: int) -> None:
        """Some steps of all rows; beside a block's products, the results of the block before are made."""
        b, rows = self.b, panel.rows
        blocks, each = ceil_div(rows.count, BLOCK), ceil_div(BLOCK, steps)
        is_last = b.compare("eq", b.const(step + steps, I64), self.steps)
        with b.loop(0, blocks, name="block") as block:
            pending = b.select(b.both([is_last, b.compare("sgt", block, 0)]), BLOCK, b.const(0, I64))

            def beside(at: Index) -> None:
                if pending.name != "0":
                    self._finish(panel, block - 1, (at * each, b.smaller((at + 1) * each, pending)))

            own = b.at(src, block * (self.held * self.step_bytes), "i8")
            self._block(panel, block, own, step, steps, follows, beside)
        with b.when(is_last):
            self._finish(panel, blocks - 1, (0, rows.count - (blocks - 1) * BLOCK))

    def _sums(self, panel: Panel, block: Index) -> Value:
        return self.b.at(panel.sums, (block % 2 if self.is_whole else block) * (BLOCK * SUMS_BYTES), "i8")

    def _block(
        self,
        panel: Panel,
        block: Index,
        src: Value,
        step: Index,
        steps: int,
        follows: int,
        beside: Callable[[Index], None],
    ) -> None:
        """Adds some steps' products to the sums of a block of rows; of 16 rows or fewer, one tile of them."""
        b, tiles = self.b, self.tiles
        own, sums = b.at(panel.weight, step * self.step_bytes, "i8"), self._sums(panel, block)
        left = panel.rows.count - block * BLOCK
        is_first = b.compare("eq", b.const(step, I64), 0)
        # The blocks of rows share out the steps that follow.
        ahead = b.at(own, follows * self.step_bytes + block * (steps * self.lines * LINE_BYTES), "i8")
        for rows, how in ((2, "sgt"), (1, "sle")):
            with b.when(b.compare(how, b.const(left, I64), ROWS)):
                with b.when(is_first):
                    tiles.zero(rows)
                with b.when(b.compare("ne", b.const(step, I64), 0)):
                    tiles.load(rows, sums, SUMS_BYTES)
                tiles.add(rows, src, own, steps, ahead, self.lines, beside)
                tiles.store(rows, sums, SUMS_BYTES)

    # ---- results

    def _finish(self, panel: Panel, block: Index, within: tuple[Index, Index]) -> None:
        """The operators behind the product of some rows of a block, row by row."""
        b, each, features = self.b, self.results.each, panel.features
        rows, sums = panel.rows, self._sums(panel, block)
        feature = b.const(self.results.first(rows.group, panel.number * PANEL), I64)
        image: Index = 0 if rows.image is None else rows.image * prod(self.conv.dst_spatial)
        element, lanes = self.factors.sums, self.frame.lanes
        vectors = -(-features // (each * lanes)) * each
        with b.loop(*within, name="row") as row:
            line = b.at(sums, row * SUMS_BYTES, "i8")
            values = [b.load(b.at(line, j * lanes, element), vector(lanes, element)) for j in range(vectors)]
            if element != b.element:
                values = [b.convert("sitofp", value, b.element) for value in values]
            begin = (image + rows.first + block * BLOCK + row) * self.kernel.pitch
            self.results.store(values, begin, feature, features // each, {})

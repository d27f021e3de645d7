"""Writes the kernel of a direct convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import mul

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.elementwise import Elementwise, Kept, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.loops import nested, pieces, places
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.backends.cpu.tiling import tiling
from fuseplan.backends.cpu.transpose import transposed
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target

_ALIGN = 16  # elements: a thread's part of the workspace begins on a cache line


@dataclass(frozen=True)
class DirectKnobs(model.SumOfProducts):
    """The choice of `Direct`.

    Attributes:
        rows: output positions in a tile.
        vectors: vectors of features in a tile.
        block: tiles of positions in a task.
        block_panels: tile widths of features in a task.
        lines: output lines (of the first spatial axis) for which a task copies src into its thread's own part
            of the workspace; 0 where src is copied whole, or not copied.
    """

    rows: int
    vectors: int
    block: int
    block_panels: int
    lines: int = 0


def write(knobs: DirectKnobs, kernel: Kernel, target: Target) -> Source:
    """The kernel's source: src copied where it must be, and tiles of products."""
    writer = _Writer(knobs, kernel, target)
    return writer.by_lines() if knobs.lines else writer.by_blocks()


def sheet(kernel: Kernel) -> int:
    """Positions that one sequence of tiles runs over: the batch, or an image."""
    image = prod(kernel.dst.shape[2:])
    return image if is_per_image(kernel) else kernel.dst.batch * image


def is_per_image(kernel: Kernel) -> bool:
    """Whether tiles stay inside an image: its positions are innermost in dst, or its weight is its own."""
    return kernel.contraction.weight_per_batch or not model.features_innermost(kernel)


def room(plan: staging.Staged, lines: int) -> int:
    """Elements of padded src under `lines` output lines of the first spatial axis."""
    needed = plan.lines_under(lines) * plan.line + 2 * UNROLL
    return -(-needed // _ALIGN) * _ALIGN


class _Writer:
    def __init__(self, knobs: DirectKnobs, planned: Kernel, target: Target) -> None:
        kernel = as_rows(planned)
        self.knobs, self.kernel, self.conv = knobs, kernel, kernel.contraction
        self.staged = staging.staged(kernel)
        self.frame = Frame(knobs, kernel, target, workspace=self.staged.copies, planned=planned)
        self.b: Builder = self.frame.body
        self.lanes = self.frame.lanes
        self.panel = knobs.vectors * self.lanes
        self.panels = -(-self.conv.features_per_group // self.panel)
        self.innermost = model.features_innermost(kernel)
        # Where a task's part of src is an image's, its tiles are too.
        self.per_image = is_per_image(kernel) or knobs.lines > 0
        self.image = prod(self.conv.dst_spatial)
        positions = knobs.lines * prod(self.conv.dst_spatial[1:]) if knobs.lines else sheet(kernel)
        self.tiling = tiling(self.staged, knobs.rows, positions)
        self.tail = Elementwise(self.frame, "epilogue")
        self.kept = None if self.innermost else Kept(self.tail, self.panel)
        self.weight = self.frame.pointer("operand", kernel.weight.key)

    # ---- tasks

    def by_blocks(self) -> Source:
        """A task is a block of tiles x a block of features; src is copied before them where it must be."""
        workspace = self.frame.pointer("workspace") if self.staged.copies else self.frame.pointer("src")
        self.src = staging.emit(self.frame, self.staged, workspace)
        knobs, conv, b = self.knobs, self.conv, self.b
        images = conv.batch if self.per_image else 1
        blocks, panel_blocks = -(-self.tiling.count // knobs.block), -(-self.panels // knobs.block_panels)
        with self.frame.tasks(images * blocks * conv.groups * panel_blocks) as task:
            image, block, group, panel_block = places(task, (images, blocks, conv.groups, panel_blocks))
            first, begin = block * knobs.block, panel_block * knobs.block_panels
            tiles = (first, b.smaller(first + knobs.block, self.tiling.count))
            panels = (begin, b.smaller(begin + knobs.block_panels, self.panels))
            self._panels(image if self.per_image else None, 0, group, tiles, panels)
        return self.frame.source(workspace=self.staged.elements * model.itemsize(self.kernel))

    def by_lines(self) -> Source:
        """A task copies the lines of src under its output lines to its thread's part of the workspace."""
        b, conv, lines = self.b, self.conv, self.knobs.lines
        size = room(self.staged, lines)
        stager = staging.Stager(self.frame, self.staged)
        scratch = b.at(self.frame.pointer("workspace"), self.frame.thread * size)
        height, inner = conv.dst_spatial[0], prod(conv.dst_spatial[1:])
        blocks = -(-height // lines)
        above = self.staged.lines_under(1) - self.staged.lines_under(0)
        with self.frame.tasks(conv.batch * blocks) as task:
            image, block = task // blocks, task % blocks
            # The last block starts early where it would be short, and computes some lines twice.
            line = b.smaller(block * lines, height - lines) if height % lines else block * lines
            first = image * (self.staged.rows // conv.batch) + line * above
            stager.copy_lines(first, self.staged.lines_under(lines), scratch)
            # The scratch is addressed as if the copy of all lines lay there.
            self.src = b.at(scratch, 0 - first * self.staged.line)
            group = b.const(0, "i64")
            self._panels(image, line * inner, group, (0, self.tiling.count), (0, self.panels))
        return self.frame.source(workspace_per_thread=size * model.itemsize(self.kernel))

    def _panels(
        self,
        image: Index | None,
        base: Index,
        group: Index,
        tiles: tuple[Index, Index],
        panels: tuple[Index, Index],
    ) -> None:
        """Each panel of weights passes over all tiles of the task while a cache holds it.

        `base` is the position at which the tiles' sheet begins in its image.
        """
        b, features = self.b, self.conv.features_per_group

        def run(panel: Index, count: int) -> None:
            if self.kept:
                self.kept.fill(group * features + panel * self.panel, count)
            with b.loop(*tiles, name="tile") as tile:
                self._tile(image, base + self.tiling.start(b, tile), group, panel, count)

        pieces(b, features, self.panel, run, name="panel", within=panels, numbered=True)

    # ---- one tile

    def _tile(self, image: Index | None, position: Index, group: Index, panel: Index, features: int) -> None:
        """`rows` positions from `position` on, `features` features of one panel."""
        b = self.b
        sums = Sums(b, self.knobs.rows, -(-features // self.lanes))
        matrix: Index = group
        if image is not None and self.conv.weight_per_batch:
            matrix = image * self.conv.groups + group
        where = (matrix * self.panels + panel) * (self.conv.depth * self.panel)
        self._products(sums, self._starts(image, position, group), b.at(self.weight, where))
        feature = group * self.conv.features_per_group + panel * self.panel
        if self.kept is None:
            self._store_features(sums.values(), image, position, feature, features)
        else:
            self._store_positions(sums.values(), self.kept, image, position, feature, features)

    def _starts(self, image: Index | None, position: Index, group: Index) -> list[Value]:
        """Where in src the first tap of each of the tile's positions lies."""
        b, channel = self.b, group * self.conv.channels_per_group
        distances = self.tiling.distances()
        if distances is None:
            offsets = [self.tiling.offset(b, position + r, image) for r in range(self.knobs.rows)]
            return [b.at(self.src, offset + channel) for offset in offsets]
        first = b.at(self.src, self.tiling.offset(b, position, image) + channel)
        return [b.at(first, distance) for distance in distances]

    def _products(self, sums: Sums, starts: Sequence[Value], weight: Value) -> None:
        """Adds src times weight over all taps and channels."""
        conv, b = self.conv, self.b
        # Without groups or gaps, the channels of neighbouring taps along a line follow one another.
        merged = conv.groups == 1 and conv.dilation[-1] == 1
        kernel = conv.kernel[:-1] if merged else conv.kernel
        run = conv.channels_per_group * (conv.kernel[-1] if merged else 1)
        tap: Index = 0
        offset: Index = 0
        with nested(b, kernel, "tap") as at:
            steps = map(mul, conv.dilation, self.staged.strides)
            for index, taps, step in zip(at, kernel, steps, strict=False):
                tap, offset = index + tap * taps, index * step + offset
            rows = [b.at(start, offset) for start in starts]
            panel = b.at(weight, tap * (run * self.panel))
            add_products(sums, run, partial(self._operands, rows, panel, sums.vectors))

    def _operands(self, rows: Sequence[Value], weight: Value, vectors: int, k: Index) -> Operands:
        """Weights of neighbouring features, and an element of src of each position."""
        b = self.b
        xs, panel = [b.at(row, k) for row in rows], b.at(weight, k * self.panel)

        def weights(step: int) -> list[Value]:
            return [b.load(b.at(panel, step * self.panel + j * self.lanes)) for j in range(vectors)]

        return weights, lambda step, row: b.broadcast(xs[row], step)

    # ---- results

    def _store_features(
        self, values: list[list[Value]], image: Index | None, position: Index, feature: Index, features: int
    ) -> None:
        known: dict[object, Value] = {}
        first = position if image is None else image * self.image + position
        for r, line in enumerate(values):
            for j, value in enumerate(line):
                count = min(self.lanes, features - j * self.lanes)
                channel = feature + j * self.lanes
                place = Place((first + r) * self.conv.features + channel, channel, True, count)
                finish(self.frame, self.tail, value, place, known)

    def _store_positions(
        self,
        values: list[list[Value]],
        kept: Kept,
        image: Index | None,
        position: Index,
        feature: Index,
        features: int,
    ) -> None:
        """Features lie apart in dst and positions side by side: the tile is transposed in registers first."""
        b = self.b
        nothing = Value(b, b.vector, "poison")
        known: dict[object, Value] = {}
        plane: Index = 0 if image is None else image * self.conv.features
        for j in range(len(values[0])):
            square = [line[j] for line in values] + [nothing] * (self.lanes - len(values))
            count = min(self.lanes, features - j * self.lanes)
            for i, column in enumerate(transposed(b, square)[:count]):
                channel = feature + (j * self.lanes + i)
                place = Place((plane + channel) * self.image + position, channel, False, self.knobs.rows)
                kept.spread(j * self.lanes + i, place, known)
                finish(self.frame, self.tail, column, place, known)

"""Writes the kernel of a direct convolution."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value, Variable
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.tiling import tiling
from fuseplan.backends.cpu.transpose import transposed
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target

UNROLL = 4
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
        # Where positions are innermost, values of a feature are spread from here: 16 square roots at a time.
        kept = [] if self.innermost else self.tail.invariants(channel=True)
        self.rooms = {node: self.b.buffer(self.panel) for node in kept if node.fn != "leaf"}
        self.dst = self.frame.pointer("dst")
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
            rest, panel_block = task // panel_blocks, task % panel_blocks
            rest, group = rest // conv.groups, rest % conv.groups
            image, block = rest // blocks, rest % blocks
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
        image: Value | None,
        base: Index,
        group: Value,
        tiles: tuple[Index, Index],
        panels: tuple[Index, Index],
    ) -> None:
        """Each panel of weights passes over all tiles of the task while a cache holds it.

        `base` is the position at which the tiles' sheet begins in its image.
        """
        b, whole = self.b, self.conv.features_per_group // self.panel
        left = self.conv.features_per_group - whole * self.panel

        def run(panel: Index, features: int) -> None:
            self._hoist(group * self.conv.features_per_group + panel * self.panel, features)
            with b.loop(*tiles, name="tile") as tile:
                self._tile(image, base + self.tiling.start(b, tile), group, panel, features)

        if whole:
            with b.loop(panels[0], b.smaller(panels[1], whole), name="panel") as panel:
                run(panel, self.panel)
        if left:
            with b.when(b.compare("sgt", b.const(panels[1], "i64"), whole)):
                run(whole, left)

    def _hoist(self, feature: Index, features: int) -> None:
        """What depends on the feature alone, for a panel's features side by side."""
        for start in range(0, features, self.lanes) if self.rooms else ():
            known: dict[object, Value] = {}
            place = Place(0, feature + start, True, min(self.lanes, features - start))
            for node, room in self.rooms.items():
                self.b.store(self.tail.evaluate(node, place, known), self.b.at(room, start))

    # ---- one tile

    def _tile(self, image: Value | None, position: Index, group: Value, panel: Index, features: int) -> None:
        """`rows` positions from `position` on, `features` features of one panel."""
        b = self.b
        vectors = -(-features // self.lanes)
        sums = [[b.variable(b.vector, b.number(0.0)) for _ in range(vectors)] for _ in range(self.knobs.rows)]
        matrix: Index = group
        if image is not None and self.conv.weight_per_batch:
            matrix = image * self.conv.groups + group
        where = (matrix * self.panels + panel) * (self.conv.depth * self.panel)
        self._products(sums, self._starts(image, position, group), b.at(self.weight, where))
        feature = group * self.conv.features_per_group + panel * self.panel
        values = [[place.get() for place in line] for line in sums]
        if self.innermost:
            self._store_features(values, image, position, feature, features)
        else:
            self._store_positions(values, image, position, feature, features)

    def _starts(self, image: Value | None, position: Index, group: Value) -> list[Value]:
        """Where in src the first tap of each of the tile's positions lies."""
        b, channel = self.b, group * self.conv.channels_per_group
        distances = self.tiling.distances()
        if distances is None:
            offsets = [self.tiling.offset(b, position + r, image) for r in range(self.knobs.rows)]
            return [b.at(self.src, offset + channel) for offset in offsets]
        first = b.at(self.src, self.tiling.offset(b, position, image) + channel)
        return [b.at(first, distance) for distance in distances]

    def _products(self, sums: Sequence[Sequence[Variable]], starts: Sequence[Value], weight: Value) -> None:
        """Adds src times weight over all taps and channels."""
        conv, b = self.conv, self.b
        # Without groups or gaps, the channels of neighbouring taps along a line follow one another.
        merged = conv.groups == 1 and conv.dilation[-1] == 1
        axes = len(conv.kernel) - 1 if merged else len(conv.kernel)
        run = conv.channels_per_group * (conv.kernel[-1] if merged else 1)
        tap: Index = 0
        offset: Index = 0
        with ExitStack() as nest:
            for axis in range(axes):
                if conv.kernel[axis] == 1:
                    continue
                index = nest.enter_context(b.loop(0, conv.kernel[axis], name="tap"))
                tap = tap * conv.kernel[axis] + index
                offset = offset + index * (conv.dilation[axis] * self.staged.strides[axis])
            rows = [b.at(start, offset) for start in starts]
            self._run(sums, rows, b.at(weight, tap * (run * self.panel)), run)

    def _run(
        self, sums: Sequence[Sequence[Variable]], rows: Sequence[Value], weight: Value, run: int
    ) -> None:
        """Products along `run` elements that follow one another in src and in weight."""
        b, whole = self.b, run - run % UNROLL
        if whole:
            with b.loop(0, whole, UNROLL, name="k") as k:
                self._steps(sums, [b.at(row, k) for row in rows], b.at(weight, k * self.panel), UNROLL)
        if whole < run:
            tails = [b.at(row, whole) for row in rows]
            self._steps(sums, tails, b.at(weight, whole * self.panel), run - whole)

    def _steps(
        self, sums: Sequence[Sequence[Variable]], rows: Sequence[Value], weight: Value, count: int
    ) -> None:
        """Products with `count` rows of the weight panel."""
        b = self.b
        values = [[place.get() for place in line] for line in sums]
        for k in range(count):
            line = [b.load(b.at(weight, k * self.panel + j * self.lanes)) for j in range(len(sums[0]))]
            for r, row in enumerate(rows):
                x = b.broadcast(row, k)
                values[r] = [b.fma(x, w, value) for w, value in zip(line, values[r], strict=True)]
        for places, ends in zip(sums, values, strict=True):
            for place, end in zip(places, ends, strict=True):
                place.set(end)

    # ---- results

    def _store_features(
        self, values: list[list[Value]], image: Value | None, position: Index, feature: Index, features: int
    ) -> None:
        known: dict[object, Value] = {}
        first = position if image is None else image * self.image + position
        for r, line in enumerate(values):
            for j, value in enumerate(line):
                count = min(self.lanes, features - j * self.lanes)
                channel = feature + j * self.lanes
                self._store(
                    value, Place((first + r) * self.conv.features + channel, channel, True, count), known
                )

    def _store_positions(
        self, values: list[list[Value]], image: Value | None, position: Index, feature: Index, features: int
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
                for node, room in self.rooms.items():
                    self.tail.keep(node, place, b.broadcast(room, j * self.lanes + i), known)
                self._store(column, place, known)

    def _store(self, value: Value, place: Place, known: dict[object, Value]) -> None:
        dtype = self.kernel.dst.dtype
        value = self.tail.apply(value, place, known)
        where = self.b.at(self.dst, place.element, storage.element_type(dtype))
        storage.write(self.b, dtype, value, where, count=place.count)

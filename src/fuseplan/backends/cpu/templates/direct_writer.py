"""The code of direct convolution: tasks, tiles, their products and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import mul
from typing import ClassVar

from fuseplan.backends.cpu import dots, model, staging
from fuseplan.backends.cpu.elementwise import Kept, Place, finish
from fuseplan.backends.cpu.features import Features
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import vector
from fuseplan.backends.cpu.loops import ceil_div, cut, even, nested, pieces, places, within
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.backends.cpu.tiling import Tiling, is_per_image, room, serving, sheet, tiling
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target


@dataclass(frozen=True)
class DirectKnobs(model.SumOfProducts):
    """The fields of `Direct`, which says what they mean."""

    rows: int
    vectors: int
    block: int
    block_panels: int
    lines: int = 0
    dots: bool = False


class DirectWriter:
    """Writes one kernel.

    Attributes:
        keeps: whether the kernel has a workspace for more than a copy of src.
    """

    keeps: ClassVar[bool] = False

    def __init__(self, knobs: DirectKnobs, planned: Kernel, target: Target) -> None:
        known = as_rows(planned)
        self.dot = dots.of(known, target) if knobs.dots else None
        held = dots.held(self.dot, known) if self.dot else None
        planned_staged = staging.staged(known, held=held)
        has_room = self.keeps or planned_staged.copies
        self.frame = Frame(knobs, known, target, workspace=has_room, planned=planned)
        kernel = self.frame.kernel
        self.staged = staging.staged(kernel, held=held)
        self._set(knobs, kernel, kernel.contraction)
        inner = knobs.lines * prod(self.conv.dst_spatial[1:])
        covering = tiling(planned_staged, knobs.rows, inner or sheet(known))
        self.tiling = replace(covering, staged=self.staged, positions=inner or sheet(kernel))
        self.tilings = serving(self.b, self.tiling, self.image)
        self.fetched = self._fetched(covering.count)

    def _set(self, knobs: DirectKnobs, kernel: Kernel, conv: Contraction) -> None:
        """All but how src is found and covered."""
        self.knobs, self.kernel, self.conv = knobs, kernel, conv
        self.b: Builder = self.frame.body
        self.lanes = self.frame.lanes
        self.stored = self.dot.element if self.dot else self.b.element
        self.run = dots.run_of(conv)
        steps = self.dot.steps(self.run) if self.dot else self.run
        self.depth = conv.depth // max(1, self.run) * steps  # a residue may have no taps
        self.wide = self.dot.lanes if self.dot else self.lanes
        # Elements of the weight are those of a feature that are multiplied at once.
        self.unit = self.dot.unit(kernel.weight.dtype) if self.dot else self.b.element
        self.panel = knobs.vectors * self.wide
        self.panels = -(-conv.features_per_group // self.panel)
        self.innermost = model.features_innermost(kernel)
        # Where a task's part of src is an image's, its tiles are too.
        self.per_image = is_per_image(kernel) or knobs.lines > 0
        self.image = prod(conv.dst_spatial)
        self.results = Features(self.frame)
        self.tail = self.results.tail
        self.kept = None if self.innermost else Kept(self.tail, self.panel)
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.shift = self.staged.held.shift if self.dot and self.staged.held else 0
        self.firsts = self.b.buffer(self.panel, "i32") if self.shift else None

    def _fetched(self, tiles: int) -> int:
        """Vectors of the next panel that a tile fetches in each turn of its loop, of so many tiles.

        All tiles of a task together fetch all of it. A layer of a model finds its weights in memory: without
        this, 1x1 kernels of 2 to 8 MB at 7x7 took 1.5 times as long on a Xeon as with weights in the second
        cache, and take 1.2.
        """
        passes = tiles if self.knobs.lines else tiles // ceil_div(tiles, self.knobs.block)
        is_far = passes > 1 and self.kernel.weight.nbytes > self.frame.target.l1_bytes
        return int(ceil_div(UNROLL * self.knobs.vectors, passes)) if is_far else 0

    # ---- tasks

    def by_blocks(self) -> Source:
        """A task is a block of tiles x a block of features; src is copied before them where it must be."""
        self.write_blocks()
        return self.frame.source(**self.staged.workspace())

    def write_blocks(self) -> Index:
        """Writes the tasks and gives their number."""
        workspace = self.frame.pointer("workspace") if self.staged.copies else self.frame.pointer("src")
        self.src = staging.emit(self.frame, self.staged, workspace)
        tasks, write = self.shared_out()
        with self.frame.tasks(tasks) as task:
            write(task)
        return tasks

    def shared_out(self) -> tuple[Index, Callable[[Index], None]]:
        """The number of tasks, and what writes one."""
        knobs, conv, b = self.knobs, self.conv, self.b
        images = conv.batch if self.per_image else 1
        blocks = ceil_div(self.tiling.count, knobs.block)
        parts = images * blocks * conv.groups
        share = even(self.frame, self.panels, parts, knobs.block_panels)
        panel_blocks = ceil_div(self.panels, share)

        def write(task: Index) -> None:
            image, block, group, panel_block = places(task, (images, blocks, conv.groups, panel_blocks))
            tiles = cut(block, blocks, self.tiling.count)
            panels = within(b, panel_block, share, self.panels)
            self._panels(image if self.per_image else None, 0, group, tiles, panels)

        return parts * panel_blocks, write

    def by_lines(self) -> Source:
        """A task copies the lines of src under its output lines to its thread's part of the workspace."""
        b, conv, lines = self.b, self.conv, self.knobs.lines
        size = room(self.staged, lines)
        stager = staging.Stager(self.frame, self.staged)
        scratch = stager.at(self.frame.pointer("workspace"), self.frame.thread * size)
        height, inner = conv.dst_spatial[0], prod(conv.dst_spatial[1:])
        blocks = -(-height // lines)
        above = self.staged.lines_under(1) - self.staged.lines_under(0)
        with self.frame.tasks(conv.batch * blocks) as task:
            image, block = task // blocks, task % blocks
            # The last block starts early where it would be short, and computes some lines twice.
            line = b.smaller(block * lines, height - lines) if height % lines else block * lines
            first = image * prod(self.staged.extents[:-1]) + line * above
            stager.copy_lines(first, self.staged.lines_under(lines), scratch)
            # The scratch is addressed as if the copy of all lines lay there.
            self.src = stager.at(scratch, 0 - first * self.staged.line)
            self._panels(image, line * inner, b.const(0, "i64"), (0, self.tiling.count), (0, self.panels))
        return self.frame.source(per_thread=size * self.staged.itemsize)

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
            if self.firsts:
                self._fill_firsts(self.firsts, self._matrix(image, group, panel), count)
            for each, serves in self.tilings:
                own = tiles if each is self.tiling else (0, each.count)
                with b.when(serves), b.loop(*own, name="tile") as tile:
                    position, ahead = base + each.start(b, tile), self._ahead(tile - own[0])
                    self._tile(each, image, position, group, panel, count, ahead)

        pieces(b, features, self.panel, run, name="panel", within=panels, numbered=True)

    def _ahead(self, turn: Index, panels: int = 1) -> Index:
        """From a weight to the one that a task's tile of that number fetches, some panels further."""
        return turn * (self.fetched * self.wide) + panels * self.depth * self.panel

    def _matrix(self, image: Index | None, group: Index, panel: Index) -> Value:
        """Where a panel of the weight lies."""
        matrix: Index = group
        if image is not None and self.conv.weight_per_batch:
            matrix = image * self.conv.groups + group
        where = (matrix * self.panels + panel) * (self.depth * self.panel)
        return self.b.at(self.weight, where, self.unit)

    def _vectors(self, features: int) -> int:
        """Vectors of results of so many features; of gates and of values, where both are."""
        each = self.results.each
        return each * -(-features // (each * self.lanes))

    def _fill_firsts(self, firsts: Value, weight: Value, features: int) -> None:
        """The numbers that sums of a panel begin with, since src's are larger by `shift` than they are."""
        b = self.b
        vectors = -(-self._vectors(features) * self.lanes // self.wide)
        totals, ones = self._sums(1, vectors), b.const(0x01010101, vector(self.wide, "i32"))

        def operands(k: Index) -> Operands:
            begin = b.at(weight, k * self.panel, self.unit)
            return (
                lambda step: self._weights(b.at(begin, step * self.panel, self.unit), vectors),
                lambda step, row: ones,
            )

        assert self.dot
        dots.add_whole(self.dot, totals, self.depth, operands)
        for j, total in enumerate(totals.values()[0]):
            b.store(total * -self.shift, b.at(firsts, j * self.wide, "i32"))

    def _sums(self, rows: int, vectors: int) -> Sums:
        kind = vector(self.wide, self.dot.sums) if self.dot else self.b.vector
        return Sums(self.b, rows, vectors, kind=kind)

    # ---- one tile

    def _tile(
        self,
        tiles: Tiling,
        image: Index | None,
        position: Index,
        group: Index,
        panel: Index,
        features: int,
        ahead: Index,
    ) -> None:
        """The positions of a tile from `position` on, `features` features of one panel.

        Weights that lie `ahead` elements further are fetched meanwhile.
        """
        b, vectors = self.b, self._vectors(features)
        sums = self._sums(tiles.rows, -(-vectors * self.lanes // self.wide))
        if self.firsts:
            places = (b.at(self.firsts, j * self.wide, "i32") for j in range(sums.vectors))
            sums.begin([b.load(place, sums.kind) for place in places])
        weight = self._matrix(image, group, panel)
        self._products(
            sums, self._starts(tiles, image, position, group), weight, b.at(weight, ahead, self.unit)
        )
        feature = self.results.first(group, panel * self.panel)
        values = [self._computed(line)[:vectors] for line in sums.values()]
        if self.kept is None:
            self._store_features(values, tiles, image, position, feature, features // self.results.each)
        else:
            self._store_positions(values, self.kept, tiles, image, position, feature, features)

    def _computed(self, line: list[Value]) -> list[Value]:
        """Sums as vectors of the compute type."""
        b, size = self.b, self.lanes
        if not self.dot or self.dot.sums == b.element:
            return line
        parts = [b.shuffle(x, x, range(at, at + size)) for x in line for at in range(0, self.wide, size)]
        return [b.convert("sitofp", part, b.element) for part in parts]

    def _starts(self, tiles: Tiling, image: Index | None, position: Index, group: Index) -> list[Value]:
        """Where in src the first tap of each of the tile's positions lies."""
        b, channel = self.b, group * self.conv.channels_per_group
        distances = tiles.distances()
        if distances is None:
            offsets = [tiles.offset(b, position + r, image) for r in range(tiles.rows)]
            return [b.at(self.src, offset + channel, self.stored) for offset in offsets]
        first = b.at(self.src, tiles.offset(b, position, image) + channel, self.stored)
        return [b.at(first, distance, self.stored) for distance in distances]

    def _products(self, sums: Sums, starts: Sequence[Value], weight: Value, ahead: Value) -> None:
        """Adds src times weight over all taps and channels, and fetches the weights at `ahead`."""
        conv, b, run = self.conv, self.b, self.run
        kernel = conv.kernel if run == conv.channels_per_group else conv.kernel[:-1]
        tap: Index = 0
        offset: Index = 0
        with nested(b, kernel, "tap") as at:
            steps = map(mul, conv.dilation, self.staged.strides)
            for index, taps, step in zip(at, kernel, steps, strict=False):
                tap, offset = index + tap * taps, index * step + offset
            rows = [b.at(start, offset, self.stored) for start in starts]
            size = (self.dot.steps(run) if self.dot else run) * self.panel
            panel, following = (b.at(each, tap * size, self.unit) for each in (weight, ahead))
            operands = partial(self._operands, rows, panel, following, sums.vectors)
            if self.dot:
                dots.add(self.dot, sums, rows, run, operands)
            else:
                add_products(sums, run, operands)

    def _operands(
        self, rows: Sequence[Value], weight: Value, ahead: Value, vectors: int, k: Index
    ) -> Operands:
        """Weights of neighbouring features, and elements of src of each position."""
        b, element = self.b, "i32" if self.dot else self.b.element
        xs, panel = [b.at(row, k, element) for row in rows], b.at(weight, k * self.panel, self.unit)

        def weights(step: int) -> list[Value]:
            for line in range(step, self.fetched, UNROLL):
                b.prefetch(b.at(ahead, k * self.panel + line * self.wide, self.unit))
            return self._weights(b.at(panel, step * self.panel, self.unit), vectors)

        align = 1 if self.dot else None
        return weights, lambda step, row: b.splat(
            b.load(b.at(xs[row], step, element), element, align=align), self.wide
        )

    def _weights(self, panel: Value, vectors: int) -> list[Value]:
        b = self.b
        places = [b.at(panel, j * self.wide, self.unit) for j in range(vectors)]
        if self.dot:
            return [dots.weights(self.dot, b, place, self.kernel.weight.dtype) for place in places]
        return [b.load(place) for place in places]

    # ---- results

    def _elements(self, tiles: Tiling, image: Index | None, position: Index) -> Iterable[Index]:
        """Where in dst the first feature of each of the tile's positions lies, features innermost."""
        first = position if image is None else image * self.image + position
        return ((first + r) * self.kernel.pitch for r in range(tiles.rows))

    def _runs(self, tiles: Tiling, plane: Index, position: Index) -> Iterator[tuple[int, Index, int, int]]:
        """The tile's positions in a plane of dst: each run's first, its place, the run's length and step."""
        yield 0, plane * self.image + position, tiles.rows, 1

    def _store_features(
        self,
        values: list[list[Value]],
        tiles: Tiling,
        image: Index | None,
        position: Index,
        feature: Index,
        features: int,
    ) -> None:
        known: dict[object, Value] = {}
        for element, line in zip(self._elements(tiles, image, position), values, strict=True):
            self.results.store(line, element, feature, features, known)

    def _store_positions(
        self,
        values: list[list[Value]],
        kept: Kept,
        tiles: Tiling,
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
                for first, element, positions, step in self._runs(tiles, plane + channel, position):
                    place = Place(element, channel, False, positions, step=step)
                    kept.spread(j * self.lanes + i, place, known)
                    lanes = [(first + lane) % self.lanes for lane in range(self.lanes)]
                    run = b.shuffle(column, nothing, lanes) if first else column
                    finish(self.frame, self.tail, run, place, known)

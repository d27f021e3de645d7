"""Convolution as many small matrix products, the elementwise tail applied in registers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from operator import mul
from typing import ClassVar

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.elementwise import Elementwise, Kept, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.loops import ceil_div, even, nested, pieces, places, within
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.sums import Operands, Sums, add_products
from fuseplan.backends.cpu.tiling import MOST_ADDRESSES, Tiling, is_per_image, room, serving, sheet, tiling
from fuseplan.backends.parts import gates_beside
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Pad, Reshape, Step, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, lanes, moved_once
from fuseplan.messages.reasons import Claim, Reason

_LINE_COUNTS = 512  # about as many numbers of lines are compared


@dataclass(frozen=True)
class Direct(model.SumOfProducts):
    """Tiles of output positions x features in registers; every kernel size, stride, dilation, group and rank.

    reads:  src once for each block of features that does not fit beside it in the second cache; weight once
            for each block of positions
    writes: dst once
    chosen: where no algorithm with fewer multiplications fits; a 1x1 kernel is a plain matrix product here

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

    name: ClassVar[str] = "direct"
    opens: ClassVar[bool] = True
    efficiency: ClassVar[float] = 0.95
    gated: ClassVar[bool] = True
    ranges: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield model.padding_claim(kernel)
        is_last = kernel.parts is None or model.features_innermost(kernel)
        yield model.about(kernel, is_last, Reason.CHANNELS_FIRST, str(kernel.dst))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        kernel = as_rows(kernel)
        conv, width = kernel.contraction, lanes(kernel, target)
        tiles = sorted(_tiles(kernel, target), key=lambda tile: _waste(kernel, target, *tile))
        for rows, vectors in tiles[:2]:
            panels = -(-conv.features_per_group // (vectors * width))
            lines = _lines(kernel, target, rows)
            if lines:
                covering = tiling(staging.staged(kernel), rows, lines * prod(conv.dst_spatial[1:]))
                yield cls(rows, vectors, covering.count, panels, lines)
            yield cls(rows, vectors, *_blocks(kernel, target, rows, panels))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        kernel = as_rows(kernel)
        # A thread's own part stays in its caches.
        copied = 0 if self.lines else staging.staged(kernel).elements
        return moved_once(kernel, copied * model.itemsize(kernel))

    def waste(self, kernel: Kernel, target: Target) -> float:
        kernel = as_rows(kernel)
        return _waste(kernel, target, self.rows, self.vectors) * _transposing(kernel, target)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        writer = _Writer(self, kernel, target)
        return writer.by_lines() if self.lines else writer.by_blocks()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The weight as [image][group][panel][tap, channel][feature of the panel].

        Zeros follow the last feature. There is one image unless each has a weight of its own. Vectors of
        gates and of values take turns.
        """
        conv = kernel.contraction
        panel = self.vectors * lanes(kernel, target)
        panels = -(-conv.features_per_group // panel)
        groups = conv.groups * (conv.batch if conv.weight_per_batch else 1)
        inner = conv.channels_per_group, conv.taps
        gates = gates_beside(kernel.parts, panels * panel // 2, lanes(kernel, target), inner)
        features = panels * panel if gates else conv.features_per_group
        return (
            *gates,
            Reshape((groups, features, *inner)),
            Pad((groups, panels * panel, *inner)),
            Reshape((groups, panels, panel, *inner)),
            Transpose((0, 1, 4, 3, 2)),
        )


def _transposing(kernel: Kernel, target: Target) -> float:
    """Time with transpositions over time without.

    Measured on Zen 5 with 1x1 kernels: channels-first results cost 14 floating-point operations' time an
    element, the channels-last copy of a channels-first src 20, or 40 where it leaves the near caches.
    """
    results = 0 if model.features_innermost(kernel) else 14 * kernel.dst.size
    near = kernel.src.size * model.itemsize(kernel) <= target.l2_bytes * target.threads
    copied = 0 if staging.channels_last(kernel) else (20 if near else 40) * kernel.src.size
    return 1 + (results + copied) / kernel.contraction.flops


def _covering(kernel: Kernel, rows: int) -> Tiling:
    return tiling(staging.staged(kernel), rows, sheet(kernel))


def _tiles(kernel: Kernel, target: Target) -> Iterator[tuple[int, int]]:
    """Tiles whose accumulators and row of weights fit the registers; LLVM wants an eighth to move in."""
    conv = kernel.contraction
    width, positions = lanes(kernel, target), sheet(kernel)
    most = positions if model.features_innermost(kernel) else min(positions, width)
    counts = range(1, min(4, -(-conv.features_per_group // width)) + 1)
    for vectors in (2, 4) if kernel.parts else counts:
        top = min(most, 16, (target.vector_registers * 7 // 8 - vectors) // vectors)
        for rows in range(max(1, top // 2), top + 1):
            yield rows, vectors


def _waste(kernel: Kernel, target: Target, rows: int, vectors: int) -> float:
    """Time of the tiles over time of the same products without a loss."""
    conv, width = kernel.contraction, lanes(kernel, target)
    features = conv.features_per_group
    whole, left = divmod(features, vectors * width)
    edge_features = (whole * vectors + -(-left // width)) * width / features
    # Two loads and two products a cycle are what current cores do, and a product takes 4 to 5 cycles. A
    # vector of weights is read once for `rows` products, mostly from the second cache: more than 16 bytes a
    # cycle from there cost time. Measured on Zen 5 with 64-byte vectors: 14x2, 8x2 and 7x2 0.98 of peak, 9x3
    # 0.97, 6x4 0.92.
    products = rows * vectors
    loads, latency = (rows + vectors) / products, 10 / products
    streaming = 1 + 0.015 * max(0.0, 2 * target.vector_bytes / rows - 16)
    covering = _covering(kernel, rows)
    addresses = 1.2 if covering.kind == "scattered" and rows > MOST_ADDRESSES else 1.0
    small = 1 + 0.001 * products  # of equals the smaller: less code, less to compile
    return covering.waste * edge_features * max(1.0, loads, latency) * streaming * addresses * small


def _blocks(kernel: Kernel, target: Target, rows: int, panels: int) -> tuple[int, int]:
    """Tiles and panels of a task: their data stays in the second cache, and each thread gets several."""
    conv, covering = kernel.contraction, _covering(kernel, rows)
    position_bytes = max(1, conv.channels_per_group * prod(conv.stride) * model.itemsize(kernel))
    fitting = max(1, int(target.l2_bytes * 0.4) // (position_bytes * rows))
    usual = max(1, (192 if covering.positions > 2000 else 96) // rows)
    block = min(fitting, usual, covering.count)
    sheets = conv.groups * (conv.batch if is_per_image(kernel) else 1)
    blocks = sheets * -(-covering.count // block)
    parts = min(panels, -(-4 * target.threads // blocks))
    return block, -(-panels // parts)


def _lines(kernel: Kernel, target: Target, rows: int) -> int:
    """Output lines a task: their part of src fits the second cache and every thread gets several; 0 for none.

    A thread's own copy is written again and again to the same place, so it never leaves the near caches; one
    copy for all costs nothing more while it fits them.
    """
    conv, plan = kernel.contraction, staging.staged(kernel)
    is_large = plan.elements * model.itemsize(kernel) > target.l2_bytes * target.threads
    if not is_large or len(conv.dst_spatial) == 1 or conv.groups > 1:
        return 0
    height, inner = conv.dst_spatial[0], prod(conv.dst_spatial[1:])

    def loss(lines: int) -> float:
        blocks = -(-height // lines) * lines / height
        copied = plan.lines_under(lines) / (lines * conv.stride[0] * prod(plan.extents[1:-1]))
        return tiling(plan, rows, lines * inner).waste * blocks * (1 + 0.03 * copied)

    most = target.l2_bytes // 4 // model.itemsize(kernel)
    fitting = bisect_right(range(1, height + 1), most, key=partial(room, plan))
    shared = height // -(-3 * target.threads // conv.batch)
    counts = range(-(-rows // inner), min(fitting, shared) + 1)
    best = min(counts[:: max(1, len(counts) // _LINE_COUNTS)], key=loss, default=0)
    return best if best and loss(best) < 1.2 * _covering(kernel, rows).waste else 0


class _Writer:
    def __init__(self, knobs: Direct, planned: Kernel, target: Target) -> None:
        known = as_rows(planned)
        planned_staged = staging.staged(known)
        self.frame = Frame(knobs, known, target, workspace=planned_staged.copies, planned=planned)
        kernel = self.frame.kernel
        self.knobs, self.kernel, self.conv = knobs, kernel, kernel.contraction
        self.staged = staging.staged(kernel)
        self.b: Builder = self.frame.body
        self.lanes = self.frame.lanes
        self.panel = knobs.vectors * self.lanes
        self.panels = -(-self.conv.features_per_group // self.panel)
        self.innermost = model.features_innermost(kernel)
        # Where a task's part of src is an image's, its tiles are too.
        self.per_image = is_per_image(kernel) or knobs.lines > 0
        self.image = prod(self.conv.dst_spatial)
        inner = knobs.lines * prod(self.conv.dst_spatial[1:])
        covering = tiling(planned_staged, knobs.rows, inner or sheet(known))
        self.tiling = replace(covering, staged=self.staged, positions=inner or sheet(kernel))
        self.tilings = serving(self.b, self.tiling, self.image)
        self.each = 2 if kernel.parts else 1  # vectors that make one of dst's
        self.between = Elementwise(self.frame, "between")
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
        blocks = ceil_div(self.tiling.count, knobs.block)
        parts = images * blocks * conv.groups
        share = even(self.frame, self.panels, parts, knobs.block_panels)
        panel_blocks = ceil_div(self.panels, share)
        with self.frame.tasks(parts * panel_blocks) as task:
            image, block, group, panel_block = places(task, (images, blocks, conv.groups, panel_blocks))
            tiles = within(b, block, knobs.block, self.tiling.count)
            panels = within(b, panel_block, share, self.panels)
            self._panels(image if self.per_image else None, 0, group, tiles, panels)
        return self.frame.source(**self.staged.workspace(model.itemsize(self.kernel)))

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
            first = image * prod(self.staged.extents[:-1]) + line * above
            stager.copy_lines(first, self.staged.lines_under(lines), scratch)
            # The scratch is addressed as if the copy of all lines lay there.
            self.src = b.at(scratch, 0 - first * self.staged.line)
            self._panels(image, line * inner, b.const(0, "i64"), (0, self.tiling.count), (0, self.panels))
        return self.frame.source(per_thread=size * model.itemsize(self.kernel))

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
            for each, serves in self.tilings:
                own = tiles if each is self.tiling else (0, each.count)
                with b.when(serves), b.loop(*own, name="tile") as tile:
                    self._tile(each, image, base + each.start(b, tile), group, panel, count)

        pieces(b, features, self.panel, run, name="panel", within=panels, numbered=True)

    # ---- one tile

    def _tile(
        self,
        tiles: Tiling,
        image: Index | None,
        position: Index,
        group: Index,
        panel: Index,
        features: int,
    ) -> None:
        """The positions of a tile from `position` on, `features` features of one panel."""
        b = self.b
        sums = Sums(b, tiles.rows, self.each * -(-features // (self.each * self.lanes)))
        matrix: Index = group
        if image is not None and self.conv.weight_per_batch:
            matrix = image * self.conv.groups + group
        where = (matrix * self.panels + panel) * (self.conv.depth * self.panel)
        self._products(sums, self._starts(tiles, image, position, group), b.at(self.weight, where))
        feature = group * self.conv.features_per_group + panel * self.panel
        if self.kept is None:
            begin = panel * (self.panel // 2) if self.each > 1 else feature
            self._store_features(sums.values(), image, position, begin, features // self.each)
        else:
            self._store_positions(sums.values(), self.kept, image, position, feature, features)

    def _starts(self, tiles: Tiling, image: Index | None, position: Index, group: Index) -> list[Value]:
        """Where in src the first tap of each of the tile's positions lies."""
        b, channel = self.b, group * self.conv.channels_per_group
        distances = tiles.distances()
        if distances is None:
            offsets = [tiles.offset(b, position + r, image) for r in range(tiles.rows)]
            return [b.at(self.src, offset + channel) for offset in offsets]
        first = b.at(self.src, tiles.offset(b, position, image) + channel)
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
        """In a gated product, vectors of gates and of values take turns, and two make one of dst's."""
        known: dict[object, Value] = {}
        first = position if image is None else image * self.image + position
        extent, each = self.kernel.dst.channels, self.each
        for r, line in enumerate(values):
            for j in range(0, len(line), each):
                done = j // each * self.lanes
                channel, count = feature + done, min(self.lanes, features - done)
                parts = {}
                for i, value in enumerate(line[j : j + each] if each > 1 else ()):
                    gate = Place(0, channel + i * extent, True, count)
                    parts[f"x[{i}]"] = self.between.apply(value, gate, known)
                place = Place((first + r) * self.kernel.pitch + channel, channel, True, count)
                finish(self.frame, self.tail, line[j], place, known, parts=parts)

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

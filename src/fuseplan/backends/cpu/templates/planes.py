"""1x1 convolutions between tensors that are stored channels first: products of planes, never transposed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Kept, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import ceil_div, even, pieces, places
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Reshape, Step, Tiles, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, lanes, moved_once
from fuseplan.language.layouts import short
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.reasons import Claim, Reason, claim

_ROWS = 16  # most features in a tile: larger ones leave more of the last tile unused


@dataclass(frozen=True)
class Planes(model.SumOfProducts):
    """Tiles of features x positions in registers: lanes are positions, weights are spread over them.

    reads:  src once for each group of features, into the thread's part of the workspace; weight once for each
            block of positions
    writes: dst once, in whole vectors of positions
    chosen: for planes that are large, or whole vectors; else `direct` transposes tiles in registers

    Attributes:
        rows: features in a tile.
        vectors: vectors of positions in a tile.
        block: tiles of positions in a task.
        block_tiles: tiles of features in a task.
    """

    rows: int
    vectors: int
    block: int
    block_tiles: int

    name: ClassVar[str] = "planes"
    efficiency: ClassVar[float] = 0.95
    opens: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        conv, count = kernel.contraction, prod(kernel.dst.spatial)
        plain = conv.is_matrix_product and conv.groups == 1
        yield model.about(kernel, plain, Reason.NOT_POINT_CONVOLUTION, conv.text)
        yield model.about(kernel, count > 1, Reason.NOT_POINT_CONVOLUTION, f"{count} position", "several")
        yield claim(kernel.dst.layout == short(kernel.dst.rank)[0], Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield claim(is_in_planes(kernel.src), Reason.SCATTERED_POSITIONS, got=str(kernel.src))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        tiles = sorted(_tiles(kernel, target), key=lambda tile: _waste(kernel, target, *tile))
        for rows, vectors in tiles[:2]:
            yield cls(rows, vectors, *_blocks(kernel, target, rows, vectors))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        groups = -(-feature_tiles(kernel, self.rows) // self.block_tiles)
        moved = moved_once(kernel)
        return Traffic(moved.read + (groups - 1) * kernel.src.nbytes, moved.written)

    def waste(self, kernel: Kernel, target: Target) -> float:
        # Without a prologue the copy is made between products and costs nothing; with one it is made before
        # them, in about two cycles a vector.
        before = 4 / min(self.rows * self.block_tiles, kernel.dst.channels) if kernel.prologue else 0
        return _waste(kernel, target, self.rows, self.vectors) * (1 + before)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The weight as [image][tile][channel][feature of the tile]; the last tile begins early.

        There is one image unless each has a weight of its own.
        """
        conv = kernel.contraction
        images = conv.batch if conv.weight_per_batch else 1
        matrices = Reshape((images, conv.features, conv.channels))
        return matrices, Tiles(1, self.rows), Transpose((0, 1, 3, 2))


def _tiles(kernel: Kernel, target: Target) -> Iterator[tuple[int, int]]:
    """Tiles whose accumulators, vectors of src and one spread weight fit the registers."""
    conv, width = kernel.contraction, lanes(kernel, target)
    for vectors in range(1, min(4, -(-prod(conv.dst_spatial) // width)) + 1):
        top = min(_ROWS, conv.features, (target.vector_registers - 1 - vectors) // vectors)
        for rows in range(max(1, top // 2), top + 1):
            yield rows, vectors


def _waste(kernel: Kernel, target: Target, rows: int, vectors: int) -> float:
    """Time of the tiles over time of the same products without a loss."""
    conv, width = kernel.contraction, lanes(kernel, target)
    positions = prod(conv.dst_spatial)
    features = feature_tiles(kernel, rows) * rows / conv.features

    def cost(vectors: int) -> float:
        """Of a tile, in products: at two loads and two products a cycle, a product taking 4 to 5 cycles."""
        products = rows * vectors
        return max(products, rows + vectors, 10)

    whole, left = divmod(positions, vectors * width)
    rest = -(-left // width)
    spent = whole * cost(vectors) + (cost(rest) if rest else 0)
    small = 1 + 0.001 * rows * vectors  # of equals the smaller: less code, less to compile
    return features * spent * width / (positions * rows) * small


def _blocks(kernel: Kernel, target: Target, rows: int, vectors: int) -> tuple[int, int]:
    """Tiles of positions and of features in a task: src's part fits the second cache, threads get several."""
    conv, width = kernel.contraction, lanes(kernel, target)
    count = position_tiles(kernel, vectors * width)
    tiles = feature_tiles(kernel, rows)
    tile_bytes = conv.channels * vectors * width * model.itemsize(kernel)
    block = max(1, min(count, 16 // vectors, int(target.l2_bytes * 0.4) // tile_bytes))
    wanted = 4 * target.threads if target.threads > 1 else 1
    # Narrower blocks copy nothing twice; below two tiles, lines of src are read in pieces.
    block = max(min(block, 2), min(block, -(-conv.batch * count // wanted)))
    block = -(-count // -(-count // block))
    parts = min(max(1, tiles // 2), -(-wanted // (conv.batch * -(-count // block))))
    return block, -(-tiles // parts)


def is_in_planes(spec: TensorSpec) -> bool:
    """Whether the positions of a channel follow one another in storage."""
    step = 1
    for extent, stride in zip(reversed(spec.spatial), reversed(spec.element_strides[2:]), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def feature_tiles(kernel: Kernel, rows: int) -> int:
    """Tiles over the features; the last one begins early where it would be short."""
    return -(-kernel.dst.channels // rows)


def position_tiles(kernel: Kernel, size: int) -> int:
    """Tiles over the positions of an image; the last one may have fewer vectors."""
    return -(-prod(kernel.dst.spatial) // size)


@dataclass(frozen=True)
class _Part:
    """A task's positions: the image, tiles first..last-1, where their copy lies, where the next begins."""

    image: Index
    first: Index
    last: Index
    copy: Value
    ahead: Index


@dataclass(frozen=True)
class _Tile:
    """Some vectors of positions, and their copy; `ahead` is where in src to fetch from meanwhile."""

    position: Index
    vectors: int
    copy: Value
    ahead: Index | None


class Writer:
    """Writes one kernel: one phase of tasks, each a block of positions x a group of features."""

    def __init__(self, knobs: Planes, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(knobs, kernel, target, workspace=True)
        self.knobs, self.kernel = knobs, self.frame.kernel
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.channels, self.features = kernel.src.channels, kernel.dst.channels
        self.positions = prod(kernel.dst.spatial)
        self.size = knobs.vectors * self.lanes
        self.prologue, self.tail = Elementwise(self.frame, "prologue"), Elementwise(self.frame, "epilogue")
        self.kept = Kept(self.tail, knobs.rows)
        self.src = self.frame.pointer("src")
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.is_own = kernel.contraction.weight_per_batch

    def source(self) -> Source:
        """The whole kernel."""
        b, knobs = self.b, self.knobs
        count, tiles = position_tiles(self.kernel, self.size), feature_tiles(self.kernel, knobs.rows)
        blocks, images = -(-count // knobs.block), self.kernel.src.batch
        share = even(self.frame, tiles, images * blocks, knobs.block_tiles)
        groups = ceil_div(tiles, share)
        room = knobs.block * self.channels * self.size
        copy = b.at(self.frame.pointer("workspace"), self.frame.thread * room)
        tasks = images * blocks * groups
        with self.frame.tasks(tasks) as task:
            image, block, group = places(task, (images, blocks, groups))
            later = (
                self.frame.following(task, tasks) // groups
            )  # its src is fetched while this one multiplies
            ahead = self._plane(later // blocks, 0) + later % blocks * (knobs.block * self.size)
            first = block * knobs.block
            part = _Part(image, first, b.smaller(first + knobs.block, count), copy, ahead)
            begin = group * share
            end = b.smaller(begin + share, tiles)
            if self.prologue.stages:
                self._copy(part)
            else:
                self._tiles(part, begin, copies=True)
                begin = begin + 1
            with b.loop(begin, end, name="tile") as tile:
                self._tiles(part, tile)
        return self.frame.source(per_thread=room * model.itemsize(self.kernel))

    def _plane(self, image: Index, channel: Index) -> Index:
        """Where in src a channel's positions begin."""
        strides = self.kernel.src.element_strides
        return image * strides[0] + channel * strides[1]

    def _each(self, part: _Part, run: Callable[[_Tile], None]) -> None:
        """Runs for each tile of a task's positions: all alike, then an image's last, if it is smaller."""
        b, room = self.b, self.channels * self.size

        def tile(number: Index, count: int) -> None:
            done = number - part.first
            copy, vectors = b.at(part.copy, done * room), -(-count // self.lanes)
            if count == self.size:
                run(_Tile(number * self.size, vectors, copy, part.ahead + done * self.size))
                return
            # It begins early, if there is room, so that its vectors are whole.
            run(_Tile(max(0, self.positions - vectors * self.lanes), vectors, copy, None))

        task = (part.first, part.last)
        pieces(b, self.positions, self.size, tile, name="part", within=task, numbered=True)

    # ---- the copy of src

    def _copy(self, part: _Part) -> None:
        """A task's positions after the prologue, as [tile of positions][channel][position of the tile].

        Without a prologue, the first tile of features makes the copy while it multiplies.
        """
        b = self.b
        with b.loop(0, self.channels, name="channel") as channel:
            known: dict[object, Value] = {}
            source = self._plane(part.image, channel)
            self.prologue.prepare(Place(source, channel, False, self.lanes), known)

            def read(tile: _Tile) -> None:
                copy = b.at(tile.copy, channel * self.size)
                self._read(source + tile.position, channel, copy, tile.vectors, known)

            self._each(part, read)

    def _read(
        self, source: Index, channel: Index, copy: Value, vectors: int, known: dict[object, Value]
    ) -> list[Value]:
        """Neighbouring positions of one channel of src, which are also put into the copy."""
        b, dtype = self.b, self.kernel.src.dtype
        read = []
        for j in range(vectors):
            count = min(self.lanes, self.positions - j * self.lanes)
            place = Place(source + j * self.lanes, channel, False, count)
            x = storage.read_at(b, dtype, self.src, place.element, count)
            read.append(self.prologue.apply(x, place, known))
            b.store(read[-1], b.at(copy, j * self.lanes), align=self.frame.target.vector_bytes)
        return read

    # ---- tiles

    def _tiles(self, part: _Part, number: Index, *, copies: bool = False) -> None:
        """One tile of features over all of the task's positions; `copies` reads src and makes the copy."""
        b, rows = self.b, self.knobs.rows
        tile = part.image * feature_tiles(self.kernel, rows) + number if self.is_own else number
        weight = b.at(self.weight, tile * (self.channels * rows))
        feature = number * rows
        if self.features % rows:
            feature = b.smaller(feature, self.features - rows)
        self.kept.fill(feature, rows)
        # A line of every fourth channel of the next task's src a tile: after a few tiles, all are near.
        line = self._plane(0, number % UNROLL) + number // UNROLL % self.knobs.vectors * self.lanes

        def run(tile: _Tile) -> None:
            source = self._plane(part.image, 0) + tile.position if copies else None
            sums = Sums(b, rows, tile.vectors)
            add_products(sums, self.channels, partial(self._operands, tile, weight, source, line))
            for r, vectors in enumerate(sums.values()):
                self._store(part.image, feature + r, r, tile.position, vectors)

        self._each(part, run)

    def _operands(self, tile: _Tile, weight: Value, source: Index | None, line: Index, k: Index) -> Operands:
        """Neighbouring positions of a channel, and the weight of each feature."""
        b, rows = self.b, self.knobs.rows
        if tile.ahead is not None and isinstance(k, Value):
            where = tile.ahead + self._plane(0, k) + line
            b.prefetch(b.at(self.src, where, storage.element_type(self.kernel.src.dtype)))
        return (
            lambda step: self._channel(tile, k + step, source),
            lambda step, row: b.broadcast(weight, (k + step) * rows + row),
        )

    def _channel(self, tile: _Tile, channel: Index, source: Index | None) -> list[Value]:
        """One channel of a tile's positions: from the copy, or from `source` on in src, making the copy."""
        b, copy = self.b, self.b.at(tile.copy, channel * self.size)
        if source is not None:
            return self._read(source + self._plane(0, channel), channel, copy, tile.vectors, {})
        align = self.frame.target.vector_bytes
        return [b.load(b.at(copy, j * self.lanes), align=align) for j in range(tile.vectors)]

    def _store(self, image: Index, feature: Index, row: int, position: Index, values: list[Value]) -> None:
        """One feature of a tile."""
        known: dict[object, Value] = {}
        self.kept.spread(row, Place(0, feature, False, self.lanes), known)
        plane = (image * self.features + feature) * self.positions + position
        for j, value in enumerate(values):
            count = min(self.lanes, self.positions - j * self.lanes)
            place = Place(plane + j * self.lanes, feature, False, count)
            finish(self.frame, self.tail, value, place, known)

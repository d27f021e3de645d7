"""Writes the kernel of a 1x1 convolution whose lanes are positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.tensor import TensorSpec

UNROLL = 4


@dataclass(frozen=True)
class PlanesKnobs(model.SumOfProducts):
    """The choice of `Planes`.

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


def write(knobs: PlanesKnobs, kernel: Kernel, target: Target) -> Source:
    """The kernel's source: one phase of tasks, each a block of positions x a group of features."""
    return _Writer(knobs, kernel, target).source()


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

    image: Value
    first: Value
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


class _Writer:
    def __init__(self, knobs: PlanesKnobs, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel = knobs, kernel
        self.frame = Frame(knobs, kernel, target, workspace=True)
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.channels, self.features = kernel.src.channels, kernel.dst.channels
        self.positions = prod(kernel.dst.spatial)
        self.size = knobs.vectors * self.lanes
        self.whole = self.positions // self.size
        self.rest = -(-(self.positions - self.whole * self.size) // self.lanes)
        self.prologue, self.tail = Elementwise(self.frame, "prologue"), Elementwise(self.frame, "epilogue")
        self.hoisted = [node for node in self.tail.invariants(channel=True) if node.fn != "leaf"]
        room = -(-knobs.rows // self.lanes) * self.lanes
        self.rooms = {node: self.b.buffer(room) for node in self.hoisted}
        self.src, self.dst = self.frame.pointer("src"), self.frame.pointer("dst")
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.is_own = kernel.contraction.weight_per_batch

    def source(self) -> Source:
        """The whole kernel."""
        b, knobs = self.b, self.knobs
        count, tiles = position_tiles(self.kernel, self.size), feature_tiles(self.kernel, knobs.rows)
        blocks, groups = -(-count // knobs.block), -(-tiles // knobs.block_tiles)
        room = knobs.block * self.channels * self.size
        copy = b.at(self.frame.pointer("workspace"), self.frame.thread * room)
        tasks = self.kernel.src.batch * blocks * groups
        with self.frame.tasks(tasks) as task:
            rest, group = task // groups, task % groups
            image, block = rest // blocks, rest % blocks
            # This thread's next task, if all advance alike: its src is fetched while this one multiplies.
            later = b.smaller(task + self.frame.threads, tasks - 1) // groups
            ahead = self._plane(later // blocks, 0) + later % blocks * (knobs.block * self.size)
            first = block * knobs.block
            part = _Part(image, first, b.smaller(first + knobs.block, count), copy, ahead)
            begin = group * knobs.block_tiles
            end = b.smaller(begin + knobs.block_tiles, tiles)
            if self.prologue.stages:
                self._copy(part)
            else:
                self._tiles(part, begin, copies=True)
                begin = begin + 1
            with b.loop(begin, end, name="tile") as tile:
                self._tiles(part, tile)
        return self.frame.source(workspace_per_thread=room * model.itemsize(self.kernel))

    def _plane(self, image: Index, channel: Index) -> Index:
        """Where in src a channel's positions begin."""
        strides = self.kernel.src.element_strides
        return image * strides[0] + channel * strides[1]

    def _each(self, part: _Part, run: Callable[[_Tile], None]) -> None:
        """Runs for each tile of a task's positions: all alike, then an image's last, if it is smaller."""
        b, room = self.b, self.channels * self.size
        if self.whole:
            with b.loop(part.first, b.smaller(part.last, self.whole), name="part") as number:
                done = number - part.first
                copy, ahead = b.at(part.copy, done * room), part.ahead + done * self.size
                run(_Tile(number * self.size, self.knobs.vectors, copy, ahead))
        if self.rest:
            with b.when(b.compare("sgt", b.const(part.last, I64), self.whole)):
                # It begins early, if there is room, so that its vectors are whole.
                start = max(0, self.positions - self.rest * self.lanes)
                run(_Tile(start, self.rest, b.at(part.copy, (self.whole - part.first) * room), None))

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
            where = b.at(self.src, place.element, storage.element_type(dtype))
            x = storage.read(b, dtype, where, self.lanes, count=count)
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
        self._hoist(feature)
        # A line of every fourth channel of the next task's src a tile: after a few tiles, all are near.
        line = self._plane(0, number % UNROLL) + number // UNROLL % self.knobs.vectors * self.lanes

        def run(tile: _Tile) -> None:
            source = self._plane(part.image, 0) + tile.position if copies else None
            values = self._products(tile, weight, source, line)
            for r, vectors in enumerate(values):
                self._store(part.image, feature + r, r, tile.position, vectors)

        self._each(part, run)

    def _hoist(self, feature: Index) -> None:
        """What depends on the feature alone, for the tile's features side by side."""
        rows = self.knobs.rows
        for start in range(0, rows, self.lanes) if self.rooms else ():
            known: dict[object, Value] = {}
            place = Place(0, feature + start, True, min(self.lanes, rows - start))
            for node, room in self.rooms.items():
                self.b.store(self.tail.evaluate(node, place, known), self.b.at(room, start))

    def _products(self, tile: _Tile, weight: Value, source: Index | None, line: Index) -> list[list[Value]]:
        """The sums over all channels: for each feature, its vectors of positions."""
        b, rows = self.b, self.knobs.rows
        sums = [[b.variable(b.vector, b.number(0.0)) for _ in range(tile.vectors)] for _ in range(rows)]

        def steps(k: Index, count: int) -> None:
            values = [[place.get() for place in places] for places in sums]
            for step in range(count):
                xs = self._channel(tile, k + step, source)
                for r in range(rows):
                    w = b.broadcast(weight, (k + step) * rows + r)
                    values[r] = [b.fma(w, x, value) for x, value in zip(xs, values[r], strict=True)]
            for places, ends in zip(sums, values, strict=True):
                for place, end in zip(places, ends, strict=True):
                    place.set(end)

        even = self.channels - self.channels % UNROLL
        if even:
            with b.loop(0, even, UNROLL, name="k") as k:
                if tile.ahead is not None:
                    where = tile.ahead + self._plane(0, k) + line
                    b.prefetch(b.at(self.src, where, storage.element_type(self.kernel.src.dtype)))
                steps(k, UNROLL)
        if even < self.channels:
            steps(even, self.channels - even)
        return [[place.get() for place in places] for places in sums]

    def _channel(self, tile: _Tile, channel: Index, source: Index | None) -> list[Value]:
        """One channel of a tile's positions: from the copy, or from `source` on in src, making the copy."""
        b, copy = self.b, self.b.at(tile.copy, channel * self.size)
        if source is not None:
            return self._read(source + self._plane(0, channel), channel, copy, tile.vectors, {})
        align = self.frame.target.vector_bytes
        return [b.load(b.at(copy, j * self.lanes), align=align) for j in range(tile.vectors)]

    def _store(self, image: Value, feature: Index, row: int, position: Index, values: list[Value]) -> None:
        """One feature of a tile."""
        b, dtype = self.b, self.kernel.dst.dtype
        known: dict[object, Value] = {}
        for node, room in self.rooms.items():
            place = Place(0, feature, False, self.lanes)
            self.tail.keep(node, place, b.broadcast(room, row), known)
        plane = (image * self.features + feature) * self.positions + position
        for j, value in enumerate(values):
            count = min(self.lanes, self.positions - j * self.lanes)
            place = Place(plane + j * self.lanes, feature, False, count)
            where = b.at(self.dst, place.element, storage.element_type(dtype))
            storage.write(b, dtype, self.tail.apply(value, place, known), where, count=count)

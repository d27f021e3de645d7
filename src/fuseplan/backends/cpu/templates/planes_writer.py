"""Writes the kernel of a 1x1 convolution whose lanes are positions."""

from __future__ import annotations

from math import prod
from typing import Protocol

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame, slots_of
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.emit import Source
from fuseplan.kernel import Kernel
from fuseplan.target import Target
from fuseplan.tensor import TensorSpec

UNROLL = 4


class Knobs(Protocol):
    """What the template chose; see `Planes`."""

    @property
    def rows(self) -> int:
        """Features in a tile."""

    @property
    def vectors(self) -> int:
        """Vectors of positions in a tile."""

    @property
    def block(self) -> int:
        """Tiles of positions in a task."""

    @property
    def block_tiles(self) -> int:
        """Tiles of features in a task."""

    @property
    def text(self) -> str:
        """The choice as a person writes it."""


def write(knobs: Knobs, kernel: Kernel, target: Target) -> Source:
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


class _Writer:
    def __init__(self, knobs: Knobs, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel = knobs, kernel
        self.frame = Frame(kernel, target, slots_of(kernel, workspace=True), f"{knobs.text}\n{kernel.text}")
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
            first = block * knobs.block
            last = b.smaller(first + knobs.block, count)
            self._copy(image, first, last, copy)
            # This thread's next task, if all advance alike: its src is fetched while this one multiplies.
            later = b.smaller(task + self.frame.threads, tasks - 1) // groups
            ahead = self._plane(later // blocks, 0) + later % blocks * (knobs.block * self.size)
            begin = group * knobs.block_tiles
            with b.loop(begin, b.smaller(begin + knobs.block_tiles, tiles), name="tile") as tile:
                self._tiles(image, tile, first, last, copy, ahead)
        return self.frame.source(workspace_per_thread=room * model.itemsize(self.kernel))

    def _plane(self, image: Index, channel: Index) -> Index:
        """Where in src a channel's positions begin."""
        strides = self.kernel.src.element_strides
        return image * strides[0] + channel * strides[1]

    def _start(self) -> int:
        """Where the last tile of positions begins, where it has fewer vectors: early, if there is room."""
        return max(0, self.positions - self.rest * self.lanes)

    # ---- the copy of src

    def _copy(self, image: Value, first: Value, last: Index, copy: Value) -> None:
        """A task's positions, as [tile of positions][channel][position of the tile]."""
        b = self.b
        with b.loop(0, self.channels, name="channel") as channel:
            source = self._plane(image, channel)
            row = b.at(copy, channel * self.size)
            known: dict[object, Value] = {}
            self.prologue.prepare(Place(source, channel, False, self.lanes), known)
            if self.whole:
                with b.loop(first, b.smaller(last, self.whole), name="part") as part:
                    to = b.at(row, (part - first) * (self.channels * self.size))
                    self._vectors(source + part * self.size, channel, to, self.knobs.vectors, known)
            if self.rest:
                with b.when(b.compare("sgt", b.const(last, "i64"), self.whole)):
                    to = b.at(row, (self.whole - first) * (self.channels * self.size))
                    self._vectors(source + self._start(), channel, to, self.rest, known)

    def _vectors(
        self, source: Index, channel: Index, to: Value, vectors: int, known: dict[object, Value]
    ) -> None:
        b, dtype = self.b, self.kernel.src.dtype
        for j in range(vectors):
            count = min(self.lanes, self.positions - j * self.lanes)
            place = Place(source + j * self.lanes, channel, False, count)
            where = b.at(self.src, place.element, storage.element_type(dtype))
            x = storage.read(b, dtype, where, self.lanes, count=count)
            b.store(
                self.prologue.apply(x, place, known),
                b.at(to, j * self.lanes),
                align=self.frame.target.vector_bytes,
            )

    # ---- tiles

    def _tiles(self, image: Value, tile: Value, first: Value, last: Index, copy: Value, ahead: Index) -> None:
        """One tile of features over all of the task's positions.

        With each, one line of every fourth channel is fetched from `ahead` on: after a few, all have been.
        """
        b, rows = self.b, self.knobs.rows
        weight = b.at(self.weight, tile * (self.channels * rows))
        feature: Index = tile * rows
        if self.features % rows:
            feature = b.smaller(feature, self.features - rows)
        self._hoist(feature)
        line = ahead + self._plane(0, tile % UNROLL) + tile // UNROLL % self.knobs.vectors * self.lanes
        if self.whole:
            with b.loop(first, b.smaller(last, self.whole), name="part") as part:
                at = b.at(copy, (part - first) * (self.channels * self.size))
                fetched = line + (part - first) * self.size
                self._tile(image, feature, part * self.size, self.knobs.vectors, weight, at, fetched)
        if self.rest:
            with b.when(b.compare("sgt", b.const(last, "i64"), self.whole)):
                at = b.at(copy, (self.whole - first) * (self.channels * self.size))
                self._tile(image, feature, self._start(), self.rest, weight, at)

    def _hoist(self, feature: Index) -> None:
        """What depends on the feature alone, for the tile's features side by side."""
        rows = self.knobs.rows
        for start in range(0, rows, self.lanes) if self.rooms else ():
            known: dict[object, Value] = {}
            place = Place(0, feature + start, True, min(self.lanes, rows - start))
            for node, room in self.rooms.items():
                self.b.store(self.tail.evaluate(node, place, known), self.b.at(room, start))

    def _tile(
        self,
        image: Value,
        feature: Index,
        position: Index,
        vectors: int,
        weight: Value,
        at: Value,
        fetched: Index | None = None,
    ) -> None:
        """`rows` features x `vectors` vectors of positions: products, then the stages, then stores."""
        b, rows = self.b, self.knobs.rows
        sums = [[b.variable(b.vector, b.number(0.0)) for _ in range(vectors)] for _ in range(rows)]

        def steps(k: Index, count: int) -> None:
            values = [[place.get() for place in line] for line in sums]
            for step in range(count):
                where = b.at(at, (k + step) * self.size)
                line = [
                    b.load(b.at(where, j * self.lanes), align=self.frame.target.vector_bytes)
                    for j in range(vectors)
                ]
                for r in range(rows):
                    w = b.broadcast(weight, (k + step) * rows + r)
                    values[r] = [b.fma(w, x, value) for x, value in zip(line, values[r], strict=True)]
            for places, ends in zip(sums, values, strict=True):
                for place, end in zip(places, ends, strict=True):
                    place.set(end)

        even = self.channels - self.channels % UNROLL
        if even:
            with b.loop(0, even, UNROLL, name="k") as k:
                if fetched is not None:
                    where = fetched + self._plane(0, k)
                    b.prefetch(b.at(self.src, where, storage.element_type(self.kernel.src.dtype)))
                steps(k, UNROLL)
        if even < self.channels:
            steps(even, self.channels - even)
        for r, line in enumerate(sums):
            self._store(image, feature + r, r, position, [place.get() for place in line])

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

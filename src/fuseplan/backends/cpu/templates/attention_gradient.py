"""The gradients of attention on a CPU: scores are computed again block by block, in the caches alone.

As for attention, the lanes of a vector are rows of a tile: queries for the gradient of src, keys for those of
key and value, which go through the queries of all heads that read them, one head after another. Each task
has rows of its own, so every sum has one order.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

from fuseplan.backends.attending import SIDES
from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import batches, pieces
from fuseplan.backends.cpu.math_functions import exp_below
from fuseplan.backends.cpu.model import itemsize
from fuseplan.backends.cpu.templates.attention import Attention
from fuseplan.backends.cpu.templates.attention_tiles import Rows, Task
from fuseplan.backends.cpu.templates.attention_writer import AttentionWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import unit_roundoff
from fuseplan.language.attend import AttendGradient
from fuseplan.scalar import fold


class AttentionGradient(Attention):
    """Products with the slopes of scores, with the scores of a block in the first cache.

    reads:  src, grad and the sums once; key and value once for each block of queries; or the other way round
    writes: dst once, and the gradient of value
    chosen: for every plan with a gradient of attention

    The knobs are those of `Attention`, with keys in the place of queries for the gradients of key and value.
    """

    name: ClassVar[str] = "attention_gradient"
    opens: ClassVar[bool] = False
    error_scale: ClassVar[str] = "the largest sum of its terms, for scores of size 1"
    centre: ClassVar[type] = AttendGradient

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding for each product of a score, and for each term of a sum."""
        made = kernel.attention
        terms = max(made.keys, made.queries * made.group)
        return (made.size + made.features + terms + 16) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return GradientWriter(self, kernel, target).source()


class GradientWriter(AttentionWriter):
    """Writes one kernel: scores and slopes of a block and a tile, then the sums of the tile's rows."""

    def source(self) -> Source:
        """One phase; the sums of a tile's rows stay in a thread's own memory."""
        b, through = self.b, self.heads.through
        with self.frame.tasks(self.heads.groups * self.blocks) as number:
            task = self.task(number)
            self.begin(task)
            with (
                b.loop(0, through, name="member") as member,
                b.loop(task.low, task.high, self.knobs.keys, name="block") as first,
            ):
                self._block(task, task.key_head * through + member, first)
            self._end(task)
        return self.frame.source(per_thread=self.size * itemsize(self.kernel))

    def _block(self, task: Task, head: Index, first: Value) -> None:
        """A block of the rows of a head goes through all tiles."""
        b, (own, others) = self.b, SIDES[self.by]
        count = b.smaller(task.high - first, self.knobs.keys)
        one, other = (self.rows(role, task, head, first, count) for role in others)
        with b.loop(0, self.knobs.tiles, name="tile") as tile:
            self.multiply("scores", own[0], tile, count, *one)
            self.multiply("slopes", own[1], tile, count, *other)
            self._weigh(task, tile * self.width, head, first, count)
            self.add("first_sums", "slopes", tile, count, *one)
            if self.by == "key":
                self.add("second_sums", "scores", tile, count, *other)

    def parts(self) -> dict[str, int]:
        """The tile's rows, turned; scores and slopes of a block; sums of the tile's rows."""
        first, second = (self.block * self.tensors[role].size for role in SIDES[self.by][0])
        scores = (self.knobs.keys + self.sums) * self.width
        sizes = dict(zip(SIDES[self.by][0], (first, second), strict=True))
        sizes |= {"scores": scores, "slopes": scores, "first_sums": first}
        if self.by == "key":
            return sizes | {"second_sums": second}
        return sizes | {"lse": self.block, "delta": self.block}

    def begin(self, task: Task) -> None:
        """The rows of all tiles, turned; of queries, their logarithms of sums, and delta."""
        b = self.b
        with b.loop(0, self.block, self.lanes, name="group") as group:
            self.turn(task, group, dict.fromkeys(SIDES[self.by][0], 1.0))
            for lane in range(self.lanes if self.by == "query" else 0):
                head, query = self.head_and_query(task, group + lane)
                for name in ("lse", "delta"):
                    value = b.load(self._number(name, task, head, query), b.element)
                    b.store(value, self.room(name, group + lane))
        self.clear(*(name for name in self.parts() if name.endswith("_sums")))

    def _number(self, name: str, task: Task, head: Index, query: Index) -> Value:
        """The address of a query's number."""
        n, h, s = self.beside[name].strides
        return self.b.at(self.pointer(name), task.batch * n + head * h + query * s)

    def _weigh(self, task: Task, row: Value, head: Index, first: Value, count: Index) -> None:
        """Scores become weights, and products with the gradient become the slopes of scores."""
        b, made, is_key = self.b, self.made, self.by == "key"
        vectors = range(0, self.width, self.lanes)
        limit = self._limit(task)

        def numbers(name: str, each: int, other: Index) -> Value:
            if is_key:
                return b.broadcast(self._number(name, task, head, other))
            return b.load(self.room(name, row + each))

        def slopes(at: Index, each: int, *, is_edge: bool) -> None:
            scores, slopes = (self.room(name, at * self.width + each) for name in ("scores", "slopes"))
            product, other = b.load(scores), first + at
            known = self.known(product, task, row + each, head, other)
            score = fold(made.score, known, self.table)
            score = self.changed(score, row + each, head, other, is_edge=is_edge)
            lse = numbers("lse", each, other)
            weight = exp_below(b, score - b.select(b.compare("oeq", lse, -inf), 0.0, lse))
            slope = weight * (b.load(slopes) - numbers("delta", each, other))
            slope = slope * fold(made.slope, known, self.table)
            if limit is not None:
                is_seen = b.compare("olt", b.load(self.room("place", row + each)), limit)
                weight, slope = b.select(is_seen, weight, 0.0), b.select(is_seen, slope, 0.0)
            b.store(slope, slopes)
            if is_key:
                b.store(weight, scores)

        def write(is_edge: bool) -> None:
            def keys(key: Index, some: int) -> None:
                for number in range(some):
                    for each in vectors:
                        slopes(key + number, each, is_edge=is_edge)

            batches(b, 0, count, 1, keys)

        self.by_edge(task, first, count, write)

    def _limit(self, task: Task) -> Value | None:
        """The place from which on rows are keys behind the image's length, which may hold anything."""
        if not self.made.is_padded or self.by != "key":
            return None
        return self.b.splat(self.real(self.length(task.batch) + self.heads.offset))

    def _end(self, task: Task) -> None:
        """The sums, turned back: dst through the epilogue, and the gradient of value."""
        b = self.b
        with b.loop(0, self.block, self.lanes, name="group") as group:
            with self.turned_back("first_sums", task, group) as row:
                self.write(task, group, row, self.made.size)
            for each in self.kernel.results:
                with self.turned_back("second_sums", task, group) as row:
                    pointer = self.frame.pointer("result", each.key)
                    self._copy(task, group, row, Rows(pointer, each.dtype, each.strides, each.shape[-1]))

    def _copy(self, task: Task, group: Value, row: Value, into: Rows) -> None:
        """A row of the second sums, rounded."""
        b, (n, h, s, c) = self.b, into.strides
        head, query = self.head_and_query(task, group + row)
        begin = task.batch * n + head * h + query * s

        def part(at: Index, count: int) -> None:
            value = b.load(self.room("rows", row * self.padded + at))
            storage.write_at(b, into.dtype, value, into.pointer, begin + at * c, count, c)

        pieces(b, into.size, self.lanes, part, name="feature")

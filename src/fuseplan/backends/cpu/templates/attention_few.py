"""Writes a kernel of attention of a few queries, as of one new token.

The lanes of a vector are elements of a key or of a value, and between the products scores of several keys, of
all queries of the task. With queries as lanes, most of them would be idle: of one query on a Zen 4 core, 12
heads of 1,777 keys of 64 elements took 877 us, and take 151.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from fuseplan.backends.attending import Heads
from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.ir import Index, Value, Variable
from fuseplan.backends.cpu.ir_text import lanes_of
from fuseplan.backends.cpu.lanes import lane
from fuseplan.backends.cpu.loops import batches, ceil_div
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.backends.cpu.templates.attention_tiles import AttentionKnobs, Task
from fuseplan.backends.cpu.templates.attention_writer import AttentionWriter
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import lanes
from fuseplan.language.attend import Attend

Runs = Sequence[tuple[int, int]]  # the first element of each vector of a row, and how many it has
LONGEST = 16  # vectors of a row, which the code of a key has one after another


def few_rows(kernel: Kernel, target: Target) -> int:
    """Scores of a key where a task has so few queries, a power of two; 0 where it has more."""
    width, made = lanes(kernel, target), kernel.attention
    if not isinstance(kernel.centre, Attend) or max(made.size, made.features) > LONGEST * width:
        return 0
    rows = 1 << (Heads.of(kernel, width).rows - 1).bit_length()
    return rows if 2 * rows <= width else 0


class FewWriter(AttentionWriter):
    """Writes one kernel: the only tile has one vector of queries, whose first `apart` lanes are used."""

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, target: Target, shares: int = 1) -> None:
        super().__init__(knobs, kernel, target, shares)
        self.apart = few_rows(kernel, target)

    def is_copied(self, role: str) -> bool:
        """Only where the elements of a row lie apart, or are turned: a vector is widened as it is read."""
        return self.is_moved(role)

    def parts(self) -> dict[str, int]:
        """As of many queries, but the results are rows."""
        return {**super().parts(), "results": self.lanes * self.padded}

    def multiply(
        self, into: str, role: str, tile: Value, count: Index, keys: Value, stride: int, has_more: bool
    ) -> None:
        """into[key][query] of a block: rows of the block times rows that were turned."""
        b, own, runs = self.b, self.kernel.compute_dtype, self._runs(self.tensors[role].size)
        queries = [
            [
                storage.read_at(b, own, self.room(role, row), at * self.width, some, self.width)
                for at, some in runs
            ]
            for row in range(self.apart)
        ]

        def products(key: Index, some: int) -> None:
            for number in range(some):
                line = self._line("key", keys, (key + number) * stride, runs)
                for row, query in enumerate(queries):
                    total = query[0] * line[0]
                    for one, other in zip(query[1:], line[1:], strict=True):
                        total = b.fma(one, other, total)
                    b.store(self._sum(total), self.room(into, (key + number) * self.apart + row))

        batches(b, 0, count, UNROLL, products)
        b.store(b.number(-inf), self.room(into, count * self.apart))

    def add(
        self,
        into: str,
        weights: str,
        tile: Value,
        count: Index,
        values: Value,
        stride: int,
        has_more: bool,
        factors: Sequence[Value] = (),
    ) -> None:
        """into[query][feature] = into * factor + the sum over keys of value * weight."""
        b, runs = self.b, self._runs(self.made.features)
        most = max(1, self.sums // self.apart)
        for start in range(0, len(runs), most):
            some = runs[start : start + most]
            sums = Sums(b, self.apart, len(some))

            def operands(key: Index, some: Runs = some) -> Operands:
                def weight(step: int, row: int) -> Value:
                    return b.broadcast(self.room(weights, (key + step) * self.apart + row))

                return lambda step: self._line("value", values, (key + step) * stride, some), weight

            add_products(sums, count, operands)
            for query, line in enumerate(sums.values()):
                factor = b.splat(lane(b, factors[0], query))
                for (at, _), value in zip(some, line, strict=True):
                    place = self.room(into, query * self.padded + at)
                    b.store(b.fma(b.load(place), factor, value), place)

    def results(self, group: Value, factor: Value) -> Iterator[tuple[Value, Value]]:
        for row in range(self.apart):
            by = self.b.splat(lane(self.b, factor, row))
            with self.b.loop(0, self.padded, self.lanes, name="element") as element:
                yield by, self.room("results", element + row * self.padded)

    def lines(self, count: Index) -> Index:
        """Vectors of scores; the lanes behind the last key are -inf."""
        found: Index = ceil_div(count * self.apart, self.lanes)
        return found

    def _adjusted(
        self, task: Task, row: Value, first: Value, count: Index, larger: Sequence[Variable], *, is_edge: bool
    ) -> None:
        b, (top,) = self.b, larger
        if self.changes(is_edge=is_edge):
            super()._adjusted(task, row, first, count, [b.variable(b.vector, -inf)], is_edge=is_edge)

        def maxima(line: Index, some: int) -> None:
            for number in range(some):
                self.rise(top, b.load(self.room("scores", (line + number) * self.lanes)))

        batches(b, 0, self.lines(count), UNROLL, maxima)
        for other in self._turned_lanes(top.get):
            self.rise(top, other)

    def _end(self, task: Task) -> None:
        b, place = self.b, self.room("total")
        total = b.variable(b.vector, b.load(place))
        for other in self._turned_lanes(total.get):
            total.set(total.get() + other)
        b.store(total.get(), place)
        super()._end(task)

    @contextmanager
    def turned_back(
        self, name: str, task: Task, group: Value, divisor: Value | None = None
    ) -> Iterator[Value]:
        b = self.b
        b.store(b.number(1.0) if divisor is None else divisor, self.room("total"))
        with b.loop(0, self.heads.rows, name="row") as row:
            by = b.broadcast(self.room("total", row))
            for first in range(0, self.padded, self.lanes):
                at = row * self.padded + first
                b.store(b.load(self.room(name, at)) / by, self.room("rows", at))
            yield row

    def _turned_lanes(self, value: Callable[[], Value]) -> Iterator[Value]:
        """What to join, one after another, until all lanes of a query hold the whole of them."""
        apart = self.apart
        while apart < self.lanes:
            found = value()
            yield self.b.shuffle(found, found, [number ^ apart for number in range(self.lanes)])
            apart *= 2

    def _sum(self, x: Value) -> Value:
        """Of all lanes, by halves."""
        b = self.b
        while (count := lanes_of(x.type)) > 2:
            x = b.shuffle(x, x, range(count // 2)) + b.shuffle(x, x, range(count // 2, count))
        return lane(b, x, 0) + lane(b, x, 1)

    def _line(self, role: str, rows: Value, begin: Index, runs: Runs) -> list[Value]:
        """A row of a block, from an element on."""
        dtype = self.kernel.compute_dtype if self.is_copied(role) else self.tensors[role].dtype
        return [storage.read_at(self.b, dtype, rows, begin + at, size) for at, size in runs]

    def _runs(self, size: int) -> Runs:
        return [(at, min(self.lanes, size - at)) for at in range(0, size, self.lanes)]

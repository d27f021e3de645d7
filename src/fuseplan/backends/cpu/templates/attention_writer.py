"""Writes a kernel of attention.

The lanes of a vector are queries. A task has some tiles of queries of one head, or of the heads that read the
same keys. The tiles are turned, so that a vector has one element of each query. A block of keys goes through
all tiles before the next: scores into the first cache, their maximum, their exponentials, and the product
with the values, whose sums are kept turned as well and are corrected when a maximum grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from fuseplan.backends.cpu import dialect, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Index, Value, Variable
from fuseplan.backends.cpu.ir_text import I1, I64
from fuseplan.backends.cpu.lanes import with_lane
from fuseplan.backends.cpu.loops import batches, cut, larger, pieces
from fuseplan.backends.cpu.math_functions import exp_below
from fuseplan.backends.cpu.model import itemsize
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.backends.cpu.templates.attention_tiles import LINE, AttentionKnobs, AttentionTiles, Task
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.layouts import image_strides
from fuseplan.scalar import fold


class AttentionWriter(AttentionTiles):
    """Writes one kernel."""

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, target: Target, shares: int = 1) -> None:
        super().__init__(knobs, kernel, target)
        self.table = {**dialect.table(self.b), "number": lambda place: place}  # a vector of elements already
        self.epilogue = Elementwise(self.frame, "epilogue")
        self.apart = self.width  # elements from the scores of a key to those of the next
        self.shares = shares  # of a task's keys

    # ---- the kernel

    def source(self) -> Source:
        """The blocks with the most keys come first; shares of keys are joined in a phase of their own."""
        count, shares, kept = self.heads.groups * self.blocks, self.shares, 0
        with self.frame.tasks(count * shares) as number:
            if shares == 1:
                task = self.task(number)
                self._through(task)
                self._end(task)
            else:
                kept = count * shares * self._keep_apart(number)
                self._through(self._share(self.task(number // shares), number % shares))
        if shares > 1:
            self.frame.wait(count * shares)
            with self.frame.tasks(count) as number:
                self._join(self._keep_apart(number * shares))
                self._end(self.task(number))
        sizes = (each * itemsize(self.kernel) for each in (kept, self.size))
        return self.frame.source(**dict(zip(("workspace", "per_thread"), sizes, strict=True)))

    def _through(self, task: Task) -> None:
        """All keys of a task: the sums of its rows."""
        b, knobs = self.b, self.knobs
        self.begin(task)
        with b.loop(task.low, task.high, knobs.keys, name="block") as first:
            count = b.smaller(task.high - first, knobs.keys)
            keys, values = (self.rows(role, task, task.key_head, first, count) for role in ("key", "value"))
            with b.loop(0, knobs.tiles, name="tile") as tile:
                self.multiply("scores", "query", tile, count, *keys)
                factors = self._attend(task, tile, first, count)
                self.add("results", "scores", tile, count, *values, factors)

    # ---- shares of the keys

    def _share(self, task: Task, number: Value) -> Task:
        """The task with some of its keys."""
        count = larger(self.b, task.high - task.low, 0)
        begin, end = cut(number, self.shares, count)
        return replace(task, low=task.low + begin, high=task.low + end)

    def _keep_apart(self, number: Value) -> int:
        """Lets the sums of a share lie where other threads find them; elements from a share to the next."""
        sizes = {name: -(-self.parts()[name] // LINE) * LINE for name in ("results", "top", "total")}
        total = sum(sizes.values())
        where = self.b.at(self.frame.pointer("workspace"), self.frame.threads * self.size + number * total)
        for name, size in sizes.items():
            self.rooms[name] = where
            where = self.b.at(where, size)
        return total

    def _join(self, apart: int) -> None:
        """The sums of all shares in the place of the first one's."""
        b, lanes = self.b, self.lanes
        with b.loop(0, self.block, lanes, name="group") as group:
            tops, totals = self.room("top", group), self.room("total", group)
            top, total = b.variable(b.vector, b.load(tops)), b.variable(b.vector, b.number(0.0))
            with b.loop(1, self.shares, name="share") as share:
                self.rise(top, b.load(b.at(tops, share * apart)))
            base = b.select(b.compare("oeq", top.get(), -inf), 0.0, top.get())
            with b.loop(0, self.shares, name="share") as share:
                factor = exp_below(b, b.load(b.at(tops, share * apart)) - base)
                total.set(b.fma(b.load(b.at(totals, share * apart)), factor, total.get()))
                is_first = b.compare("eq", share, 0)
                for by, place in self.results(group, factor):
                    before = b.select(is_first, b.number(0.0), b.load(place))
                    b.store(b.fma(b.load(b.at(place, share * apart)), by, before), place)
            b.store(top.get(), tops)
            b.store(total.get(), totals)

    def results(self, group: Value, factor: Value) -> Iterator[tuple[Value, Value]]:
        """The sums of some queries: what each vector is multiplied by, where these are so, and its place."""
        with self.b.loop(0, self.made.features, name="feature") as feature:
            yield factor, self.turned("results", self.made.features, group, feature)

    # ---- products

    def multiply(
        self, into: str, role: str, tile: Value, count: Index, keys: Value, stride: int, has_more: bool
    ) -> None:
        """into[key][query] of a block and a tile: rows of the block times turned rows."""
        b, rows = self.b, self.sums
        queries = self.room(role, tile * (self.tensors[role].size * self.width))

        def products(key: Index, at: Sequence[Index]) -> None:
            self._products(into, role, key, queries, [b.at(keys, row * stride) for row in at])

        whole = count // rows * rows
        with b.loop(0, whole, rows, name="key") as key:
            products(key, [key + row for row in range(rows)])
        with b.when(b.compare("slt", b.const(whole, I64), count)):
            last = count - 1
            products(
                whole, [whole + row if has_more else b.smaller(whole + row, last) for row in range(rows)]
            )

    def _products(self, into: str, role: str, key: Index, queries: Value, rows: Sequence[Value]) -> None:
        b, vectors = self.b, self.knobs.vectors
        sums = Sums(b, len(rows), vectors)

        def operands(first: Index) -> Operands:
            def vector(step: int) -> list[Value]:
                return [self._at(queries, (first + step) * self.width, each) for each in range(vectors)]

            return vector, lambda step, row: b.broadcast(b.at(rows[row], first + step))

        add_products(sums, self.tensors[role].size, operands)
        for row, values in enumerate(sums.values()):
            for each, value in enumerate(values):
                b.store(value, self.room(into, (key + row) * self.width + each * self.lanes))

    def _at(self, begin: Value, index: Index, vector: int) -> Value:
        return self.b.load(self.b.at(begin, index + vector * self.lanes))

    def add(
        self,
        into: str,
        weights: str,
        tile: Value,
        count: Index,
        values: Value,
        stride: int,
        _: bool,
        factors: Sequence[Value] = (),
    ) -> None:
        """into[feature][query] = into * factor + the sum over keys of value * weight."""
        b, vectors = self.b, self.knobs.vectors
        size = self.parts()[into] // self.block

        def features(first: Index, rows: int) -> None:
            sums = Sums(b, rows, vectors)
            places = [
                [
                    self.room(into, (tile * size + first + row) * self.width + each * self.lanes)
                    for each in range(vectors)
                ]
                for row in range(rows)
            ]

            def operands(key: Index) -> Operands:
                def vector(step: int) -> list[Value]:
                    at = (key + step) * self.width
                    return [self._at(self.rooms[weights], at, each) for each in range(vectors)]

                return vector, lambda step, row: b.broadcast(
                    b.at(values, (key + step) * stride + first + row)
                )

            add_products(sums, count, operands)
            for line, made in zip(places, sums.values(), strict=True):
                for each, (at, value) in enumerate(zip(line, made, strict=True)):
                    before = b.load(at)
                    b.store(b.fma(before, factors[each], value) if factors else before + value, at)

        pieces(b, size, self.sums, features, name="feature")

    # ---- softmax

    def _attend(self, task: Task, tile: Value, first: Value, count: Index) -> list[Value]:
        """The block's scores join the tile's maxima and sums; the factors of the results so far."""
        b, vectors, row = self.b, range(self.knobs.vectors), tile * self.width
        tops = [self._at(self.rooms["top"], row, each) for each in vectors]
        larger = [b.variable(b.vector, top) for top in tops]
        self._maxima(task, row, first, count, larger)
        found = [each.get() for each in larger]
        base = [b.select(b.compare("oeq", top, -inf), 0.0, top) for top in found]
        factors = [exp_below(b, top - low) for top, low in zip(tops, base, strict=True)]
        totals = [b.variable(b.vector, b.number(0.0)) for _ in vectors]

        def exponentials(key: Index, keys: int) -> None:
            for number in range(keys):
                for each in vectors:
                    place = self.room("scores", (key + number) * self.width + each * self.lanes)
                    weight = exp_below(b, b.load(place) - base[each])
                    b.store(weight, place)
                    totals[each].set(totals[each].get() + weight)

        batches(b, 0, self.lines(count), UNROLL, exponentials)
        for each in vectors:
            b.store(found[each], self.room("top", row + each * self.lanes))
            total = b.fma(self._at(self.rooms["total"], row, each), factors[each], totals[each].get())
            b.store(total, self.room("total", row + each * self.lanes))
        return factors

    def _maxima(self, task: Task, row: Value, first: Value, count: Index, larger: Sequence[Variable]) -> None:
        """The largest score of each query, once the scores are as they are summed; hidden ones are -inf."""

        def write(is_edge: bool) -> None:
            self._adjusted(task, row, first, count, larger, is_edge=is_edge)

        self.by_edge(task, first, count, write)

    def by_edge(self, task: Task, first: Value, count: Index, write: Callable[[bool], None]) -> None:
        """Code for blocks that every row of a task meets as a whole, and code for those at an edge."""
        b, heads = self.b, self.heads
        if not (heads.front or heads.back):
            write(False)
            return
        inside = []
        if heads.front:
            inside.append(b.compare("slt", first + count - 1, b.const(task.first + heads.front, I64)))
        if heads.back:
            inside.append(b.compare("sgt", first, b.const(task.last - heads.back, I64)))
        is_inside = b.both(inside)
        with b.when(is_inside):
            write(False)
        with b.when(b.op(I1, f"xor i1 {is_inside.name}, true")):
            write(True)

    def _adjusted(
        self, task: Task, row: Value, first: Value, count: Index, larger: Sequence[Variable], *, is_edge: bool
    ) -> None:
        b, made = self.b, self.made
        changes = self.changes(is_edge=is_edge)

        def keys(key: Index, some: int) -> None:
            for number in range(some):
                at = key + number
                for each, variable in enumerate(larger):
                    place = self.room("scores", at * self.apart + each * self.lanes)
                    score = b.load(place)
                    if changes:
                        lanes, other = row + each * self.lanes, first + at
                        known = {} if made.is_scaled else self.known(score, task, lanes, 0, other)
                        score = fold(made.score, known, self.table) if known else score
                        score = self.changed(score, lanes, 0, other, is_edge=is_edge)
                        b.store_first(score, place, min(self.apart, self.lanes))
                    self.rise(variable, score)

        batches(b, 0, count, 1 if changes else UNROLL, keys)

    def changes(self, *, is_edge: bool) -> bool:
        """Whether a score is more than a scaled product."""
        made = self.made
        return is_edge or not made.is_scaled or bool(made.bias_axes or made.mask_axes)

    def lines(self, count: Index) -> Index:
        """Of the scores of so many keys: each has the vectors of a tile."""
        return count

    def rise(self, top: Variable, score: Value) -> None:
        """The larger of two vectors becomes the maximum."""
        b, before = self.b, top.get()
        top.set(b.select(b.compare("ogt", score, before), score, before))

    def known(self, product: Value, task: Task, row: Value, head: Index, other: Value) -> dict[str, Value]:
        """The leaves of the formula of a vector of scores, by name."""
        b, is_key = self.b, self.by == "key"
        own, across = ("t", "s") if is_key else ("s", "t")

        def place(axis: str) -> Value:
            if axis == own:
                return b.load(self.room("place", row)) - float(self.heads.offset)
            if axis == "h" and not is_key:
                return b.load(self.room("head", row))
            return b.splat(self.real({"b": task.batch, "h": head, across: other}[axis]))

        return {"x": product, **{f"index({axis})": place(axis) for axis in self.made.places}}

    def changed(self, score: Value, row: Value, head: Index, key: Value, *, is_edge: bool) -> Value:
        """A vector of scores of one key, with the bias, and -inf where the key is hidden."""
        b, made, heads = self.b, self.made, self.heads
        if made.bias_axes:
            score = score + self._beside("bias", made.bias_axes, row, head, key)
        if made.mask_axes:
            seen = self._beside("mask", made.mask_axes, row, head, key)
            score = b.select(b.compare("une", seen, 0.0), score, -inf)
        if not is_edge:
            return score
        apart = b.splat(self.real(key)) - b.load(self.room("place", row))
        if heads.front:
            score = b.select(b.compare("olt", apart, float(heads.front)), score, -inf)
        if heads.back:
            score = b.select(b.compare("ogt", apart, -float(heads.back)), score, -inf)
        return score

    def _beside(self, role: str, axes: str, row: Value, head: Index, key: Value) -> Value:
        """The elements of bias or mask for the queries from `row` on and one key; or the other way round."""
        b, operand, pointer = self.b, self.beside[role], self.pointer(role)
        kind, steps = storage.element_type(operand.dtype), dict(zip(axes, operand.strides, strict=True))
        through = key * steps["t"]
        if self.by == "key":
            through = key * steps.get("s", 0) + head * steps.get("h", 0)

        def element(lane: int) -> Value:
            begin = b.load(b.at(self.rooms[f"{role}_rows"], row + lane, I64), I64)
            return storage.read_one(b, operand.dtype, b.at(pointer, begin + through, kind))

        if self.by != "key" and "s" not in axes and (self.heads.members == 1 or "h" not in axes):
            return b.splat(element(0))
        made = Value(b, b.vector, "zeroinitializer")
        for lane in range(min(self.lanes, self.heads.rows)):
            made = with_lane(b, made, lane, element(lane))
        return made

    # ---- the end

    def _end(self, task: Task) -> None:
        """Results over sums, turned back, through the epilogue; and the logarithms of the sums."""
        b, made, lanes = self.b, self.made, self.lanes
        results = {each.key: self.frame.pointer("result", each.key) for each in self.kernel.results}
        with b.loop(0, self.block, lanes, name="group") as group:
            total = b.load(self.room("total", group))
            is_none = b.compare("oeq", total, 0.0)
            divisor = total if self.made.nan_unseen else b.select(is_none, 1.0, total)
            if results:
                lse = b.load(self.room("top", group)) + self.table["log"](total)
                b.store(lse, self.room("lse", group))
            with self.turned_back("results", task, group, divisor) as row:
                self.write(task, group, row, made.features)
                for pointer in results.values():
                    at = (task.batch * made.heads + task.head) * made.queries + task.row + group + row
                    b.store(b.load(self.room("lse", group + row), b.element), b.at(pointer, at))

    @contextmanager
    def turned_back(
        self, name: str, task: Task, group: Value, divisor: Value | None = None
    ) -> Iterator[Value]:
        """As many sums of a tile as a vector has lanes, as rows; the block runs for each row there is."""
        b, lanes = self.b, self.lanes
        size = self.parts()[name] // self.block
        for start in range(0, size, lanes):
            count = min(lanes, size - start)
            columns = [b.load(self.turned(name, size, group, start + at)) for at in range(count)]
            columns = columns if divisor is None else [each / divisor for each in columns]
            columns += [b.number(0.0)] * (lanes - count)
            for lane, row in enumerate(transposed(b, columns)):
                b.store(row, self.room("rows", lane * self.padded + start))
        left = b.const(self.heads.rows - (task.row + group), I64)
        with b.loop(0, b.smaller(left, lanes), name="row") as row:
            yield row

    def write(self, task: Task, group: Value, row: Value, size: int) -> None:
        """A row of dst, through the epilogue."""
        b, dst = self.b, self.kernel.dst
        head, query = self.head_and_query(task, group + row)
        n, c, h, s = dst.element_strides
        inner = image_strides(dst.shape, dst.element_strides)
        begin = task.batch * n + head * h + query * s
        inside = head * inner[2] + query * inner[3]
        known: dict[object, Value] = {}

        def part(at: Index, count: int) -> None:
            value = b.load(self.room("rows", row * self.padded + at))
            place = Place(begin + at * c, at, True, count, inside + at * inner[1], c)
            finish(self.frame, self.epilogue, value, place, dict(known))

        pieces(b, size, self.lanes, part, name="feature")

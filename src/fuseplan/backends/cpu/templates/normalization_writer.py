"""The phases of a kernel with reductions, and what becomes of partial sums.

Sums are made in parts, each of tiles: a tile in the compute type, tiles and parts in float64. A tile's
moments are its sum and that of squared deviations from its mean, so that no large mean is ever squared; two
such pairs become one by the formula of Chan, Golub and LeVeque, "Algorithms for computing the sample
variance", The American Statistician 37 (1983). Parts depend on the kernel alone, and are combined in order.
Where sums are as wide as what they sum, moments are of the distances from a sum's first element, its pivot:
the rounding of a large mean would cost the variance half of its digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from fuseplan.backends.cpu.elementwise import Formulas, Place, Seen
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import vector
from fuseplan.backends.cpu.lanes import first_lanes, lane, lane_sum, with_lane
from fuseplan.backends.cpu.loops import ceil_div, share, within
from fuseplan.backends.cpu.templates.normalization_shape import NormalizationKnobs, Shape, Unit, in_lines
from fuseplan.backends.cpu.walk import offsets
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import CHANNEL, Kernel, KernelOperand, Output, Stage
from fuseplan.kernels.target import Target
from fuseplan.language.reduction import Moments, Sums
from fuseplan.scalar import Scalar, leaf

F64 = "double"
_SUMS_A_TASK = 8  # vectors, or sums of several columns, that one task combines


class Writer(ABC):
    """Writes one kernel; how lanes lie is the subclass's."""

    def __init__(self, knobs: NormalizationKnobs, kernel: Kernel, target: Target, shape: Shape) -> None:
        self.knobs, self.kernel, self.shape = knobs, kernel, shape
        self.frame = Frame(knobs, kernel, target, workspace=True)
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.is_open = kernel.open_axis is not None
        self.cells: Index = self.frame.kernel.dst.channels if self.is_open else shape.cells
        self.src, self.dst = self.frame.pointer("src"), self.frame.pointer("dst")
        self.wide = vector(self.lanes, F64)
        self.quantities = max(len(each.names) for each in kernel.statistics)
        self.pivots = {
            number: f"{each.names[0]}.pivot"
            for number, each in enumerate(kernel.statistics)
            if isinstance(each, Moments) and self.b.element == F64
        }
        self.names = [*(name for each in kernel.statistics for name in each.names), *self.pivots.values()]
        self.along = shape.columns and shape.fold == 1
        self.kept = tuple(axis for axis in range(kernel.src.rank) if axis not in kernel.reduction.over)
        self._lay_out()

    # ---- the workspace

    def _lay_out(self) -> None:
        """Statistics; partial sums, which are a thread's own where a task makes whole ones; rooms."""
        item, shape, b = 8 if self.b.element == F64 else 4, self.shape, self.b
        base, whole = self.frame.pointer("workspace"), self.knobs.whole
        statistics = in_lines((self.cells + self.lanes) * item)
        self.statistics = {name: b.at(base, i * statistics, "i8") for i, name in enumerate(self.names)}
        columns = 1 if self.is_open else self.knobs.block
        self.pitch = in_lines((columns if whole else shape.width) * 8) // 8
        partial, sums = shape.parts * self.quantities * self.pitch * 8, len(self.names) * statistics
        room, rooms = in_lines((self.knobs.block + self.lanes) * item), self.rooms_wanted()
        self.shared = sums + (0 if whole else partial)
        self.own = rooms * room + (partial if whole else 0)
        mine = b.at(base, self.frame.thread * self.own + self.shared, "i8")
        self.rooms = [b.at(mine, i * room, "i8") for i in range(rooms)]
        self.partials = b.at(mine, rooms * room, "i8") if whole else b.at(base, sums, "i8")

    def partial(self, unit: Unit, part: Index, quantity: int, at: Index = 0) -> Value:
        """Where a part's quantity of column `at` of a unit lies."""
        row = (part * self.quantities + quantity) * self.pitch
        return self.b.at(self.partials, row + (at if self.knobs.whole else unit.first + at), F64)

    # ---- the subclass's

    @abstractmethod
    def rooms_wanted(self) -> int:
        """Arrays of a block's length that a thread needs."""

    @abstractmethod
    def firsts(self, number: int, unit: Unit) -> Callable[[Index, int], Value]:
        """What gives the first of the elements that one reduction sums: of sums from `at` on, so many."""

    @abstractmethod
    def reduce(self, number: int, unit: Unit, part: Index) -> None:
        """The partial sums of one reduction."""

    @abstractmethod
    def write(self, unit: Unit, part: Index) -> None:
        """The elements of dst."""

    # ---- phases

    def source(self) -> Source:
        """The whole kernel: one phase, or two for each reduction and one for dst."""
        if self.knobs.whole:
            self._whole()
        else:
            self._split()
        if isinstance(self.shared, int):
            return self.frame.source(workspace=self.shared, per_thread=self.own)
        item, names = 8 if self.b.element == F64 else 4, len(self.names)
        most = 2 * names * in_lines(self.lanes * item)  # behind the last cells: lanes, and the end of a line
        cells = names * item * self.kernel.open_each
        return self.frame.source(workspace=most, per_thread=self.own, per_extent=cells)

    def _whole(self) -> None:
        """A task goes through its data as often as it must: once from memory, if a cache holds it."""
        b, shape = self.b, self.shape
        least, threads = self.knobs.block, self.frame.threads
        block = share(b, self.cells, least, threads) if self.is_open else least
        with self.frame.tasks(self._blocks(block)) as task, self._units(task, block) as unit:
            for number in range(self.kernel.passes):
                self._find_pivots(number, unit)
                with b.loop(0, shape.parts, name="part") as part:
                    self._visit(number, unit, self._turned(number, part, shape.parts))
                self._finish(number, unit)
            self._settle()

    def _split(self) -> None:
        """Tasks are parts of blocks, and combinations of a few sums."""
        block, few = self.knobs.block, _SUMS_A_TASK * (self.lanes if self.along else self.shape.fold)
        blocks, sums = self._blocks(block), self._blocks(few)
        tasks = blocks * self.shape.parts
        for number in range(self.kernel.passes):
            if number in self.pivots:
                with self.frame.tasks(blocks) as task, self._units(task, block) as unit:
                    self._find_pivots(number, unit)
                self.frame.wait(blocks)
            with self.frame.tasks(tasks) as taken:
                task = self._turned(number, taken, tasks)
                with self._units(task % blocks, block) as unit:
                    self._visit(number, unit, task // blocks)
                if number == len(self.kernel.statistics):
                    self._settle()
            if number == len(self.kernel.statistics):
                break
            self.frame.wait(tasks)
            with self.frame.tasks(sums) as task, self._units(task, few) as unit:
                self._finish(number, unit)
            self.frame.wait(sums)

    def _visit(self, number: int, unit: Unit, part: Index) -> None:
        """A part of a pass: of a reduction, or, after the last, of dst."""
        if number < len(self.kernel.statistics):
            self.reduce(number, unit, part)
        else:
            self.write(unit, part)

    def _finish(self, number: int, unit: Unit) -> None:
        """What becomes of the sums of a pass, and, after the last reduction, of all."""
        last = len(self.kernel.statistics) - 1
        if number <= last:
            self.combine(number, unit)
        if number == last:
            self.results(unit)

    @staticmethod
    def goes_backwards(number: int) -> bool:
        """Every other pass does, to meet what caches hold."""
        return number % 2 == 1

    def _turned(self, number: int, index: Value, count: int) -> Value:
        return (count - 1) - index if self.goes_backwards(number) else index

    def _settle(self) -> None:
        if self.knobs.stream:
            # Stores past the caches are seen before the task counts as finished.
            self.b.line("fence seq_cst")

    def _blocks(self, block: Index) -> Any:
        extent = self.shape.run.extent if self.shape.columns else self.cells
        return self.shape.segments * ceil_div(extent, block)

    @contextmanager
    def _units(self, index: Index, block: Index) -> Iterator[Unit]:
        """A block: at once where it is columns, channel by channel where lanes are a run."""
        b, shape = self.b, self.shape
        if shape.columns:
            blocks = ceil_div(shape.run.extent, block)
            low, high = within(b, index % blocks if blocks > 1 else 0, block, shape.run.extent)
            dst, src, image = offsets(shape.outer, index // blocks if shape.segments > 1 else 0)
            yield Unit(low, high, dst + low, dst, src, image)
            return
        low, high = within(b, index, block, self.cells)
        axis = shape.channel
        with b.loop(low, high, name="channel") as channel:
            yield Unit(
                channel, channel + 1, channel, *(channel * step for step in (axis.dst, axis.src, axis.image))
            )

    # ---- formulas

    def formulas(self, stages: tuple[Stage, ...], expressions: tuple[Scalar, ...], seen: Seen) -> Formulas:
        """Formulas over operands, statistics and parameters; `seen` says which axes each operand has."""
        kernel = self.kernel
        cells, dtype = (self.shape.cells,), kernel.compute_dtype
        made = [KernelOperand(name, self.kept, cells, dtype, "epilogue") for name in self.names]
        operands = [replace(each, axes=seen(each)) for each in (*kernel.operands, *made, *self._old_values())]
        pointers = {**self.frame.operand_pointers, **self.statistics}
        return Formulas(self.b, stages, expressions, operands, kernel.parameters, pointers, kernel.dst)

    def pass_formulas(self, number: int, seen: Seen) -> Formulas:
        """What a pass computes of each element: what a reduction sums, or, after the last, dst."""
        kernel = self.kernel
        if number == len(kernel.statistics):
            return self.formulas((*kernel.prologue, *kernel.epilogue), (), seen)
        expressions = kernel.statistics[number].expressions
        if number in self.pivots:
            expressions = tuple(each - leaf(self.pivots[number]) for each in expressions)
        return self.formulas(kernel.prologue, expressions, seen)

    def first_formulas(self, number: int, seen: Seen) -> Formulas:
        """What the pivot of a reduction is of an element."""
        return self.formulas(self.kernel.prologue, self.kernel.statistics[number].expressions, seen)

    def by_sum(self, operand: KernelOperand) -> tuple[int, ...]:
        """Seen by whoever has one sum at hand: an operand with the axes of sums is indexed as these are."""
        return CHANNEL if operand.axes == self.kept else operand.axes

    def _old_values(self) -> list[KernelOperand]:
        results = self.kernel.results
        return [KernelOperand(each.key, each.axes, each.shape, each.dtype, "epilogue") for each in results]

    # ---- pivots

    def _find_pivots(self, number: int, unit: Unit) -> None:
        """The first element of each sum, but zero for one that is not finite."""
        if number not in self.pivots:
            return
        b, first = self.b, self.firsts(number, unit)

        def keep(at: Index, count: int) -> None:
            value = first(at, count if self.along else 1)
            apart = value - value
            finite = b.select(b.compare("ord", apart, apart), value, 0.0)
            where = self._statistic(self.pivots[number], unit.first + at)
            b.store_first(finite, where, count if self.along else 1)

        self._each_sum(unit, keep)

    # ---- combination

    def combine(self, number: int, unit: Unit) -> None:
        """Statistics of partial sums, each written once."""
        self._each_sum(unit, lambda at, count: self._cell(number, unit, at, count))

    def _each_sum(self, unit: Unit, visit: Callable[[Index, int], None]) -> None:
        """Visits the sums of a unit: some at a time, or the columns of one at a time."""
        length, fold = unit.high - unit.low, self.shape.fold
        if self.along:
            self.each_vector(0, length, self.shape.run.extent, visit)
            return
        with self.b.loop(0, length // fold, name="sum") as cell:
            visit(cell * fold, fold)

    def _statistic(self, name: str, first: Index) -> Value:
        """Where a statistic of the sum of a column lies."""
        return self.b.at(self.statistics[name], first if self.along else first // self.shape.fold)

    def _cell(self, number: int, unit: Unit, at: Index, count: int) -> None:
        reduction = self.kernel.statistics[number]
        found = {Sums: self._summed, Moments: self._moments}[type(reduction)](number, unit, at, count)
        first = unit.first + at
        for name, value in zip(reduction.names, found, strict=True):
            narrow = value if self.b.element == F64 else self.b.convert("fptrunc", value, self.b.element)
            self.b.store_first(narrow, self._statistic(name, first), count if self.along else 1)

    def _loaded(self, unit: Unit, quantity: int) -> Callable[[Index, Index, int], Value]:
        return lambda part, at, count: self.b.load_first(
            self.partial(unit, part, quantity, at), count, self.wide
        )

    def _summed(self, number: int, unit: Unit, at: Index, count: int) -> list[Value]:
        quantities = range(len(self.kernel.statistics[number].names))
        return [self._total(at, count, self._loaded(unit, quantity)) for quantity in quantities]

    def _moments(self, number: int, unit: Unit, at: Index, count: int) -> list[Value]:
        """Mean and variance of all parts: of their sums, and of what each mean deviates from the whole's."""
        b, sums, squares = self.b, self._loaded(unit, 0), self._loaded(unit, 1)
        elements = self.kernel.reduced_count
        mean = self._total(at, count, sums) * (1 / elements)
        spread = mean if self.along else b.splat(mean)

        def deviation(part: Index, column: Index, lanes: int) -> Value:
            own = self._elements(part)
            apart = sums(part, column, lanes) / own - spread
            return squares(part, column, lanes) + apart * apart * own

        variance = self._total(at, count, deviation) * (1 / elements)
        if number not in self.pivots:
            return [mean, variance]
        where = self._statistic(self.pivots[number], unit.first + at)
        return [mean + b.load_first(where, count if self.along else 1, mean.type), variance]

    def _elements(self, part: Index) -> Value:
        """The elements of one column in a part; the last part may be shorter."""
        b, parts = self.b, self.shape.parts
        usual, last = (b.const(float(self.shape.elements(each)), F64) for each in (0, parts - 1))
        if parts == 1:
            return b.splat(usual)
        return b.splat(b.select(b.compare("eq", b.const(part, "i64"), parts - 1), last, usual))

    def _total(self, at: Index, count: int, term: Callable[[Index, Index, int], Value]) -> Value:
        """A sum over parts; with `fold`, over the columns as well."""
        b, lanes = self.b, self.lanes
        total = b.variable(self.wide, 0.0)
        with b.loop(0, self.shape.parts, name="part") as part:
            if self.along:
                total.set(total.get() + term(part, at, count))
            else:
                whole, rest = count // lanes * lanes, count % lanes
                with b.loop(0, whole, lanes, name="column") as column:
                    total.set(total.get() + term(part, at + column, lanes))
                if rest:
                    total.set(total.get() + first_lanes(b, term(part, at + whole, rest), rest))
        return total.get() if self.along else lane_sum(b, total.get())

    def each_vector(
        self, start: Index, stop: Index, extent: int, write: Callable[[Index, int], None]
    ) -> None:
        """Whole vectors of start..stop-1, and what is left where that is the end of a run of `extent`."""
        b, lanes, rest = self.b, self.lanes, extent % self.lanes
        length = stop - start
        whole = length // lanes * lanes
        with b.loop(start, start + whole, lanes, name="vector") as at:
            write(at, lanes)
        if rest and isinstance(length, int):
            write(start + whole, rest)
        elif rest:
            with b.when(b.compare("ne", b.const(whole, "i64"), length)):
                write(start + whole, rest)

    # ---- results

    def results(self, unit: Unit) -> None:
        """Results for the sums of a unit, each written once; updated ones read their old value first."""
        if not self.kernel.results:
            return
        made = self.formulas((), tuple(each.expression for each in self.kernel.results), self.by_sum)
        if self.along:
            self.each_vector(
                0,
                unit.high - unit.low,
                self.shape.run.extent,
                lambda at, count: self._results(made, unit.first + at, count),
            )
            return
        with self.b.loop(
            unit.first // self.shape.fold,
            (unit.first + (unit.high - unit.low)) // self.shape.fold,
            name="sum",
        ) as cell:
            self._results(made, cell, 1)

    def _results(self, made: Formulas, first: Index, count: int) -> None:
        place, known = Place(0, first, self.along, count), dict[object, Value]()
        listed = self.kernel.results
        for result in listed:
            if result.updated:
                made.keep(leaf(result.key), place, self._old(result, first, count), known)
        for result, value in zip(listed, made.values(None, place, known), strict=True):
            pointer = self.frame.pointer("result", result.key)
            if self._in_order(result):
                self.b.store_first(value, self.b.at(pointer, first), count)
                continue
            for number in range(count):
                where = self.b.at(pointer, self._logical(first + number))
                self.b.store(lane(self.b, value, number), where)

    def _old(self, result: Output, first: Index, count: int) -> Value:
        b, pointer = self.b, self.frame.pointer("result", result.key)
        if self._in_order(result):
            return b.load_first(b.at(pointer, first), count, b.vector)
        found = b.number(0.0)
        for number in range(count):
            one = b.load(b.at(pointer, self._logical(first + number)), b.element)
            found = with_lane(b, found, number, one)
        return found

    def _in_order(self, result: Output) -> bool:
        """Whether a result's elements lie as sums do."""
        return result.axes == CHANNEL or not self.kernel.dst.is_channels_last

    def _logical(self, place: Index) -> Index:
        """Where a place of a channels-last image is in logical order."""
        channels, spatial = self.kernel.dst.channels, prod(self.kernel.dst.spatial)
        return place % channels * spatial + place // channels

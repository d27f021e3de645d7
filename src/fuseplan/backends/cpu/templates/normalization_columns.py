"""Reductions whose lanes are columns: each lane has sums of its own, and rows are added to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.elementwise import Formulas, Place, Seen, finish
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import widened
from fuseplan.backends.cpu.loops import batches, by_length, larger, streamed, unaligned
from fuseplan.backends.cpu.templates.normalization_shape import TILE, Unit
from fuseplan.backends.cpu.templates.normalization_writer import Writer
from fuseplan.backends.cpu.walk import offsets
from fuseplan.kernels.kernel import CHANNEL, KernelOperand
from fuseplan.language.reduction import Moments, Sums
from fuseplan.scalar import Scalar

_UNROLL = 4

Row = tuple[Index, Index, Index]  # where a row begins in dst, src and an image
Known = dict[object, Value]


@dataclass(frozen=True)
class _Pass:
    """A pass's formulas, and what is computed once a column.

    Attributes:
        formulas: with operands as columns see them.
        by_channel: with operands per channel; only where a column is a place of all images.
        spread: parts that depend on the channel alone, which then have to be found by column.
        kept: other parts that are the same for all rows.
    """

    formulas: Formulas
    by_channel: Formulas
    spread: list[Scalar]
    kept: list[Scalar]

    @property
    def nodes(self) -> list[Scalar]:
        """All that is kept for each column."""
        return [*self.spread, *self.kept]


class ColumnWriter(Writer):
    """Writes one kernel whose lanes are columns."""

    def rooms_wanted(self) -> int:
        self.passes = [
            self._pass(partial(self.pass_formulas, number)) for number in range(self.kernel.passes)
        ]
        self.pivot_passes = {
            number: self._pass(partial(self.first_formulas, number)) for number in self.pivots
        }
        return max(len(each.nodes) for each in (*self.passes, *self.pivot_passes.values()))

    def _pass(self, formulas_of: Callable[[Seen], Formulas]) -> _Pass:
        images = self.shape.images
        formulas, by_channel = formulas_of(_by_column if images else _as_it_is), formulas_of(_as_it_is)
        spread = by_channel.invariants(channel=True) if images else []
        kept = [
            node for node in formulas.invariants(channel=True) if node.fn != "leaf" and node not in spread
        ]
        return _Pass(formulas, by_channel, spread, kept)

    # ---- what is the same for all rows

    def _prepared(self, made: _Pass, unit: Unit) -> Known:
        """Fills the rooms for a unit's columns; what is the same for all columns is returned."""
        uniform: Known = {}
        whole = Place(0, 0, False, self.lanes)
        for node in made.formulas.invariants(channel=False):
            made.formulas.evaluate(node, whole, uniform)
        if made.spread:
            self._spread(made, unit, uniform)
        if made.kept:
            self.each_vector(
                0,
                unit.high - unit.low,
                self.shape.run.extent,
                lambda at, count: self._keep(made, unit, uniform, at, count),
            )
        return uniform

    def _keep(self, made: _Pass, unit: Unit, uniform: Known, at: Index, count: int) -> None:
        place, known = Place(0, unit.first + at, True, count), dict(uniform)
        rooms = dict(zip(made.nodes, self.rooms, strict=False))
        for node in made.spread:
            made.formulas.keep(node, place, self.b.load(self.b.at(rooms[node], at)), known)
        for node in made.kept:
            self.b.store(made.formulas.evaluate(node, place, known), self.b.at(rooms[node], at))

    def _spread(self, made: _Pass, unit: Unit, uniform: Known) -> None:
        """Values of channels, each at all of the channel's columns: one after the other where these are."""
        b, dst = self.b, self.kernel.dst
        period = 1 if dst.element_strides[1] == 1 else prod(dst.spatial)
        end = unit.first + (unit.high - unit.low)
        last = end // period if period == 1 else (end + (period - 1)) // period
        with b.loop(unit.first // period, last, name="spread") as index:
            channel = index % dst.channels
            place, known = Place(0, channel, False, self.lanes), dict(uniform)
            begin = larger(self.b, index * period - unit.first, 0)
            stop = b.smaller(index * period + period - unit.first, end - unit.first)
            for node, room in zip(made.spread, self.rooms, strict=False):
                value = made.by_channel.evaluate(node, place, known)
                with b.loop(begin, stop, self.lanes, name="fill") as at:
                    b.store(value, b.at(room, at))

    # ---- one vector of one row

    def _known(self, made: _Pass, unit: Unit, uniform: Known, at: Index, count: int) -> tuple[Place, Known]:
        """What a vector of columns has in all rows, for its columns as the place tells them."""
        known, place = dict(uniform), Place(0, unit.first + at, True, count)
        for node, room in zip(made.nodes, self.rooms, strict=False):
            made.formulas.keep(node, place, self.b.load(self.b.at(room, at)), known)
        return place, known

    def _place(self, columns: Place, unit: Unit, row: Row, at: Index) -> Place:
        """The place of those columns in one row."""
        column = unit.low + at
        inside = row[2] + unit.image + column * self.shape.run.image if self.shape.run.image else None
        return replace(columns, element=row[0] + unit.dst + column, inside=inside)

    def _read(self, unit: Unit, row: Row, at: Index, count: int) -> Value:
        step = self.shape.run.src
        offset = row[1] + unit.src + (unit.low + at) * step
        return storage.read_at(self.b, self.kernel.src.dtype, self.src, offset, count, step)

    def _rows(self, part: Index) -> tuple[Index, Index]:
        """The first row of a part, and the one behind its last."""
        shape = self.shape
        if shape.parts == 1:
            return 0, shape.row_count
        low = part * shape.part
        return low, self.b.smaller(low + shape.part, shape.row_count)

    # ---- sums

    def firsts(self, number: int, unit: Unit) -> Callable[[Index, int], Value]:
        made = self.pivot_passes[number]
        uniform, row = self._prepared(made, unit), (0, 0, 0)

        def first(at: Index, count: int) -> Value:
            columns, known = self._known(made, unit, uniform, at, count)
            place = self._place(columns, unit, row, at)
            return made.formulas.values(self._read(unit, row, at, count), place, known)[0]

        return first

    def reduce(self, number: int, unit: Unit, part: Index) -> None:
        b, made, reduction = self.b, self.passes[number], self.kernel.statistics[number]
        uniform = self._prepared(made, unit)
        low, high = self._rows(part)
        width, extent = unit.high - unit.low, self.shape.run.extent

        def clear(at: Index, count: int) -> None:
            for quantity in range(len(reduction.names)):
                b.store_first(b.const(0.0, self.wide), self.partial(unit, part, quantity, at), count)

        def tile(row: Index, rows: int) -> None:
            begins = [offsets(self.shape.rows, row + i) for i in range(rows)]
            add = self._adding(number, unit, part, (row - low, rows))
            self.each_vector(0, width, extent, lambda at, count: add(at, count, begins, uniform))

        self.each_vector(0, width, extent, clear)
        batches(b, low, high, TILE, tile)

    def _adding(
        self, number: int, unit: Unit, part: Index, counts: tuple[Index, int]
    ) -> Callable[[Index, int, list[Row], Known], None]:
        """What adds one tile to the sums: `counts` are the rows before it, and its own."""
        b, made, reduction = self.b, self.passes[number], self.kernel.statistics[number]
        joins = {Sums: self._added, Moments: self._joined}
        before = b.op("double", f"sitofp i64 {b.const(counts[0], I64).name} to double")
        own = b.const(float(counts[1]), "double")
        inverse = b.select(b.compare("oeq", before, 0.0), 0.0, b.const(1.0, "double") / before)
        weights = b.splat(inverse), b.splat(before * own / (before + own))

        def add(at: Index, count: int, rows: list[Row], uniform: Known) -> None:
            columns, known = self._known(made, unit, uniform, at, count)
            found = [
                made.formulas.values(
                    self._read(unit, row, at, count), self._place(columns, unit, row, at), known
                )
                for row in rows
            ]
            where = [self.partial(unit, part, quantity, at) for quantity in range(len(reduction.names))]
            old = [b.load_first(pointer, count, self.wide) for pointer in where]
            terms = [list(values) for values in zip(*found, strict=True)]
            new = joins[type(reduction)](old, terms, weights)
            for pointer, value in zip(where, new, strict=True):
                b.store_first(value, pointer, count)

        return add

    def _added(self, old: list[Value], terms: list[list[Value]], _: tuple[Value, Value]) -> list[Value]:
        """Sums of the rows before and of a tile."""
        return [total + widened(self.b, _tree(values)) for total, values in zip(old, terms, strict=True)]

    def _joined(
        self, old: list[Value], terms: list[list[Value]], weights: tuple[Value, Value]
    ) -> list[Value]:
        """Sum, and squared deviations from the mean, of what was before and of a tile.

        A tile's are taken from its first row: of eight rows, that costs at most three bits of the squares.
        """
        b, (total, squares), (values,) = self.b, old, terms
        count = len(values)
        first = widened(b, values[0])
        apart, own = b.const(0.0, self.wide), b.const(0.0, self.wide)
        if count > 1:
            deviations = [value - values[0] for value in values[1:]]
            zero = values[0] - values[0]
            summed = b.select(b.compare("ord", zero, zero), _tree(deviations), 0.0)  # of infinities none
            apart = widened(b, summed)
            own = widened(b, _tree([each * each for each in deviations])) - apart * apart * (1 / count)
        delta = first + apart * (1 / count) - total * weights[0]
        return [total + first * float(count) + apart, squares + own + delta * delta * weights[1]]

    # ---- dst

    def write(self, unit: Unit, part: Index) -> None:
        """Rows of a part; where they begin at whole vectors of dst, these go past the caches."""
        b, made = self.b, self.passes[-1]
        uniform = self._prepared(made, unit)
        rows = self._rows(part)
        if not self.knobs.stream:
            self._lines(unit, rows, uniform, None)
            return
        where = b.at(self.dst, unit.dst + unit.low, storage.element_type(self.kernel.dst.dtype))
        lead = unaligned(b, where, self.kernel.dst.itemsize)
        by_length(
            b,
            unit.high - unit.low,
            lambda: self._lines(unit, rows, uniform, lead),
            lambda: self._lines(unit, rows, uniform, None),
        )

    def _lines(self, unit: Unit, rows: tuple[Index, Index], uniform: Known, lead: Value | None) -> None:
        """A unit's columns of all rows of a part; a few rows at a time share what columns have."""
        width = unit.high - unit.low

        def few(row: Index, count: int) -> None:
            begins = [offsets(self.shape.rows, row + i) for i in range(count)]
            write = partial(self._write, unit, begins, uniform)
            if lead is None:
                self.each_vector(0, width, self.shape.run.extent, write)
            else:
                streamed(self.b, lead, 0, width, 1, write)

        batches(self.b, *rows, _UNROLL, few)

    def _write(
        self, unit: Unit, rows: list[Row], uniform: Known, at: Index, count: int, *, stream: bool = False
    ) -> None:
        """One vector of columns of some rows."""
        made = self.passes[-1]
        columns, known = self._known(made, unit, uniform, at, count)
        for row in rows:
            place = self._place(columns, unit, row, at)
            x = self._read(unit, row, at, count)
            finish(self.frame, made.formulas, x, place, known, stream=stream)


def _tree(values: list[Value]) -> Value:
    """The sum by pairs, pairs of pairs and so on."""
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
    return values[0]


def _by_column(operand: KernelOperand) -> tuple[int, ...]:
    """A column is a place of an image: an operand of images is found by column."""
    return CHANNEL if operand.is_inside and 1 in operand.axes else operand.axes


def _as_it_is(operand: KernelOperand) -> tuple[int, ...]:
    return operand.axes

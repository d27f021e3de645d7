"""A statistic being made: the states of lanes, chunks and parts, and its numbers.

Lanes are elements of one cell where src's innermost axis is reduced, and columns, neighbouring cells or
positions of these, where it is kept. Each lane has a state. A few vectors join it at a time, so that it is
corrected once for all of them: a sum of exponentials takes five exponentials for four vectors. Eight terms of
a sum are added by pairs: columns of f32[512x64] are as far from float64 as torch's, 1.4 times with four. A
chunk's state is merged into that of the chunks of its part before; sums and moments are in float64 from there
on. The states of parts, lanes and columns are gathered at the end, so that no long sum is made one by one.

Where elements are near, each level of a statistic's parts has a pass of its own, but for moments: nothing is
corrected, and dst is made of the last level's terms where its formula has them, so that softmax takes one
exponential.

Where there are many elements, moments are of the distances from a cell's first element, its pivot: the
rounding of a large mean would cost the variance half of its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from fuseplan.backends.cpu import dialect
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import element_of, vector
from fuseplan.backends.cpu.lanes import chosen_lanes, widened
from fuseplan.backends.cpu.math_format import at_least
from fuseplan.backends.cpu.templates.reduction_loops import UNROLL, Cut, Offsets, Unit
from fuseplan.backends.cpu.templates.reduction_spots import Known, Pass, Spot, SpotFormulas, Spots
from fuseplan.backends.cpu.templates.reduction_terms import levels, quick, slow
from fuseplan.backends.lattice import KEPT
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import Moments, Part, Statistic, merged
from fuseplan.scalar import Scalar, fold, leaf

F64 = "double"

State = dict[str, Value]
Parts = Sequence[Part]
Take = Callable[[State, int], None]  # takes a state, and how many of its lanes count


class States:
    """One statistic of a kernel.

    Args:
        statistic: may use the numbers of those before it.
        is_first: whether the statistic has no other before it.
        keeps_x: the first pass of all writes the elements behind the prologue, which the others read.
        kept: a part of terms that is written on the way, for dst to read.

    Attributes:
        kind: the type of a state from a chunk on.
        totals: arrays for the state of a part, by the names of the state's parts.
    """

    def __init__(
        self,
        spots: Spots,
        statistic: Statistic,
        cut: Cut,
        *,
        is_first: bool,
        keeps_x: bool = False,
        kept: Scalar | None = None,
    ) -> None:
        self.spots, self.b, self.lanes, self.loops = spots, spots.b, spots.b.lanes, spots.loops
        self.lattice, self.cut = spots.lattice, cut
        self._writes_x = is_first and keeps_x  # and values of the prologue with names
        self._keeps = is_first and (keeps_x or self.lattice.is_reduced)
        b, is_long, is_moments = self.b, self.loops.chunk_count > 1, isinstance(statistic, Moments)
        # One pass of moments takes 0.7 to 1.0 of the time of two: its corrections are few, one for 8 vectors.
        self._in_levels = cut.near and not is_moments
        is_sum = all(part.join in ("add", "mul") for part in statistic.parts)
        self.kind = vector(self.lanes, F64) if is_sum and is_long and not self._in_levels else b.vector
        self._table = self._wide_table = dialect.table(b)
        if self.kind != b.vector:
            self._wide_table = {**self._table, "const": lambda value: b.const(value, self.kind)}
        has_pivot = is_moments and (is_long or b.element == F64 or not self.lattice.is_along)
        has_pivot = has_pivot and not spots.kernel.parts
        self._pivot = f"{statistic.names[0]}.pivot" if has_pivot else ""
        self._group = 2 * UNROLL if is_sum or is_moments else UNROLL
        spots.add_local([*statistic.names, *([self._pivot] if self._pivot else [])])
        self._first = spots.formulas(spots.kernel.prologue, (), *statistic.expressions)
        if self._pivot:
            apart = tuple(each - leaf(self._pivot) for each in statistic.expressions)
            statistic = replace(statistic, expressions=apart)
        self.statistic, names = statistic, [part.name for part in statistic.parts]
        self._chunk = {name: b.buffer(self.loops.width) for name in names}
        self.totals = {name: b.buffer(self.loops.width, element_of(self.kind)) for name in names}
        found = levels(statistic) if self._in_levels else (statistic.parts,)
        listed = [[quick(part, spots.largest) for part in parts] for parts in found if parts]
        self._levels = [
            self._level(parts, kept, reads_x=keeps_x and not (is_first and number == 0))
            for number, parts in enumerate(listed)
        ]

    def _level(self, parts: Parts, kept: Scalar | None, *, reads_x: bool) -> tuple[Parts, Pass]:
        """The formulas of some parts; those that elements are near to find them made in a later pass."""
        spots, names, terms = self.spots, [part.name for part in parts], dict[str, SpotFormulas]()
        for part in parts:
            beside = [kept] if kept is not None and kept in slow(part.term) else []
            terms[part.name] = spots.formulas((), names, part.term, *beside)
        made = Pass(spots, (), terms, source=KEPT) if reads_x else Pass(spots, spots.kernel.prologue, terms)
        if self._in_levels:
            spots.local |= {name: self.totals[name] for name in names}
        return parts, made

    # ---- states in arrays

    def _held(self, rooms: State, at: Index, kind: str) -> State:
        element = element_of(kind)
        return {name: self.b.load(self.b.at(room, at, element), kind) for name, room in rooms.items()}

    def _keep(self, state: Mapping[str, Value], rooms: State, at: Index, *, count: int | None = None) -> None:
        for name, value in state.items():
            where = self.b.at(rooms[name], at, element_of(value.type))
            self.b.store_first(value, where, count or self.lanes)

    def _clear(self, parts: Parts, unit: Unit, rooms: State, kind: str) -> None:
        none = {part.name: self.b.const(self._identity(part), kind) for part in parts}
        self.loops.vectors(unit, lambda at, _: self._keep(none, rooms, at))

    # ---- one part of the elements

    def reduce(self, unit: Unit, part: Index, rooms: State, *, backwards: bool) -> None:
        """Puts the state of a part of the elements of each cell, or of each column, into arrays."""
        rooms, given = self.totals if self.lattice.is_along else rooms, rooms
        keeps = self._keeps
        for parts, way in self._levels:
            shared = way.prepared(unit)
            mine, chunk_rooms = _of(parts, rooms), _of(parts, self._chunk)
            if not self.loops.is_single:
                self._clear(parts, unit, mine, self.kind)
            with self.loops.chunks(part, backwards=backwards) as chunk:
                self._clear(parts, unit, chunk_rooms, self.b.vector)
                join = partial(self._join, (parts, way), unit, shared, keeps)
                self.loops.elements(unit, chunk, join, group=self._group)
                self.loops.vectors(unit, lambda at, _, parts=parts: self._add(parts, rooms, at))  # type: ignore[misc]
            if self.lattice.is_along:
                self._along(parts, mine, given)
            keeps = False

    def _along(self, parts: Parts, rooms: State, given: State) -> None:
        """The state of all lanes, in all of them alike."""
        state = self._gathered(parts, lambda take: take(self._held(rooms, 0, self.kind), self.lanes))
        self._keep(state, given, 0, count=self.lanes if self.cut.is_alone else 1)

    def _add(self, parts: Parts, rooms: State, at: Index) -> None:
        """Merges a chunk's state into that of the chunks before."""
        state = self._held(_of(parts, self._chunk), at, self.b.vector)
        if self.kind != self.b.vector:
            state = {name: widened(self.b, value) for name, value in state.items()}
        if not self.loops.is_single:
            state = merged(parts, self._held(_of(parts, rooms), at, self.kind), state, self._wide_table)
        self._keep(state, rooms, at)

    def _join(
        self,
        level: tuple[Parts, Pass],
        unit: Unit,
        shared: Known,
        keeps: bool,
        places: Sequence[Offsets],
        count: int,
        at: Index,
        _: bool,
    ) -> None:
        """Vectors of elements join the state of their lanes."""
        parts, way = level
        state, made = self._held(_of(parts, self._chunk), at, self.b.vector), State()
        known = way.known(unit, shared, at, count)
        spots = [self.spots.in_parts(unit, each, count, at) for each in places]
        elements = [pair for each in spots for pair in way.made(each, known, keeps=keeps)]
        for spot, x in elements if keeps and self._writes_x else ():
            self.spots.store(KEPT, x, spot)
        for part in parts:
            join = self._joining(part, self._table)
            terms = [self._term(way, part, spot, x, (known, made)) for spot, x in elements]
            made[part.name] = reduce(join, _paired(terms, join), part.corrected(state, made, self._table))
        self._keep(made, self._chunk, at)

    def _term(self, way: Pass, part: Part, spot: Spot, x: Value, values: tuple[Known, State]) -> Value:
        known, made = values
        spot.leaves.update(made)
        term, *beside = way.terms[part.name].values(x, spot, known)
        for value in beside:
            self.spots.store(KEPT, value, spot)
        return self._first_lanes(term, spot.count, part) if self.lattice.is_along else term

    def _first_lanes(self, value: Value, count: int, part: Part) -> Value:
        if count == self.lanes:
            return value
        return chosen_lanes(
            self.b, value, [number < count for number in range(self.lanes)], self._identity(part)
        )

    def _identity(self, part: Part) -> float:
        """The value of no terms."""
        return -dtype_of(self.spots.kernel.compute_dtype).largest if part.has_numbers else part.identity

    def _joining(self, part: Part, table: Mapping[str, Any]) -> Callable[[Value, Value], Value]:
        """How a part joins a term; without a care for NaN, a maximum is one instruction on x86, not three."""
        return partial(at_least, self.b) if part.has_numbers else table[part.join]

    # ---- all parts

    def _gathered(self, parts: Parts, states: Callable[[Take], None], *, lanes: bool = True) -> State:
        """Several states as one, of all `lanes` alike; `states` gives each to a function.

        Each part of the state is final before the next one is corrected by it.
        """
        made: State = {}
        for part in parts:
            value, join = self._joined(part, made, states), self._joining(part, self._wide_table)
            for apart in (1 << bit for bit in range(self.lanes.bit_length() - 1) if lanes):
                order = [number ^ apart for number in range(self.lanes)]
                value = join(value, self.b.shuffle(value, value, order))
            made[part.name] = value
        return made

    def _joined(self, part: Part, made: State, states: Callable[[Take], None]) -> Value:
        """One part of several states, joined in each lane."""
        total, join = self.b.variable(self.kind, self._identity(part)), self._joining(part, self._wide_table)

        def take(state: State, count: int) -> None:
            own = self._first_lanes(part.corrected(state, made, self._wide_table), count, part)
            total.set(join(total.get(), own))

        states(take)
        return total.get()

    def finish(self, unit: Unit, rooms: Callable[[Index], State]) -> None:
        """The numbers of a unit's cells, from the states of all parts in arrays."""

        def made(at: Index, _: int) -> None:
            if self.cut.is_alone and self.lattice.fold == 1:
                self._number(self._held(rooms(0), at, self.kind), at)
                return

            def states(take: Take) -> None:
                with self.b.loop(0, self.cut.parts, name="part") as part:
                    self._of_part(rooms(part), at, take)

            state = self._gathered(self.statistic.parts, states, lanes=self.lattice.fold > 1)
            self._number(state, at)

        self.loops.cells(unit, made)

    def _of_part(self, rooms: State, at: Index, take: Take) -> None:
        """The states of a cell's columns, of a vector of cells, or of the cell, in all lanes."""
        if self.lattice.fold > 1:
            self.loops.folded(at, lambda i, count: take(self._held(rooms, i, self.kind), count))
        elif self.lattice.is_along:
            one = self._held(rooms, 0, element_of(self.kind))
            take({name: self.b.splat(value) for name, value in one.items()}, self.lanes)
        else:
            take(self._held(rooms, at, self.kind), self.lanes)

    def _number(self, state: State, at: Index) -> None:
        b = self.b
        for name, expression in zip(self.statistic.names, self.statistic.numbers, strict=True):
            value = fold(expression, state, self._wide_table)
            if element_of(value.type) != b.element:
                value = b.convert("fptrunc", value, b.element)
            if self._pivot and name == self.statistic.names[0]:
                value = value + b.load(b.at(self.spots.local[self._pivot], at))
            self.spots.spread(name, value, at)

    def find_pivots(self, unit: Unit) -> None:
        """The first element of each cell, but zero for one that is not finite."""

        def keep(at: Index, count: int) -> None:
            spot = self.spots.at_cell(unit, count, at)
            (value,) = self._first.values(spot.leaves["src"], spot, {})
            apart = value - value
            finite = self.b.select(self.b.compare("ord", apart, apart), value, 0.0)
            self.spots.spread(self._pivot, finite, at)

        if self._pivot:
            self.loops.cells(unit, keep)


def _of(parts: Parts, rooms: State) -> State:
    return {part.name: rooms[part.name] for part in parts}


def _paired(values: list[Value], join: Callable[[Value, Value], Value]) -> list[Value]:
    """The values joined by pairs, pairs of pairs and so on."""
    while len(values) > 1:
        values = [reduce(join, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values

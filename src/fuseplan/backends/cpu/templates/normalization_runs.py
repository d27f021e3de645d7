"""Reductions whose lanes are a run of one channel's positions: a tile's lanes become one sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.elementwise import Formulas, Place, finish
from fuseplan.backends.cpu.ir import Index, Value, Variable
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import chosen_lanes, lane, lane_sum, widened
from fuseplan.backends.cpu.loops import by_length, steps, streamed, unaligned
from fuseplan.backends.cpu.templates.normalization_shape import Unit
from fuseplan.backends.cpu.templates.normalization_writer import Writer
from fuseplan.backends.cpu.walk import offsets
from fuseplan.kernels.kernel import CHANNEL, KernelOperand
from fuseplan.language.reduction import Moments, Sums

_UNROLL = 4

Known = dict[object, Value]


@dataclass(frozen=True)
class _Tile:
    """Elements start..stop-1 of a run, and where the run begins."""

    start: Index
    stop: Index
    dst: Index
    src: Index
    image: Index


class RunWriter(Writer):
    """Writes one kernel whose lanes are runs."""

    def rooms_wanted(self) -> int:
        self.passes = [self.pass_formulas(number, self._seen) for number in range(self.kernel.passes)]
        self.pivot_formulas = {number: self.first_formulas(number, self._seen) for number in self.pivots}
        return 0

    def _seen(self, operand: KernelOperand) -> tuple[int, ...]:
        """An operand of images of one element is shared by all."""
        return CHANNEL if operand.is_inside and 1 in operand.axes and operand.size == 1 else operand.axes

    # ---- tiles

    def _tiles(
        self, unit: Unit, part: Index, *, backwards: bool
    ) -> Callable[[Callable[[_Tile], None]], None]:
        """Goes through the tiles of a part."""
        b, shape = self.b, self.shape

        def each(visit: Callable[[_Tile], None]) -> None:
            low: Index = part * shape.part if shape.parts > 1 else 0
            high = b.smaller(low + shape.part, shape.row_count) if shape.parts > 1 else shape.row_count
            with b.loop(low, high, name="tile") as index:
                tile = low + (high - 1) - index if backwards else index
                dst, src, image = offsets(shape.rows, tile // shape.chunks)
                start: Index = tile % shape.chunks * shape.chunk if shape.chunks > 1 else 0
                stop = (
                    b.smaller(start + shape.chunk, shape.run.extent) if shape.chunks > 1 else shape.run.extent
                )
                visit(_Tile(start, stop, unit.dst + dst, unit.src + src, unit.image + image))

        return each

    def _vectors(self, tile: _Tile, visit: Callable[[Index, int, int, int], None]) -> None:
        """All vectors of a tile: where, how many lanes exist, how many of them are new, and a number 0..3.

        What is left at a run's end is a vector that begins early, of which only the last lanes are new.
        """
        b, lanes, extent = self.b, self.lanes, self.shape.run.extent
        steps(b, tile.start, tile.stop, _UNROLL, lambda i, number: visit(i, lanes, lanes, number))
        rest = extent % lanes
        if not rest:
            return
        with b.when(b.compare("eq", b.const(tile.stop, I64), extent)):
            if extent >= lanes:
                visit(extent - lanes, lanes, rest, 1)
            else:
                visit(extent - rest, rest, rest, 1)

    def _place(self, unit: Unit, tile: _Tile, i: Index, count: int) -> Place:
        step = self.shape.run.image
        is_asked = any(op.is_inside for op in self.kernel.operands)
        inside = tile.image + i * step if is_asked else None
        return Place(tile.dst + i, unit.first, False, count, inside)

    def _read(self, tile: _Tile, i: Index, count: int) -> Value:
        step = self.shape.run.src
        return storage.read_at(self.b, self.kernel.src.dtype, self.src, tile.src + i * step, count, step)

    def _known(self, formulas: Formulas, unit: Unit) -> Known:
        """What is the same for all positions of a channel."""
        known: Known = {}
        formulas.prepare(Place(0, unit.first, False, self.lanes), known)
        return known

    # ---- sums

    def firsts(self, number: int, unit: Unit) -> Callable[[Index, int], Value]:
        formulas = self.pivot_formulas[number]
        tile = _Tile(0, 1, unit.dst, unit.src, unit.image)

        def first(at: Index, count: int) -> Value:
            place, known = self._place(unit, tile, 0, 1), self._known(formulas, unit)
            return formulas.values(self._read(tile, 0, 1), place, known)[0]

        return first

    def reduce(self, number: int, unit: Unit, part: Index) -> None:
        b, reduction = self.b, self.kernel.statistics[number]
        known = self._known(self.passes[number], unit)
        totals = [b.variable("double", 0.0) for _ in reduction.names]
        seen = b.variable("double", 0.0)
        each = self._tiles(unit, part, backwards=self.goes_backwards(number))
        add = {Sums: self._add, Moments: self._join}[type(reduction)]
        each(lambda tile: add(number, unit, tile, known, totals, seen))
        for quantity, total in enumerate(totals):
            b.store(total.get(), self.partial(unit, part, quantity))

    def _values(
        self, number: int, unit: Unit, tile: _Tile, i: Index, count: int, known: Known
    ) -> list[Value]:
        place = self._place(unit, tile, i, count)
        return self.passes[number].values(self._read(tile, i, count), place, dict(known))

    def _new(self, value: Value, count: int, new: int) -> Value:
        """A vector's lanes that were in no vector before, and exist."""
        if new == self.lanes:
            return value
        first = count - new
        return chosen_lanes(self.b, value, [first <= lane < count for lane in range(self.lanes)])

    def _add(
        self, number: int, unit: Unit, tile: _Tile, known: Known, totals: Sequence[Variable], seen: Variable
    ) -> None:
        """Adds a tile to sums."""
        sums = [self._sums() for _ in totals]

        def visit(i: Index, count: int, new: int, slot: int) -> None:
            for accumulators, value in zip(
                sums, self._values(number, unit, tile, i, count, known), strict=True
            ):
                accumulators[slot].set(accumulators[slot].get() + self._new(value, count, new))

        self._vectors(tile, visit)
        for total, accumulators in zip(totals, sums, strict=True):
            total.set(total.get() + widened(self.b, self._sum(accumulators)))

    def _sums(self) -> list[Variable]:
        made = [self.b.variable(self.b.vector) for _ in range(_UNROLL)]
        for each in made:
            each.set(0.0)
        return made

    def _sum(self, accumulators: Sequence[Variable]) -> Value:
        first, second, third, fourth = (each.get() for each in accumulators)
        return lane_sum(self.b, (first + second) + (third + fourth))

    def _join(
        self, number: int, unit: Unit, tile: _Tile, known: Known, totals: Sequence[Variable], seen: Variable
    ) -> None:
        """Adds a tile to moments: deviations from about the mean, and their squares."""
        b = self.b
        own = b.op("double", f"sitofp i64 {b.const(tile.stop - tile.start, I64).name} to double")
        middle, rests, squares = self._middle(number, unit, tile, known), self._sums(), self._sums()

        def deviate(i: Index, count: int, new: int, slot: int) -> None:
            (value,) = self._values(number, unit, tile, i, count, known)
            deviation = self._new(value - b.splat(middle), count, new)
            rests[slot].set(rests[slot].get() + deviation)
            squares[slot].set(b.fma(deviation, deviation, squares[slot].get()))

        self._vectors(tile, deviate)
        rest = widened(b, self._sum(rests)) / own
        mean, square = widened(b, middle) + rest, widened(b, self._sum(squares)) - rest * rest * own
        before, total = seen.get(), totals[0].get()
        apart = b.select(b.compare("oeq", before, 0.0), 0.0, mean - total / before)
        totals[0].set(total + mean * own)
        totals[1].set(totals[1].get() + square + apart * apart * (before * own / (before + own)))
        seen.set(before + own)

    def _middle(self, number: int, unit: Unit, tile: _Tile, known: Known) -> Value:
        """The mean of a tile's first vectors; the first element, where there is no whole vector.

        Of n elements, m of them here, the squared deviations from it are at most 1 + n/m times those from the
        mean: that many are lost to cancellation, at most.
        """
        b, lanes, extent = self.b, self.lanes, self.shape.run.extent
        if extent < lanes:
            (value,) = self._values(number, unit, tile, tile.start, 1, known)
            middle = lane(b, value, 0)
        else:
            starts = [b.smaller(tile.start + i * lanes, extent - lanes) for i in range(_UNROLL)]
            first = [self._values(number, unit, tile, start, lanes, known)[0] for start in starts]
            summed = lane_sum(b, (first[0] + first[1]) + (first[2] + first[3]))
            middle = summed * (1 / (lanes * _UNROLL))
        apart = middle - middle
        return b.select(b.compare("ord", apart, apart), middle, 0.0)

    # ---- dst

    def write(self, unit: Unit, part: Index) -> None:
        known = self._known(self.passes[-1], unit)

        def visit(tile: _Tile) -> None:
            if not self.knobs.stream:
                self._plain(unit, tile, known)
                return
            by_length(
                self.b,
                tile.stop - tile.start,
                lambda: self._streamed(unit, tile, known),
                lambda: self._plain(unit, tile, known),
            )

        self._tiles(unit, part, backwards=self.goes_backwards(len(self.passes) - 1))(visit)

    def _plain(self, unit: Unit, tile: _Tile, known: Known) -> None:
        self._vectors(tile, lambda i, count, _, __: self._element(unit, tile, known, i, count))

    def _streamed(self, unit: Unit, tile: _Tile, known: Known) -> None:
        """A tile's aligned vectors go past the caches."""
        b, dst = self.b, self.kernel.dst
        where = b.at(self.dst, tile.dst + tile.start, storage.element_type(dst.dtype))
        lead, write = unaligned(b, where, dst.itemsize), partial(self._element, unit, tile, known)
        streamed(b, lead, tile.start, tile.stop, _UNROLL, write)

    def _element(
        self, unit: Unit, tile: _Tile, known: Known, i: Index, count: int, *, stream: bool = False
    ) -> None:
        place = self._place(unit, tile, i, count)
        x = self._read(tile, i, count)
        finish(self.frame, self.passes[-1], x, place, dict(known), stream=stream)

"""The phases of kernels with statistics, where states and numbers lie between them, and the elements of dst.

Parts depend on the kernel and its template alone, and their states are gathered in order, so that results do
not depend on the threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import element_of
from fuseplan.backends.cpu.loops import line_elements, share
from fuseplan.backends.cpu.templates.reduction_loops import Cut, Loops, Offsets, Unit, rounded
from fuseplan.backends.cpu.templates.reduction_spots import Known, Pass, Spot, Spots
from fuseplan.backends.cpu.templates.reduction_states import F64, State, States
from fuseplan.backends.cpu.templates.reduction_sums import ColumnSums, sum_bytes
from fuseplan.backends.cpu.templates.reduction_terms import below, keeps_elements, kept_part
from fuseplan.backends.lattice import KEPT, Lattice
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target

WORD = 8  # bytes of a number in the workspace
LINE = 64  # bytes of a line of the caches


class ReductionWriter:
    """Writes one kernel."""

    def __init__(self, cut: Cut, kernel: Kernel, target: Target) -> None:
        self.cut, self.kernel, self.lattice = cut, kernel, Lattice(kernel, folded=cut.folded)
        is_near = cut.near and self.lattice.is_along
        kept, ends = kept_part(kernel) if is_near else (None, ())
        keeps_x = is_near and kept is None and keeps_elements(kernel, self.lattice)
        has_room = keeps_x or kept is not None
        if has_room:
            self.lattice = self.lattice.keeping()
        tasks = -(-self.lattice.cell_count // cut.cells)
        summed = sum_bytes(kernel, tasks)
        self.frame = Frame(cut, kernel, target, workspace=has_room or bool(summed) or not cut.is_alone)
        self.b, self.lanes = self.frame.body, self.frame.lanes
        count, block = None, None
        if kernel.open_axis is not None:  # of which the lattice counts a representative's
            count = self.frame.pointer("extent") * (self.lattice.cell_count // kernel.images)
            block = share(self.b, count, cut.cells, self.frame.threads)
        line = line_elements(kernel.dst.itemsize) if cut.stream else 0
        self.loops = Loops(self.b, self.lattice, cut, line, count, block)
        room = rounded(self.lattice.element_count, self.lanes) * WORD if has_room else 0
        self._own = room  # the elements or terms of one cell
        own = self.frame.thread * room + summed
        terms = self.b.at(self.frame.pointer("workspace"), own, "i8") if room else None
        self.spots = Spots(self.frame, kernel, self.loops, terms)
        self.uneven = [each.key for each in kernel.operands if each.key in self.lattice.uneven]
        self.spots.add_local(self.uneven)
        kept = None if kept is None else below(kept, self.spots.largest)
        self.states = [
            States(self.spots, each, cut, is_first=number == 0, keeps_x=keeps_x, kept=kept)
            for number, each in enumerate(kernel.statistics)
        ]
        self.names = [each.names for each in kernel.statistics]
        reads = not (ends or self.lattice.is_reduced)
        before = kernel.prologue if reads and not keeps_x else ()
        source = (KEPT if keeps_x else "src") if reads else None
        end, *behind = ends or kernel.epilogue
        end = replace(end, expression=below(end.expression, self.spots.largest))
        self.last = Pass(self.spots, (*before, end, *behind), {}, source=source)
        self.results = self.spots.formulas((), (), *(each.expression for each in kernel.results))
        self._lay_out()
        self.sums = None
        if summed:
            self._shared = summed
            self.sums = ColumnSums(self.frame, kernel, self.spots, tasks, keeps_x=keeps_x)

    # ---- phases

    def source(self) -> Source:
        """The whole kernel: one phase, or two for each statistic and one for dst."""
        if self.cut.split:
            self._split()
        else:
            self._whole()
        return self.frame.source(workspace=self._shared, per_thread=self._own)

    def _whole(self) -> None:
        """A task goes through its data as often as it must: once from memory, if a cache holds it."""
        with self.frame.tasks(self.loops.blocks()) as task:
            if self.sums:
                self.sums.begin(task)
            with self.loops.units(task) as unit:
                self._unit(unit)
            if self.cut.stream:
                # Stores past the caches are seen before the task counts as finished.
                self.b.line("fence seq_cst")
        if self.sums:
            self.sums.finish()

    def _unit(self, unit: Unit) -> None:
        """All passes over a unit's data."""
        b, parts, last = self.b, self.cut.parts, len(self.states)
        self._begin(unit, 0)
        for number, states in enumerate(self.states):
            states.find_pivots(unit)
            with b.loop(0, parts, name="part") as part:
                self._visit(number, unit, self._turned(number, part, parts))
            states.finish(unit, partial(self._rooms, number, unit))
        self._end(unit)
        if not self.lattice.is_reduced:
            with b.loop(0, parts, name="part") as part:
                self._visit(last, unit, self._turned(last, part, parts))

    def _split(self) -> None:
        """Tasks are parts of blocks, and then those that gather the parts of a few cells."""
        blocks, few = self.loops.blocks(), self.loops.blocks(few=True)
        tasks, last = blocks * self.cut.parts, len(self.states)
        for number in range(self.kernel.passes - self.lattice.is_reduced):
            with self.frame.tasks(tasks) as taken:
                task = self._turned(number, taken, tasks)
                with self.loops.units(task % blocks) as unit:
                    self._begin(unit, number)
                    self._visit(number, unit, task // blocks)
            if number == last:
                return
            self.frame.wait(tasks)
            with self.frame.tasks(few) as task, self.loops.units(task, few=True) as unit:
                self._begin(unit, number)
                self.states[number].finish(unit, partial(self._rooms, number, unit))
                self._pass_on(number, unit)
                if number + 1 == last:
                    self._end(unit)
            self.frame.wait(few)

    def _visit(self, number: int, unit: Unit, part: Index) -> None:
        """A part of a pass: of a statistic, or, after the last, of dst."""
        if number == len(self.states):
            self._write(unit, part)
        else:
            rooms = self._rooms(number, unit, part)
            self.states[number].reduce(unit, part, rooms, backwards=self._goes_backwards(number))

    @staticmethod
    def _goes_backwards(number: int) -> bool:
        """Every other pass does, to meet what caches hold."""
        return number % 2 == 1

    def _turned(self, number: int, index: Value, count: int) -> Value:
        return (count - 1) - index if self._goes_backwards(number) else index

    # ---- the workspace

    def _lay_out(self) -> None:
        """Numbers of all cells, and states of parts; of whole tasks only states, a thread's own."""
        whole, each = not self.cut.split, max((len(states.totals) for states in self.states), default=0)
        slots = rounded((self.loops.width if whole else self.loops.slots) * WORD, LINE) // WORD
        names = [name for names in self.names for name in names]
        numbers, states = len(names) * slots * WORD, self.cut.parts * each * slots * WORD
        self._slots, self._each = slots, each
        self._shared = 0
        if self.cut.is_alone:
            return
        self._shared, self._own = (0, states) if whole else (numbers + states, 0)
        base = self.frame.pointer("workspace")
        self._numbers = {name: self.b.at(base, i * slots * WORD, "i8") for i, name in enumerate(names)}
        self._states = self.b.at(base, self.frame.thread * states if whole else numbers, "i8")

    def _rooms(self, number: int, unit: Unit, part: Index) -> State:
        """Where the state of a unit's columns in one part begins, by the names of the state's parts."""
        states, made = self.states[number], State()
        if self.cut.is_alone:
            return states.totals
        first = unit.slot + unit.low if self.cut.split else 0
        for place, name in enumerate(states.totals):
            row = self.b.at(self._states, (part * self._each + place) * self._slots, F64)
            made[name] = self.b.at(row, first, element_of(states.kind))
        return made

    def _begin(self, unit: Unit, number: int) -> None:
        """What a unit has for each column: operands of its cells, numbers of statistics before, pivots."""
        for key in self.uneven:
            self.loops.cells(unit, lambda at, _, key=key: self.spots.fill(key, unit, at))  # type: ignore[misc]
        for name in [name for names in self.names[:number] for name in names]:
            self.loops.vectors(unit, partial(self._fetch, name, unit))
        if number < len(self.states) and self.cut.split:
            self.states[number].find_pivots(unit)

    def _fetch(self, name: str, unit: Unit, at: Index, _: int) -> None:
        """A number that another task has passed on."""
        load = self.b.broadcast if self.lattice.is_along else self.b.load
        value = load(self.b.at(self._numbers[name], unit.slot + unit.low + at))
        self.b.store(value, self.b.at(self.spots.local[name], at))

    def _pass_on(self, number: int, unit: Unit) -> None:
        """Writes a unit's numbers for other tasks."""
        count = 1 if self.lattice.is_along else self.lanes

        def write(name: str, at: Index, _: int) -> None:
            value = self.b.load(self.b.at(self.spots.local[name], at))
            self.b.store_first(value, self.b.at(self._numbers[name], unit.slot + unit.low + at), count)

        for name in self.names[number]:
            self.loops.vectors(unit, partial(write, name))

    # ---- dst

    def _end(self, unit: Unit) -> None:
        """All that is made of statistics alone: results, and dst where it has one element for each cell."""

        def write(at: Index, count: int) -> None:
            spot, none = self.spots.at_cell(unit, count, at), self.b.number(0.0)
            if self.lattice.is_reduced:
                self._store([spot], {})
            for result, value in zip(self.kernel.results, self.results.values(none, spot, {}), strict=True):
                self.spots.store(result.key, value, spot)

        if self.lattice.is_reduced or self.kernel.results:
            self.loops.cells(unit, write)

    def _store(self, spots: Sequence[Spot], known: Known, *, stream: bool = False) -> None:
        for spot, value in self.last.made(spots, known, keeps=True):
            self.spots.store("dst", value, spot, stream=stream)

    def _write(self, unit: Unit, part: Index) -> None:
        """The elements of a part of dst."""
        shared = self.last.prepared(unit)
        if self.sums:
            self.sums.prepare(unit)

        def write(places: Sequence[Offsets], count: int, at: Index, stream: bool) -> None:
            known = self.last.known(unit, shared, at, count)
            if self.sums:
                self.sums.add(unit, places, count, at)
            for each in places:
                self._store(self.spots.in_parts(unit, each, count, at), known, stream=stream)

        lead = partial(self.spots.lead, unit) if self.cut.stream else None
        with self.loops.chunks(part, backwards=self._goes_backwards(len(self.states))) as chunk:
            self.loops.elements(unit, chunk, write, lead)

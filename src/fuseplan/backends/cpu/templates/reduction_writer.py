"""The code of kernels with statistics over any axes.

Lanes are elements of one cell where src's innermost axis is reduced, and neighbouring cells where it is
kept. Each lane has a state. A few vectors join it at a time, so that it is corrected once for all of them: a
sum of exponentials takes five exponentials for four vectors. A chunk's state is merged into that of the
chunks before, lanes and parts are merged at the end, so that no long sum is made one by one.

Where elements are near, each level of a statistic's parts has a pass of its own: nothing is corrected, and
dst is made of the last level's terms where its formula has them, so that softmax takes one exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

from fuseplan.backends.cpu import dialect, storage
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import BITS, I64
from fuseplan.backends.cpu.lanes import chosen_lanes, lane, lane_numbers
from fuseplan.backends.cpu.loops import streamed, unaligned
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.templates.reduction_loops import UNROLL, Loops, Offsets, Unit, rounded
from fuseplan.backends.cpu.templates.reduction_spots import Chain, Leaves, Spot, SpotFormulas
from fuseplan.backends.cpu.templates.reduction_terms import kept_part, levels, slow
from fuseplan.backends.lattice import KEPT, Lattice
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand, Stage
from fuseplan.kernels.target import Target
from fuseplan.language.parts import part_of
from fuseplan.language.reduction import INDEX, Part, Statistic, merged
from fuseplan.scalar import Scalar, fold, leaves_of

State = dict[str, Value]
Parts = Sequence[Part]


@dataclass(frozen=True)
class ReductionKnobs(CpuTemplate):
    """The fields of `Reduction`, which says what they mean."""

    cells: int
    parts: int
    near: bool = False
    stream: bool = False


class ReductionWriter:
    """Writes one kernel."""

    def __init__(self, knobs: ReductionKnobs, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel, self.lattice = knobs, kernel, Lattice(kernel)
        self.kept, ends = kept_part(kernel) if knobs.near and self.lattice.is_along else (None, ())
        if self.kept is not None:
            self.lattice = self.lattice.keeping()
        self.frame = Frame(knobs, kernel, target, workspace=knobs.parts > 1 or self.kept is not None)
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.table = dialect.table(self.b)
        operands = {each.key: each for each in kernel.operands}
        self.dtypes = {
            key: kernel.compute_dtype if each.packed else each.dtype for key, each in operands.items()
        }
        self.dtypes |= {each.key: each.dtype for each in kernel.outputs}
        self.dtypes |= {"src": kernel.src.dtype, "dst": kernel.dst.dtype}
        self.pointers = {"src": self.frame.pointer("src"), "dst": self.frame.pointer("dst")}
        self.pointers |= self.frame.operand_pointers
        count = None
        if kernel.open_axis is not None:  # of which the lattice counts a representative's
            count = self.frame.kernel.src.batch * (self.lattice.cell_count // kernel.src.batch)
        self.loops = Loops(self.b, self.lattice, knobs.cells, knobs.parts, count)
        names = [name for each in kernel.statistics for name in each.names]
        parts = [part.name for each in kernel.statistics for part in each.parts]
        self.numbers = {name: self.b.buffer(self.loops.width) for name in names}
        self.total, self.chunk = ({name: self.b.buffer(self.loops.width) for name in parts} for _ in range(2))
        stages = (*kernel.prologue, *kernel.epilogue)
        met = (leaves_of(each) for stage in stages if stage.reads_parts for each in stage.expressions)
        self.leaves = (*operands, *names, *parts, INDEX, KEPT, *frozenset().union(*met))
        self.before = self._chain(kernel.prologue)
        self.behind = self._formulas(ends or kernel.epilogue)
        self.whole = Chain(self.behind) if ends else self._chain(stages)
        if self.kept is not None:
            self.dtypes[KEPT] = kernel.compute_dtype
            room = self.frame.thread * self._kept_room
            self.pointers[KEPT] = self.b.at(self.frame.pointer("workspace"), room)

    def _chain(self, stages: Sequence[Stage]) -> Chain:
        place = next((at for at, stage in enumerate(stages) if stage.reads_parts), None)
        if place is None:
            return Chain(self._formulas(stages))
        made = tuple(self._formulas((), each) for each in stages[place].expressions)
        return Chain(self._formulas(stages[:place]), made, self._formulas(stages[place + 1 :]))

    def _formulas(self, stages: Sequence[Stage], *expressions: Scalar) -> SpotFormulas:
        """Formulas in which every leaf may differ between lanes."""
        varying = [KernelOperand(name, (0,), (), "", "epilogue") for name in self.leaves]
        pointers = self.frame.operand_pointers
        return SpotFormulas(
            self.b, stages, expressions, varying, self.kernel.parameters, pointers, self.kernel.dst
        )

    # ---- phases

    def source(self) -> Source:
        """The whole kernel: one phase, or one for the parts of each statistic and one for dst."""
        blocks, parts = self.loops.blocks, self.knobs.parts
        if parts == 1:
            with self.frame.tasks(blocks) as task, self.loops.units(task) as unit:
                for statistic in self.kernel.statistics:
                    self._reduce(statistic, unit, 0)
                    self._number(statistic, unit, self.total)
                self._write(unit, 0)
            size = self._kept_room * BITS[self.b.element] // 8 if self.kept is not None else 0
            return self.frame.source(per_thread=size)
        for number, statistic in enumerate(self.kernel.statistics):
            with self.frame.tasks(blocks * parts) as task, self.loops.units(task % blocks) as unit:
                self._met(number, unit)
                self._reduce(statistic, unit, task // blocks)
                self._pass_on(number, unit, task // blocks)
            self.frame.wait(blocks * parts)
        tasks = blocks if self.lattice.is_reduced else blocks * parts
        with self.frame.tasks(tasks) as task, self.loops.units(task % blocks) as unit:
            self._met(len(self.kernel.statistics), unit)
            self._write(unit, task // blocks)
        return self.frame.source(workspace=self._room(len(self.kernel.statistics)))

    # ---- the workspace

    @property
    def _kept_room(self) -> int:
        """Elements of a thread's workspace: the terms of one cell, to whole vectors."""
        return rounded(self.lattice.element_count, self.lanes)

    def _room(self, statistics: int) -> int:
        """Bytes of the states of the first statistics, of all parts."""
        numbers = sum(len(each.parts) for each in self.kernel.statistics[:statistics])
        return numbers * self.knobs.parts * self.loops.slots * BITS[self.b.element] // 8

    def _place(self, number: int, place: int, part: Index, slot: Index) -> Value:
        """Where a part's share of one number of a statistic's state lies."""
        base = self._room(number) * 8 // BITS[self.b.element] + place * self.knobs.parts * self.loops.slots
        return self.b.at(self.frame.pointer("workspace"), part * self.loops.slots + base + slot)

    def _pass_on(self, number: int, unit: Unit, part: Index) -> None:
        """Writes a part's state."""

        def write(at: Index, _: int) -> None:
            state = self._held(self.kernel.statistics[number].parts, self.total, at)
            for place, value in enumerate(state.values()):
                where = self._place(number, place, part, unit.slot + unit.low + at)
                self.b.store_first(value, where, 1 if self.lattice.is_along else self.lanes)

        self.loops.vectors(unit, write)

    def _met(self, statistics: int, unit: Unit) -> None:
        """The numbers of the first statistics, from the states of all parts."""
        for number, statistic in enumerate(self.kernel.statistics[:statistics]):
            self._clear(statistic.parts, self.total, unit)
            with self.b.loop(0, self.knobs.parts, name="part") as part:
                self.loops.vectors(unit, partial(self._meet, number, part, unit))
            self._number(statistic, unit, self.total)

    def _meet(self, number: int, part: Value, unit: Unit, at: Index, _: int) -> None:
        b, parts = self.b, self.kernel.statistics[number].parts
        where = [self._place(number, place, part, unit.slot + unit.low + at) for place in range(len(parts))]
        load = b.broadcast if self.lattice.is_along else b.load
        share = {part.name: load(each) for part, each in zip(parts, where, strict=True)}
        self._keep(merged(parts, self._held(parts, self.total, at), share, self.table), self.total, at)

    # ---- states

    def _held(self, parts: Parts, rooms: State, at: Index) -> State:
        return {part.name: self.b.load(self.b.at(rooms[part.name], at)) for part in parts}

    def _keep(self, state: Mapping[str, Value], rooms: State, at: Index) -> None:
        for name, value in state.items():
            self.b.store(value, self.b.at(rooms[name], at))

    def _clear(self, parts: Parts, rooms: State, unit: Unit) -> None:
        identity = {part.name: self.b.number(part.identity) for part in parts}
        self.loops.vectors(unit, lambda at, _: self._keep(identity, rooms, at))

    def _number(self, statistic: Statistic, unit: Unit, rooms: State) -> None:
        """The finished numbers of a state."""

        def finish(at: Index, _: int) -> None:
            state = self._held(statistic.parts, rooms, at)
            for name, number in zip(statistic.names, statistic.numbers, strict=True):
                self.b.store(fold(number, state, self.table), self.b.at(self.numbers[name], at))

        self.loops.vectors(unit, finish)

    def _reduce(self, statistic: Statistic, unit: Unit, part: Index) -> None:
        """The state of a part of the elements, in all lanes alike where lanes are elements."""
        is_first = statistic is self.kernel.statistics[0] and self.lattice.is_reduced
        for parts in levels(statistic) if self.knobs.near else (statistic.parts,):
            if parts:
                self._level(parts, unit, part, keeps=is_first)
                is_first = False

    def _level(self, parts: Parts, unit: Unit, part: Index, *, keeps: bool) -> None:
        """One pass over the elements; `keeps`: values with names are written."""
        self._clear(parts, self.total, unit)
        with self.loops.chunks(part) as chunk:
            self._clear(parts, self.chunk, unit)
            self.loops.elements(
                unit, chunk, lambda spots, count, at: self._join(parts, unit, spots, count, at, keeps=keeps)
            )
            self.loops.vectors(unit, lambda at, _: self._add(parts, at))
        if self.lattice.is_along:
            state = self._held(parts, self.total, 0)
            for apart in (1 << bit for bit in range(self.lanes.bit_length() - 1)):
                order = [number ^ apart for number in range(self.lanes)]
                other = {name: self.b.shuffle(value, value, order) for name, value in state.items()}
                state = merged(parts, state, other, self.table)
            self._keep(state, self.total, 0)

    def _add(self, parts: Parts, at: Index) -> None:
        """Merges a chunk's state into that of the chunks before."""
        total, chunk = (self._held(parts, rooms, at) for rooms in (self.total, self.chunk))
        self._keep(merged(parts, total, chunk, self.table), self.total, at)

    def _join(
        self, parts: Parts, unit: Unit, places: Sequence[Offsets], count: int, at: Index, *, keeps: bool
    ) -> None:
        """Vectors of elements join the state of their lanes."""
        state, made = self._held(parts, self.chunk, at), State()
        groups = [self._spots(unit, each, count, at) for each in places]
        elements = [pair for spots in groups for pair in self._made(self.before, spots, keeps=keeps)]
        for part in parts:
            terms = [self._term(part, spot, x, made, count) for spot, x in elements]
            own = part.corrected(state, made, self.table)
            made[part.name] = reduce(self.table[part.join], _paired(terms, self.table[part.join]), own)
        self._keep(made, self.chunk, at)

    def _made(self, chain: Chain, spots: Sequence[Spot], *, keeps: bool) -> list[tuple[Spot, Value]]:
        """The elements of all parts behind the stages, each with the place where it is stored."""
        values = [self._applied(chain.front, spot, keeps=keeps) for spot in spots]
        if chain.behind is None:
            return list(zip(spots, values, strict=True))
        parts = {f"x[{number}]": value for number, value in enumerate(values)}
        found = []
        for spot, formula in zip(spots, chain.made, strict=False):
            spot.leaves.update(parts)
            (x,) = formula.values(values[0], spot, {})
            found.append((spot, self._applied(chain.behind, spot, x, keeps=keeps)))
        return found

    def _applied(self, stages: SpotFormulas, spot: Spot, x: Value | None = None, *, keeps: bool) -> Value:
        """The element behind the stages, src's unless told; `keeps`: values with names are written."""
        saved: dict[str, Value] = {}
        if x is None:
            x = spot.leaves["src"] if stages is not self.behind else self.b.number(0.0)
        made = stages.apply(x, spot, {}, saved)
        for name, value in saved.items() if keeps else ():
            self._store(name, value, spot)
        return made

    def _term(self, part: Part, spot: Spot, x: Value, made: State, count: int) -> Value:
        spot.leaves.update(made)
        kept = [self.kept] if self.kept in slow(part.term) else []
        term, *values = self._formulas((), part.term, *kept).values(x, spot, {})
        for value in values:
            self._store(KEPT, value, spot)
        if count == self.lanes or not self.lattice.is_along:
            return term
        exists = [number < count for number in range(self.lanes)]
        return chosen_lanes(self.b, term, exists, part.identity)

    def _spots(self, unit: Unit, place: Offsets, count: int, at: Index) -> list[Spot]:
        """A vector's place in each part."""
        return [self._spot(unit, place, count, at, part) for part in range(len(self.lattice.starts))]

    def _spot(self, unit: Unit, place: Offsets, count: int, at: Index, part: int = 0) -> Spot:
        """A vector's place: offsets of the unit, of the elements, of the column, and of the part."""
        added = zip(unit.offsets, place, self.loops.column(unit, at), self.lattice.starts[part], strict=True)
        totals = (a + b + c + start if start else a + b + c for a, b, c, start in added)
        offsets = dict(zip(self.lattice.tensors, totals, strict=True))

        def load(name: str) -> Value:
            for rooms in (self.numbers, self.total):
                if name in rooms:
                    return self.b.load(self.b.at(rooms[name], at))
            if name == INDEX:
                return self._counted(offsets[name])
            key, start = part_of(name)[0], self.lattice.start(name)
            return self._read(key, offsets[key] + start if start else offsets[key], count)

        return Spot(offsets["dst"], 0, False, count, offsets=offsets, leaves=Leaves(load))

    def _counted(self, first: Index) -> Value:
        """The indices of the lanes, from the first lane's on."""
        b, step = self.b, self.lattice.run.steps[self.lattice.tensors.index(INDEX)]
        begin = b.splat(b.convert("sitofp", b.const(first, I64), b.element))
        return begin + lane_numbers(b, step) if step else begin

    def _read(self, name: str, offset: Index, count: int) -> Value:
        """The lanes of a tensor; one element for all of them where it does not have the run's axis."""
        b, dtype, pointer = self.b, self.dtypes[name], self.pointers[name]
        step = self.lattice.run.steps[self.lattice.tensors.index(name)]
        if step == 0:
            where = b.at(pointer, offset, storage.element_type(dtype))
            return b.splat(storage.read_one(b, dtype, where))
        return storage.read_at(b, dtype, pointer, offset, count, step)

    # ---- dst

    def _write(self, unit: Unit, part: Index) -> None:
        """The elements of dst: one of each cell, or all of a part."""
        if self.lattice.is_reduced:
            self.loops.vectors(unit, lambda at, count: self._cell(unit, count, at))
            return
        if self.kernel.results:
            with self.b.when(self.b.compare("eq", self.b.const(part, I64), 0)):
                self.loops.vectors(unit, lambda at, count: self._results(self._at_cell(unit, count, at)))
        if self.knobs.stream:
            self._streamed(unit)
            return
        with self.loops.chunks(part) as chunk:
            self.loops.elements(unit, chunk, partial(self._finish, unit))

    def _streamed(self, unit: Unit) -> None:
        """The elements of a cell, run by run: aligned vectors go past the caches."""
        b, dst, place = self.b, self.kernel.dst, self.lattice.tensors.index("dst")
        with b.loop(0, self.loops.run_count, name="run") as run:
            begin = self.loops.offsets(self.lattice.outer_elements, run)

            def write(at: Index, count: int, *, stream: bool = False) -> None:
                self._finish(unit, [self.loops.along(begin, at)], count, 0, stream=stream)

            offset = unit.offsets[place] + begin[place]
            where = b.at(self.pointers["dst"], offset, storage.element_type(dst.dtype))
            lead = unaligned(b, where, dst.itemsize)
            streamed(b, lead, 0, self.lattice.run.extent, UNROLL, write)

    def _cell(self, unit: Unit, count: int, at: Index) -> None:
        spot = self._at_cell(unit, count, at)
        self._store("dst", self._applied(self.behind, spot, keeps=True), spot)
        self._results(spot)

    def _at_cell(self, unit: Unit, count: int, at: Index) -> Spot:
        none = (0,) * len(self.lattice.tensors)
        return self._spot(unit, none, 1 if self.lattice.is_along else count, at)

    def _results(self, spot: Spot) -> None:
        """The outputs that are made of statistics."""
        for result in self.kernel.results:
            (value,) = self._formulas((), result.expression).values(self.b.number(0.0), spot, {})
            self._store(result.key, value, spot)

    def _finish(
        self, unit: Unit, places: Sequence[Offsets], count: int, at: Index, *, stream: bool = False
    ) -> None:
        for spots in [self._spots(unit, each, count, at) for each in places]:
            for spot, value in self._made(self.whole, spots, keeps=True):
                self._store("dst", value, spot, stream=stream)

    def _store(self, name: str, value: Value, spot: Spot, *, stream: bool = False) -> None:
        b, dtype, pointer, count, offset = (
            self.b,
            self.dtypes[name],
            self.pointers[name],
            spot.count,
            spot.offsets[name],
        )
        step, kind = self.lattice.run.steps[self.lattice.tensors.index(name)], storage.element_type(dtype)
        if step == 1 or count == 1:
            storage.write(b, dtype, value, b.at(pointer, offset, kind), count=count, stream=stream)
            return
        narrow = storage.narrow(b, dtype, value)
        for number in range(count):
            b.store(lane(b, narrow, number), b.at(pointer, offset + number * step, kind))


def _paired(values: list[Value], join: Callable[[Value, Value], Value]) -> list[Value]:
    """The values joined by pairs, pairs of pairs and so on."""
    while len(values) > 1:
        values = [reduce(join, values[i : i + 2]) for i in range(0, len(values), 2)]
    return values

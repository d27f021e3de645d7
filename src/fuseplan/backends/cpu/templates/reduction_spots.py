"""The places of kernels with statistics: vectors of elements, and the formulas that read and write there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.elementwise import Formulas, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import lane, lane_numbers, places_from
from fuseplan.backends.cpu.lookup import read_src
from fuseplan.backends.cpu.loops import unaligned
from fuseplan.backends.cpu.templates.reduction_loops import Loops, Offsets, Unit
from fuseplan.backends.cpu.templates.reduction_terms import largest
from fuseplan.backends.lattice import KEPT
from fuseplan.kernels.kernel import CHANNEL, Kernel, KernelOperand, Stage
from fuseplan.language.parts import part_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import COMPARISONS, Scalar

EACH = (0,)  # the axes of a leaf that may differ between the elements of a cell
Known = dict[object, Value]
_AT_HAND = {"leaf", "const", *COMPARISONS}  # a condition is no number
T = TypeVar("T")


class Asked(dict[str, T]):
    """Values by name, each made when it is asked for."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        self[name] = self._make(name)
        return self[name]


@dataclass(frozen=True)
class Spot(Place):
    """A vector's place: offsets of its first lane in each tensor, and the values of leaves there."""

    offsets: Asked[Index] = field(default_factory=lambda: Asked(_nothing))
    leaves: Asked[Value] = field(default_factory=lambda: Asked(_nothing))


def _nothing(name: str) -> Any:
    raise KeyError(name)


class SpotFormulas(Formulas):
    """Formulas whose leaves a `Spot` has; only parameters are found elsewhere."""

    def _leaf(self, name: str, x: Value | None, place: Place) -> Value:
        if name == "x" or name in self._parameters:
            return super()._leaf(name, x, place)
        assert isinstance(place, Spot)
        return place.leaves[name]

    def gathered(self, key: str, place: Place) -> Value:
        """An operand whose places follow from those of dst."""
        return self._gathered(self._operands[key], self._pointers[key], place)


class Spots:
    """Reads and writes the tensors of one kernel.

    Attributes:
        local: arrays with a number for each column of a unit, by the names of leaves: they are read there.
        rooms: further such arrays, for what a pass keeps.
        largest: the elements whose maxima are leaves.
    """

    def __init__(self, frame: Frame, kernel: Kernel, loops: Loops, kept: Value | None = None) -> None:
        self.frame, self.kernel, self.loops, self.lattice = frame, kernel, loops, loops.lattice
        self.b, self.local, self.rooms = frame.body, dict[str, Value](), list[Value]()
        self._dtypes = {
            each.key: kernel.compute_dtype if each.packed else each.dtype for each in kernel.operands
        }
        self._dtypes |= {each.key: each.dtype for each in kernel.outputs}
        self._dtypes |= {"src": kernel.src.dtype, "dst": kernel.dst.dtype}
        self._pointers = {"src": frame.pointer("src"), "dst": frame.pointer("dst"), **frame.operand_pointers}
        if kept is not None:
            self._dtypes[KEPT], self._pointers[KEPT] = kernel.compute_dtype, kept
        self._steps = dict(zip(self.lattice.tensors, self.lattice.run.steps, strict=True))
        self._scattered = {
            each.key: each for each in kernel.operands if each.is_scattered and not kernel.has_cells
        }
        self._indices = {each.key for each in kernel.indices}
        self._by_places = self._made((), (), self._scattered.values())
        self.largest = largest(kernel.statistics)

    def formulas(self, stages: Sequence[Stage], names: Iterable[str], *expressions: Scalar) -> SpotFormulas:
        """Formulas over operands, outputs and statistics; `names` are leaves that differ between elements."""
        axes = {name: self._axes(place) for place, name in enumerate(self.lattice.tensors)}
        axes |= dict.fromkeys(self._scattered, EACH)
        axes |= {each.key: EACH for each in self.kernel.saved.values()}
        axes |= dict.fromkeys(self.local, CHANNEL) | dict.fromkeys(names, EACH)
        leaves = [KernelOperand(name, each, (), "", "epilogue") for name, each in axes.items()]
        return self._made(stages, expressions, leaves)

    def _made(
        self, stages: Sequence[Stage], expressions: Sequence[Scalar], leaves: Iterable[KernelOperand]
    ) -> SpotFormulas:
        pointers = self.frame.operand_pointers
        return SpotFormulas(
            self.b, stages, expressions, leaves, self.kernel.parameters, pointers, self.kernel.dst
        )

    def _axes(self, place: int) -> tuple[int, ...]:
        """Of one of the lattice's tensors: whether its elements differ within a cell, or between cells."""
        is_apart = len({each[place] for each in self.lattice.starts}) > 1  # between the parts of an axis
        if is_apart or any(axis.steps[place] for axis in self.lattice.elements):
            return EACH
        is_kept = any(axis.steps[place] for axis in self.lattice.cells)
        return CHANNEL if is_kept or self.lattice.tensors[place] in self.lattice.uneven else ()

    # ---- places

    def at_cell(self, unit: Unit, count: int, at: Index) -> Spot:
        """The place of cells, without their elements."""
        return self.spot(unit, self.loops.nowhere, count, at)

    def in_parts(self, unit: Unit, place: Offsets, count: int, at: Index) -> list[Spot]:
        """A vector's place in each part of an axis; one without parts."""
        return [self.spot(unit, place, count, at, part) for part in range(len(self.lattice.starts))]

    def spot(self, unit: Unit, place: Offsets, count: int, at: Index, part: int = 0) -> Spot:
        """A vector's place: offsets of the unit, of the elements, of the column, and of the part."""

        def offset(name: str) -> Index:
            tensor = self.lattice.tensors.index(name)
            found = unit.offsets[tensor] + place[tensor] + self.loops.column(unit, at, tensor)
            start = self.lattice.starts[part][tensor]
            return found + start if start else found

        offsets = Asked(offset)

        def load(name: str) -> Value:
            if name in self.local:
                return self.b.load(self.b.at(self.local[name], at))
            if name == INDEX:
                return self._counted(offsets[name])
            if name in self._indices:
                step = 0 if name in self.lattice.uneven else self._steps[name]
                return places_from(self.b, offsets[name], step)
            if name in self._scattered:
                return self._by_places.gathered(name, replace(found, element=offsets["dst"]))
            key, start = part_of(name)[0], self.lattice.start(name, part)
            return self._read(key, offsets[key] + start if start else offsets[key], count)

        step = self._steps["dst"]
        found = Spot(0, 0, False, count, step=step, offsets=offsets, leaves=Asked(load))
        return found

    def lead(self, unit: Unit, place: Offsets) -> Value:
        """Elements from a place to the next that begins a cache line in dst."""
        dst, offset = self.kernel.dst, self.spot(unit, place, 1, 0).offsets["dst"]
        where = self.b.at(self._pointers["dst"], offset, storage.element_type(dst.dtype))
        return unaligned(self.b, where, self.loops.line)

    # ---- values

    def add_local(self, names: Iterable[str]) -> None:
        """Makes arrays for further leaves."""
        self.local |= {name: self.b.buffer(self.loops.width) for name in names}

    def spread(self, name: str, value: Value, at: Index) -> None:
        """Writes numbers of cells into their array: one stands for all lanes, or all columns of its cell."""
        b, lattice = self.b, self.lattice
        if lattice.is_along or lattice.fold > 1:
            value = b.splat(lane(b, value, 0))
        where = b.at(self.local[name], at)
        with b.loop(0, lattice.fold, b.lanes, name="fill") as column:
            b.store(value, b.at(where, column))

    def fill(self, name: str, unit: Unit, at: Index) -> None:
        """Writes a cell's element of an operand into its array, for all columns of the cell."""
        self.spread(name, self._read(name, self.at_cell(unit, 1, at).offsets[name], 1), at)

    def _counted(self, first: Index) -> Value:
        """The indices of the lanes, from the first lane's on."""
        b, step = self.b, self._steps[INDEX]
        begin = b.splat(b.convert("sitofp", b.const(first, I64), b.element))
        return begin + lane_numbers(b, step) if step else begin

    def _read(self, name: str, offset: Index, count: int) -> Value:
        """The lanes of a tensor; one element for all of them where it does not have the run's axis."""
        b, dtype, pointer, step = self.b, self._dtypes[name], self._pointers[name], self._steps[name]
        if name == "src" and self.kernel.lookup:
            made = read_src(self.frame, offset, count if step else 1, step)
            return made if step else b.splat(lane(b, made, 0))
        if step == 0 or name in self.lattice.uneven:
            where = b.at(pointer, offset, storage.element_type(dtype))
            return b.splat(storage.read_one(b, dtype, where))
        return storage.read_at(b, dtype, pointer, offset, count, step)

    def store(self, name: str, value: Value, spot: Spot, *, stream: bool = False) -> None:
        """Writes the lanes of a tensor; `stream`: past the caches."""
        pointer, offset = self._pointers[name], spot.offsets[name]
        step = 1 if spot.count == 1 else self._steps[name]
        storage.write_at(self.b, self._dtypes[name], value, pointer, offset, spot.count, step, stream=stream)


class Pass:
    """The formulas of one way through all elements, and what is the same for several of them.

    Args:
        stages: applied to each element; one of them may read parts of an axis.
        terms: of a statistic's state, by the names of its parts.
        source: what the first stage reads: src or `KEPT`, or None where there is no element.
    """

    def __init__(
        self,
        spots: Spots,
        stages: Sequence[Stage],
        terms: Mapping[str, SpotFormulas],
        *,
        source: str | None = "src",
    ) -> None:
        self.spots, self.b, self.terms, self._source = spots, spots.b, terms, source
        place = next((at for at, stage in enumerate(stages) if stage.reads_parts), len(stages))
        self._front = spots.formulas(stages[:place], ())
        parted = [each for stage in stages[place : place + 1] for each in stage.expressions]
        self._parted = [spots.formulas((), (), each) for each in parted]
        self._behind = spots.formulas(stages[place + 1 :], ())
        self._uniform, self._kept = self._same(channel=False), self._same(channel=True)
        self._is_along = spots.lattice.is_along
        if not self._is_along:
            missing = len(self._kept) - len(spots.rooms)
            spots.rooms += [self.b.buffer(spots.loops.width) for _ in range(missing)]

    def _same(self, *, channel: bool) -> dict[Scalar, SpotFormulas]:
        """What is the same for all elements of a cell, or of all cells, each with a formula that has it."""
        listed = (self._front, *self._parted, self._behind, *self.terms.values())
        made = {node: each for each in listed for node in each.invariants(channel=channel)}
        return {node: each for node, each in made.items() if node.fn not in _AT_HAND}

    def prepared(self, unit: Unit) -> Known:
        """Values that are the same for all cells, or for the one; those of columns go to arrays."""
        shared, spot = Known(), self.spots.at_cell(unit, 1, 0)
        uniform = {**self._uniform, **(self._kept if self._is_along else {})}
        for node, formulas in uniform.items():
            formulas.evaluate(node, spot, shared)

        def keep(at: Index, count: int) -> None:
            spot, known = self.spots.at_cell(unit, count, at), dict(shared)
            for (node, formulas), room in zip(self._kept.items(), self.spots.rooms, strict=False):
                self.b.store(formulas.evaluate(node, spot, known), self.b.at(room, at))

        if self._kept and not self._is_along:
            self.spots.loops.vectors(unit, keep)
        return shared

    def known(self, unit: Unit, shared: Known, at: Index, count: int) -> Known:
        """What the elements of a vector of columns, or of the cell, have in common."""
        known = dict(shared)
        if not self._is_along:
            spot = self.spots.at_cell(unit, count, at)
            for (node, formulas), room in zip(self._kept.items(), self.spots.rooms, strict=False):
                formulas.keep(node, spot, self.b.load(self.b.at(room, at)), known)
        return known

    def made(self, spots: Sequence[Spot], known: Known, *, keeps: bool) -> list[tuple[Spot, Value]]:
        """The elements of all parts behind the stages, with places; `keeps`: named values are written."""
        values = [self._applied(self._front, spot, None, known, keeps=keeps) for spot in spots]
        if not self._parted:
            return list(zip(spots, values, strict=True))
        parts = {f"x[{number}]": value for number, value in enumerate(values)}
        found = []
        for spot, formula in zip(spots, self._parted, strict=False):
            spot.leaves.update(parts)
            (x,) = formula.values(values[0], spot, known)
            found.append((spot, self._applied(self._behind, spot, x, known, keeps=keeps)))
        return found

    def _applied(
        self, stages: SpotFormulas, spot: Spot, x: Value | None, known: Known, *, keeps: bool
    ) -> Value:
        """The element behind some stages, in front of them src's unless told."""
        saved: dict[str, Value] = {}
        if x is None:
            x = spot.leaves[self._source] if self._source else self.b.number(0.0)
        made = stages.apply(x, spot, known, saved)
        spot.leaves.update(saved)
        for name, value in saved.items() if keeps else ():
            self.spots.store(name, value, spot)
        return made

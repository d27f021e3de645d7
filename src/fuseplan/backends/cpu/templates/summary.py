"""A product whose rows have statistics: cross-entropy, or a maximum, of logits that no memory holds.

The logits of a tile's rows, of some panels, lie in a buffer on the stack. They join the state of their row, a
vector for each of its parts, whose lanes are features. A second phase merges the lanes of a row, and the
states of all blocks of features, and writes dst: there lanes are rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import log2
from typing import ClassVar

from fuseplan.backends.cpu import dialect, model, staging, storage
from fuseplan.backends.cpu.elementwise import Place
from fuseplan.backends.cpu.gather import transposed
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import chosen_lanes, lane_numbers
from fuseplan.backends.cpu.loops import batches, ceil_div, offset_of, pieces, places, within
from fuseplan.backends.cpu.rows import as_rows
from fuseplan.backends.cpu.sums import UNROLL
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.cpu.templates.direct_writer import DirectKnobs, DirectWriter
from fuseplan.backends.cpu.tiling import Tiling
from fuseplan.backends.lattice import Axis, merged
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    lanes,
    moved_once,
    summary_claims,
    summation_bound,
    unit_roundoff,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX, Part
from fuseplan.messages.reasons import Claim
from fuseplan.scalar import Scalar, fold, functions, leaves_of

ROWS = 4  # vectors of rows in a task of the second phase

State = dict[str, Value]


@dataclass(frozen=True)
class SummaryKnobs(DirectKnobs):
    """The fields of `ProductSummary`, which says what they mean."""

    group: int = 1


def state_elements(knobs: DirectKnobs, kernel: Kernel, target: Target) -> int:
    """Elements of the states of all rows and blocks of features; a vector of rows may be read behind them."""
    width, conv = lanes(kernel, target), kernel.contraction
    blocks = -(-conv.features // (knobs.vectors * width * knobs.block_panels))
    return (blocks * conv.rows + width) * len(kernel.reduction.parts) * width


class SummaryWriter(DirectWriter):
    """Writes one kernel."""

    keeps = True

    def __init__(self, knobs: SummaryKnobs, planned: Kernel, target: Target) -> None:
        if knobs.block_panels % knobs.group:
            raise ValueError(f"a task's {knobs.block_panels} panels are no whole groups of {knobs.group}")
        super().__init__(knobs, planned, target)
        b, self.planned, self.group = self.b, planned, knobs.group
        self.statistics, self.parts = planned.reduction.statistics, planned.reduction.parts
        self.count = planned.contraction.rows
        self.table = dialect.table(b)
        self.columns = knobs.group * self.panel  # logits of a row in the buffer
        self.logits = b.buffer(knobs.rows * self.columns)
        self.states = b.at(self.frame.pointer("workspace"), self.staged.elements)
        self.room = self.staged.elements + state_elements(knobs, planned, target)
        ends = [stage.expression for stage in planned.epilogue]
        ends += [each.expression for each in planned.results]
        self.term_keys = _leaves(part.term for part in self.parts)
        used = self.term_keys | _leaves(ends)
        self.operands = {each.key: each for each in planned.operands if each.key in used}
        read = [(at, key) for at, key in enumerate(planned.parameters) if key in used]
        where = self.frame.operand_pointers
        self.given = {key: b.broadcast(where["parameters"], at) for at, key in read}
        self.tensors = ("dst", *self.operands, *(each.key for each in planned.results))
        self.axes = self._axes()

    def _axes(self) -> tuple[Axis, ...]:
        """The loops over rows: a step's elements in dst, in the operands and in the results."""
        kernel, rank = self.planned, self.planned.src.rank
        strides = [dict(zip(each.axes, each.strides, strict=False)) for each in self.operands.values()]
        read = [[each.get(axis, 0) for axis in range(rank)] for each in strides]
        written = [kernel.dst.element_strides, *(each.strides for each in kernel.results)]
        steps = (written[0], *read, *written[1:])
        extents = [(axis, extent) for axis, extent in enumerate(kernel.src.shape) if axis != 1 and extent > 1]
        axes = merged(Axis(extent, tuple(each[axis] for each in steps)) for axis, extent in extents)
        return axes or (Axis(1, (0,) * len(steps)),)

    def source(self) -> Source:
        """Two phases: the states of all rows, and dst."""
        self.frame.wait(self.write_blocks())
        self._write_rows()
        return self.frame.source(workspace=self.room * model.itemsize(self.kernel))

    # ---- a task

    def _panels(
        self,
        image: Index | None,
        base: Index,
        group: Index,
        tiles: tuple[Index, Index],
        panels: tuple[Index, Index],
    ) -> None:
        """Each group of panels passes over all tiles of the task while a cache holds it."""
        b, rows, vectors = self.b, self.knobs.rows, self.knobs.vectors
        block = panels[0] // self.knobs.block_panels
        with b.loop(tiles[0] * rows, b.smaller(tiles[1] * rows, self.count), name="row") as row:
            self._keep(block, row, {part.name: b.number(part.identity) for part in self.parts})
        with b.loop(*panels, self.group, name="group") as first:
            last = b.smaller(first + self.group, panels[1])
            with b.loop(*tiles, name="tile") as tile:
                position = self.tiling.start(b, tile)
                ahead = self._ahead(tile - tiles[0], self.group)

                def run(panel: Index, count: int) -> None:
                    self._tile(self.tiling, image, position, group, panel, count, ahead)

                bounds = first, last
                pieces(b, self.conv.features, self.panel, run, name="panel", within=bounds, numbered=True)
                # The last tile starts early: the tile before has its first rows.
                with b.loop(tile * rows - position, self.tiling.rows, name="row") as row:
                    line = b.at(self.logits, row * self.columns)
                    self._join_row(block, position + row, line, (first * vectors, last * vectors))

    def _store_features(
        self,
        values: list[list[Value]],
        tiles: Tiling,
        image: Index | None,
        position: Index,
        feature: Index,
        features: int,
    ) -> None:
        """The logits of a panel, behind the stages between, go to the buffer."""
        known: dict[object, Value] = {}
        begin = self.b.at(self.logits, feature % self.columns)
        for r, line in enumerate(values):
            for j, value in enumerate(line):
                done = j * self.lanes
                place = Place(0, feature + done, True, min(self.lanes, features - done))
                logit = self.results.between.apply(value, place, known)
                self.b.store(logit, self.b.at(begin, r * self.columns + done))

    # ---- states

    def _at(self, block: Index, row: Index, part: int) -> Value:
        """Where one part of a row's state in a block of features lies."""
        return self.b.at(self.states, ((block * self.count + row) * len(self.parts) + part) * self.lanes)

    def _keep(self, block: Index, row: Index, state: Mapping[str, Value]) -> None:
        for number, part in enumerate(self.parts):
            self.b.store(state[part.name], self._at(block, row, number))

    def _join_row(self, block: Index, row: Index, line: Value, vectors: tuple[Index, Index]) -> None:
        """A row's vectors of features, by their numbers, join its state: first the parts that never move."""
        held = {
            part.name: self.b.load(self._at(block, row, number)) for number, part in enumerate(self.parts)
        }
        at = places(row, [axis.extent for axis in self.axes])
        made = {key: self._read(key, at, 1) for key in self.operands if key in self.term_keys}
        for moves in (False, True):
            parts = [part for part in self.parts if (part.moved is not None) == moves]
            self._join(parts, line, vectors, held, made)
        self._keep(block, row, made)

    def _join(
        self, parts: Sequence[Part], line: Value, vectors: tuple[Index, Index], held: State, made: State
    ) -> None:
        """Some parts of the state `held` with a row's vectors; `made` has the leaves, and takes the parts."""
        b, table = self.b, self.table
        joined = {part.name: b.variable(b.vector, part.identity) for part in parts}
        whole, rest = divmod(self.conv.features, self.lanes)
        leaves = {**self.given, **made}

        def join(first: Index, count: int, exists: int = self.lanes) -> None:
            spots = [{**leaves, **self._logits(line, first + number, vectors[0])} for number in range(count)]
            for part in parts:
                terms = [fold(part.term, spot, table) for spot in spots]
                if exists < self.lanes:
                    chosen = [lane < exists for lane in range(self.lanes)]
                    terms = [chosen_lanes(b, term, chosen, part.identity) for term in terms]
                total = joined[part.name]
                total.set(table[part.join](total.get(), reduce(table[part.join], terms)))

        size = min(UNROLL, self.group * self.knobs.vectors)
        batches(b, vectors[0], b.smaller(vectors[1], whole), size, join)
        if rest:
            with b.when(b.compare("sgt", b.const(vectors[1], I64), whole)):
                join(whole, 1, rest)
        for part in parts:
            made[part.name] = table[part.join](part.corrected(held, made, table), joined[part.name].get())

    def _logits(self, line: Value, vector: Index, first: Index) -> State:
        """The leaves of a vector of features; the buffer begins with vector `first`."""
        b = self.b
        feature = b.convert("sitofp", b.const(vector * self.lanes, I64), b.element)
        x = b.load(b.at(line, (vector - first) * self.lanes))
        return {"x": x, INDEX: b.splat(feature) + lane_numbers(b, 1)}

    # ---- rows

    def _write_rows(self) -> None:
        """A task is some vectors of rows along the innermost loop."""
        b, (*outer, run) = self.b, self.axes
        vectors, lines = -(-run.extent // self.lanes), self.count // run.extent
        tasks = ceil_div(vectors, ROWS)
        with self.frame.tasks(tasks * lines) as task:
            line = task // tasks
            at = places(line, [axis.extent for axis in outer])

            def write(vector: Index, count: int) -> None:
                first = vector * self.lanes
                self._write([*at, first], count, self._merged(line * run.extent + first))

            begin = within(b, task % tasks, ROWS, vectors)
            pieces(b, run.extent, self.lanes, write, name="rows", within=begin, numbered=True)

    def _merged(self, row: Index) -> State:
        """The states of a vector of rows: each block's lanes are merged with those of the blocks before."""
        b, table = self.b, self.table
        totals = {part.name: b.variable(b.vector, part.identity) for part in self.parts}
        with b.loop(0, ceil_div(self.panels, self.knobs.block_panels), name="block") as block:
            states: list[State] = [{name: total.get() for name, total in totals.items()}]
            states += ({} for _ in range(self.lanes))
            for number, part in enumerate(self.parts):
                held = [b.load(self._at(block, row + lane, number)) for lane in range(self.lanes)]
                for state, column in zip(states[1:], transposed(b, held), strict=True):
                    state[part.name] = column
            made = State()
            for part in self.parts:
                moved = [part.corrected(state, made, table) for state in states]
                made[part.name] = reduce(table[part.join], moved)
            for name, total in totals.items():
                total.set(made[name])
        return {name: total.get() for name, total in totals.items()}

    def _write(self, at: Sequence[Index], count: int, state: State) -> None:
        """dst and the results of a vector of rows."""
        kernel, table = self.planned, self.table
        leaves = {**self.given, **{key: self._read(key, at, count) for key in self.operands}}
        for each in self.statistics:
            numbers = zip(each.names, each.numbers, strict=True)
            leaves |= {name: fold(formula, state, table) for name, formula in numbers}
        for stage in kernel.epilogue:
            self.b.comment(stage.op_text)
            leaves["x"] = fold(stage.expression, leaves, table)
        self._store("dst", kernel.dst.dtype, self.frame.pointer("dst"), leaves["x"], at, count)
        for result in kernel.results:
            pointer, value = self.frame.pointer("result", result.key), fold(result.expression, leaves, table)
            self._store(result.key, result.dtype, pointer, value, at, count)

    def _place(self, key: str, at: Sequence[Index]) -> tuple[Index, int]:
        """Where a tensor's element of a row is, and elements from there to that of the next row."""
        steps = [axis.steps[self.tensors.index(key)] for axis in self.axes]
        return offset_of(at, steps), steps[-1]

    def _read(self, key: str, at: Sequence[Index], count: int) -> Value:
        """An operand's elements of some rows; that of one row is in all lanes."""
        b, operand, pointer = self.b, self.operands[key], self.frame.operand_pointers[key]
        dtype = self.kernel.compute_dtype if operand.packed else operand.dtype
        where, step = self._place(key, at)
        if count == 1 or not step:
            return b.splat(storage.read_one(b, dtype, b.at(pointer, where, storage.element_type(dtype))))
        return storage.read_at(b, dtype, pointer, where, count, step)

    def _store(
        self, key: str, dtype: str, pointer: Value, value: Value, at: Sequence[Index], count: int
    ) -> None:
        where, step = self._place(key, at)
        storage.write_at(self.b, dtype, value, pointer, where, count, step)


def _leaves(formulas: Iterable[Scalar]) -> frozenset[str]:
    return frozenset[str]().union(*map(leaves_of, formulas))


_VECTORS = 16  # of a row that join its state at a time: with 16 rows of 64 bytes, half of the first cache
_EFFICIENCY = 0.25  # of the multiply-adds, in the functions of the statistics


@dataclass(frozen=True)
class ProductSummary(Direct, SummaryKnobs):
    """Tiles of rows x features, whose logits stay in the first cache and join the state of their row.

    reads:  src and weight as `direct` does
    writes: dst once; the states of each row, a vector for each of their parts, to the workspace and back
    chosen: for every matrix product behind which there are statistics of its features

    Lanes of a state are features. A row has a state for each block of features that is a task; these and all
    lanes are merged in their order at the end: the same bits in every run. Attributes are those of `direct`;
    src is never copied by lines.

    Attributes:
        group: panels whose logits a tile makes before they join the states.
    """

    name: ClassVar[str] = "product_summary"
    opens: ClassVar[bool] = False
    ranges: ClassVar[bool] = False
    error_scale: ClassVar[str] = (
        "the sum of |src||weight| of the largest element, and that of the terms joined"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from summary_claims(kernel)
        yield model.padding_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        product, width = as_rows(kernel), lanes(kernel, target)
        for made in Direct.candidates(product, target, accuracy):
            assert isinstance(made, Direct)
            if made.lines:
                continue
            dots = made.dots and product.compute_dtype == "f32"
            itemsize = product.src.itemsize if dots else model.itemsize(product)
            panel = made.vectors * width * product.contraction.depth * itemsize
            fitting = min(_VECTORS // made.vectors, int(target.l2_bytes * 0.4) // panel)
            group = max(1, min(fitting, made.block_panels))
            block = -(-made.block_panels // group) * group
            yield cls(**{**made.knobs, "block_panels": block, "dots": dots, "group": group})

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        product = as_rows(kernel)
        room = staging.staged(product).elements + state_elements(self, kernel, target)
        return moved_once(kernel, room * model.itemsize(kernel))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return super().waste(as_rows(kernel), target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The product's, and that of the statistics' functions."""
        flops = kernel.contraction.flops * self.waste(kernel, target)
        flops += (kernel.flops - kernel.contraction.flops) * self.efficiency / _EFFICIENCY
        moved, by = self.traffic(kernel, target), self.efficiency
        return model.seconds(kernel, target, flops=flops, traffic=moved, efficiency=by, phases=2)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Errors of the products twice, in the elements and in their maximum; a rounding of each join.

        A lane joins its features one after another. Lanes are those of the narrowest vectors.
        """
        formulas = [stage.expression for stage in (*kernel.between, *kernel.epilogue)]
        formulas += [part.term for part in kernel.reduction.parts]
        narrowest = 16 // dtype_of(kernel.compute_dtype).itemsize
        joined = kernel.reduced_count / narrowest + log2(narrowest) + sum(map(functions, formulas))
        return 2 * summation_bound(kernel) + 2 * joined * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return SummaryWriter(self, kernel, target).source()

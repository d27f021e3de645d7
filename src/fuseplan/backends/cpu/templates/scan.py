"""Scans: sums of the elements up to each along an axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value, Variable
from fuseplan.backends.cpu.ir_text import I64
from fuseplan.backends.cpu.lanes import chosen_lanes
from fuseplan.backends.cpu.loops import ceil_div, offset_of, places, share, within
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.lattice import Axis, merged
from fuseplan.kernels.centre import Unary
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, lanes, unary_claims, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.ops.scan import Cumsum
from fuseplan.scalar import functions

_TASK_BYTES = 48 * 1024  # less is not worth another thread


@dataclass(frozen=True)
class Scan(CpuTemplate):
    """Sums along an axis: those of a vector in its register, or those of neighbouring lines side by side.

    reads:  src and every operand once
    writes: dst and saved values once
    chosen: for every plan with a scan

    Attributes:
        vectors: of lines side by side, where the axis is not innermost in src.
        block: lines, or such groups of lines, in a task.
    """

    name: ClassVar[str] = "scan"
    error_scale: ClassVar[str] = Cumsum.error_scale
    opens: ClassVar[bool] = True

    vectors: int
    block: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from unary_claims(kernel, Cumsum)
        yield claim(kernel.open_axis is None or bool(Lines(kernel).outer), Reason.KNOWN_EXTENTS)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        moved = cls(1, 1).traffic(kernel, target).total
        tasks = max(1, min(4 * target.threads, moved // _TASK_BYTES))
        lines, is_wide = Lines(kernel), not _functions(kernel)
        for vectors in (16, 8, 4) if is_wide and lines.run is not lines.along else (4,):
            yield cls(vectors, -(-cls(vectors, 1)._units(kernel, target) // tasks))

    def _units(self, kernel: Kernel, target: Target) -> int:
        lines = Lines(kernel)
        return lines.count * lines.groups(self.vectors * lanes(kernel, target))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """Rows are read faster in parts of 16 vectors than of 4: 12 MB in 0.64 ms, not 2.1, on a Zen 4."""
        moved, units = self.traffic(kernel, target), self._units(kernel, target)
        idle = -(-units // target.threads) * target.threads / units
        seconds = model.seconds(kernel, target, flops=kernel.flops, traffic=moved, efficiency=0.1)
        return seconds * idle * (0.5 + 2 / self.vectors)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per element of the axis, in any order, and one per function."""
        return (kernel.reduced_count + _functions(kernel)) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ScanWriter(self, kernel, target).source()


def _functions(kernel: Kernel) -> int:
    """Of the formulas: with functions, arithmetic takes the time, and more vectors only more code."""
    return sum(functions(stage.expression) for stage in (*kernel.prologue, *kernel.epilogue))


class Lines:
    """The loops of a kernel.

    Attributes:
        scan: the operator.
        along: the axis of the sums: its extent, and a step's elements in src, dst and each operand.
        run: the axis of the lanes: `along`, or the innermost of the others.
        outer: the axes around both.
        count: lines along the axis, or rows of the run.
    """

    def __init__(self, kernel: Kernel) -> None:
        centre = kernel.centre
        assert isinstance(centre, Unary)  # by the template's limits
        assert isinstance(centre.op, Cumsum)
        self.scan = centre.op
        held = [dict(zip(each.axes, each.strides, strict=False)) for each in kernel.operands]
        ends = (kernel.src.element_strides, kernel.dst.element_strides)
        axes = [
            Axis(extent, (*(each[axis] for each in ends), *(each.get(axis, 0) for each in held)))
            for axis, extent in enumerate(kernel.src.shape)
        ]
        self.along = axes.pop(centre.op.axis)
        others = sorted((axis for axis in axes if axis.extent > 1), key=lambda axis: -axis.steps[0])
        cells = merged(others)
        is_inner = not others or self.along.steps[0] < others[-1].steps[0]
        self.run, self.outer = (self.along, cells) if is_inner else (cells[-1], cells[:-1])
        self.count = prod(axis.extent for axis in self.outer)

    def groups(self, size: int) -> int:
        """Parts of a row of the run that are tasks' own: all of a line along the axis."""
        return 1 if self.run is self.along else -(-self.run.extent // size)


class ScanWriter:
    """Writes one kernel."""

    def __init__(self, choice: Scan, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(choice, kernel, target, workspace=False)
        self.b, self.lanes, self.kernel, self.lines = self.frame.body, self.frame.lanes, kernel, Lines(kernel)
        self.scan, self.size, self.block = self.lines.scan, choice.vectors * self.lanes, choice.block
        self.before, self.behind = (Elementwise(self.frame, role) for role in ("prologue", "epilogue"))
        self.known: dict[object, Value] = {}

    def source(self) -> Source:
        """One phase, of tasks of lines."""
        b, lines, groups = self.b, self.lines, self.lines.groups(self.size)
        units: Index = lines.count * groups
        block: Index = self.block
        if self.kernel.open_axis is not None:
            units = self.frame.pointer("extent") * (lines.count // self.kernel.images * groups)
            block = share(b, units, 1, self.frame.threads)
        with self.frame.tasks(ceil_div(units, block)) as task:
            for stages in (self.before, self.behind):
                stages.prepare(Place(0, 0, False, self.lanes), self.known)
            begin, end = within(b, task, block, units)
            with b.loop(begin, end, name="unit") as unit:
                at = places(unit // groups, [axis.extent for axis in lines.outer])
                steps = zip(*(axis.steps for axis in lines.outer), strict=True)
                starts = [offset_of(at, each) for each in steps] or [0] * len(lines.along.steps)
                if lines.run is lines.along:
                    self._line(starts)
                else:
                    self._columns(starts, unit % groups * self.size)
        return self.frame.source()

    def _line(self, starts: Sequence[Index]) -> None:
        """Lanes are neighbours along the axis."""
        b, extent, lanes = self.b, self.lines.along.extent, self.lanes
        whole, carry = extent // lanes * lanes, b.variable(b.vector, b.number(0.0))
        with b.loop(0, whole, lanes, name="element") as at:
            self._vector(starts, extent - lanes - at if self.scan.reverse else at, lanes, carry)
        if extent % lanes:
            self._vector(starts, 0 if self.scan.reverse else whole, extent % lanes, carry)

    def _vector(self, starts: Sequence[Index], first: Index, count: int, carry: Variable) -> None:
        """The sums of a vector in its register, by steps that double, and those in front of it."""
        starts = self._moved(starts, self.lines.along, first)
        x = self._read(starts, count)
        if count < self.lanes:
            x = chosen_lanes(self.b, x, [lane < count for lane in range(self.lanes)])
        step = 1
        while step < self.lanes:
            x, step = x + self._half(x, step), 2 * step
        last = 0 if self.scan.reverse else self.lanes - 1
        before = carry.get()
        carry.set(before + self.b.shuffle(x, x, [last] * self.lanes))
        total = before + x
        self._write(starts, self._delayed(total, before) if self.scan.exclusive else total, count)

    def _half(self, x: Value, step: int) -> Value:
        """In one half of 2 * step lanes the sum of the other half, which comes first; zero in that half.

        Shifts by `step` lanes would do, but LLVM makes `vexpand` of them: a scan took 3 times as long.
        """
        chosen = [2 * self.lanes - 1] * self.lanes
        for first in range(0, self.lanes, 2 * step):
            begin, end = (first, first + step) if self.scan.reverse else (first + step, first + step - 1)
            chosen[begin : begin + step] = [end] * step
        return self.b.shuffle(x, self.b.number(0.0), chosen)

    def _delayed(self, total: Value, before: Value) -> Value:
        """The sums in front of each lane."""
        if self.scan.reverse:
            return self.b.shuffle(total, before, range(1, self.lanes + 1))
        return self.b.shuffle(before, total, range(self.lanes - 1, 2 * self.lanes - 1))

    def _columns(self, starts: Sequence[Index], first: Index) -> None:
        """Lanes are neighbouring lines."""
        b, extent = self.b, self.lines.run.extent
        end = b.const(first + self.size, I64)
        if extent >= self.size:
            with b.when(b.compare("sle", end, extent)):
                self._sums(starts, first, self.size)
        if extent % self.size:
            with b.when(b.compare("sgt", end, extent)):
                self._sums(starts, first, extent % self.size)

    def _sums(self, starts: Sequence[Index], first: Index, count: int) -> None:
        """The sums of some lines, one element of each after another."""
        b, along = self.b, self.lines.along
        carries = [(done, b.variable(b.vector, b.number(0.0))) for done in range(0, count, self.lanes)]
        with b.loop(0, along.extent, name="element") as at:
            moved = self._moved(starts, along, along.extent - 1 - at if self.scan.reverse else at)
            for done, carry in carries:
                here, some = self._moved(moved, self.lines.run, first + done), min(self.lanes, count - done)
                before = carry.get()
                total = before + self._read(here, some)
                carry.set(total)
                self._write(here, before if self.scan.exclusive else total, some)

    @staticmethod
    def _moved(starts: Sequence[Index], axis: Axis, count: Index) -> list[Index]:
        return [count * step + start for start, step in zip(starts, axis.steps, strict=True)]

    def _place(self, starts: Sequence[Index], count: int, end: int) -> Place:
        """Of a vector in src (0) or dst (1)."""
        steps = self.lines.run.steps
        pairs = list(zip(starts, steps, strict=True))[2:]
        others = {each.key: pair for each, pair in zip(self.kernel.operands, pairs, strict=True)}
        return Place(starts[end], 0, False, count, step=steps[end], others=others)

    def _read(self, starts: Sequence[Index], count: int) -> Value:
        place, src = self._place(starts, count, 0), self.kernel.src
        pointer = self.frame.pointer("src")
        x = storage.read_at(self.b, src.dtype, pointer, place.element, count, place.step)
        return self.before.apply(x, place, dict(self.known))

    def _write(self, starts: Sequence[Index], x: Value, count: int) -> None:
        finish(self.frame, self.behind, x, self._place(starts, count, 1), dict(self.known))

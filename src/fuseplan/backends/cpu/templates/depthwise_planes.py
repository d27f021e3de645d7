"""Depthwise convolution with pixels innermost: vectors along the rows of one plane at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.depthwise_plan import PlanePlan, convolution_of, depthwise_claims
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame, slots_of
from fuseplan.backends.cpu.gather import Stretch
from fuseplan.backends.cpu.ir import I1, I64, Index, Value, Variable
from fuseplan.backends.cpu.plane_copy import PlaneCopy
from fuseplan.backends.cpu.windows import Axis
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim

_TESTED = 6  # vectors of src that one test guards: more would leave the registers


@dataclass(frozen=True)
class DepthwisePlanes(Template):
    """Tiles of rows x vectors of output pixels; rows of src are shifted in registers where they meet padding.

    reads:  src once from memory, again from the first cache for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of its plane
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and pixels are innermost

    Attributes:
        rows: output rows in a tile; 0 for whole planes, with as many rows to a vector as fit.
        vectors: vectors of pixels in a tile.
        block_planes: planes in a task.
        block_rows: output rows in a task.
    """

    name: ClassVar[str] = "depthwise_planes"

    rows: int
    vectors: int
    block_planes: int
    block_rows: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from depthwise_claims(kernel)
        last = kernel.dst.is_channels_last and prod(kernel.dst.shape[2:]) > 1
        yield claim(not last, Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield from model.layout_claims(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = PlanePlan(kernel, target)
        for rows, vectors in plan.tiles()[:2]:
            yield cls(rows, vectors, *plan.blocks(rows))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel, target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        work = convolution_of(kernel).flops * PlanePlan(kernel, target).waste(self.rows, self.vectors)
        return model.seconds(kernel, target, flops=work, traffic=self.traffic(kernel, target), efficiency=0.7)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding a product in a sum over the taps: taps * epsilon / 2 (Higham, 2002, section 3.1)."""
        return convolution_of(kernel).taps * model.unit_roundoff(kernel)

    def error_bound(self, kernel: Kernel) -> float:
        return self.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return _Writer(self, kernel, target).source()

    def pack(
        self, kernel: Kernel, target: Target, operand: KernelOperand, array: NDArray[Any]
    ) -> NDArray[Any]:
        """weight as [feature][tap]."""
        if operand.role != "weight":
            return super().pack(kernel, target, operand, array)
        return np.ascontiguousarray(array.reshape(array.shape[0], -1))


@dataclass(frozen=True)
class _Sheet:
    """One plane of results: where src and dst begin for it, and what belongs to its feature.

    `src` is row 0, column 0 under the first tap of the far axes, whose positions in src are `far`.
    """

    src: Value
    far: tuple[Index, ...]
    dst: Index
    feature: Index
    weight: Value
    known: dict[object, Value]


@dataclass(frozen=True)
class _Spot:
    """Where a tile stands on its sheet.

    Attributes:
        line: src at the row under the first tap, column 0; at the tile's first column where `column` is None.
        lines: whether each line of src under the tile exists (None: always).
        column: the first output column, where it is known.
        starts: output columns from the tile's first to the first of each vector.
        dst: the tile's first element.
    """

    line: Value
    lines: dict[int, Value | None]
    column: int | None
    starts: tuple[int, ...]
    dst: Index


class _Writer:
    """Writes one kernel."""

    def __init__(self, knobs: DepthwisePlanes, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel, self.plan = knobs, kernel, PlanePlan(kernel, target)
        self.conv = self.plan.conv
        slots = slots_of(kernel, workspace=self.plan.copies)
        self.frame = Frame(kernel, target, slots, f"{knobs.text}\n{kernel.text}")
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.tail = Elementwise(self.frame, "epilogue")
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.dst = self.frame.pointer("dst")
        self.copy = PlaneCopy(self.frame, self.plan, knobs.block_rows) if self.plan.copies else None
        if self.copy is None:
            self.far_strides, self.pitch = self.plan.strides
        else:
            self.far_strides, self.pitch = self.copy.far_strides, self.copy.pitch

    def source(self) -> Source:
        """The whole kernel: one phase, its tasks blocks of planes and of rows."""
        b, plan, knobs, conv = self.b, self.plan, self.knobs, self.conv
        planes = conv.batch * conv.channels
        row_blocks = -(-plan.row.out // knobs.block_rows)
        with self.frame.tasks(-(-planes // knobs.block_planes) * row_blocks) as task:
            first = task % row_blocks * knobs.block_rows
            last = b.smaller(first + knobs.block_rows, plan.row.out)
            begin = task // row_blocks * knobs.block_planes
            with b.loop(begin, b.smaller(begin + knobs.block_planes, planes), name="plane") as plane:
                self._plane(plane, first, last)
        return self.frame.source(workspace_per_thread=self.copy.nbytes if self.copy else 0)

    def _plane(self, plane: Value, first: Index, last: Index) -> None:
        """Rows `first` to `last` of all that is made from one plane of src."""
        b, conv, many = self.b, self.conv, self.conv.features_per_group
        channel, image = plane % conv.channels, plane // conv.channels
        strides = self.kernel.src.element_strides
        offset = image * strides[0] + channel * strides[1]
        if self.copy is None:
            src = b.at(self.frame.pointer("src"), offset)
        else:
            src = self.copy.emit(offset, channel, first)
        with b.loop(0, many, name="feature") as number:
            feature = channel * many + number
            known: dict[object, Value] = {}
            self.tail.prepare(Place(0, feature, False, self.lanes), known)
            weight = b.at(self.weight, feature * conv.taps)
            sheets = prod(axis.out for axis in self.plan.far)
            with b.loop(0, sheets, name="sheet") as position:
                dst = ((plane * many + number) * sheets + position) * (
                    self.plan.row.out * self.plan.column.out
                )
                sheet = self._sheet(src, position, dst, feature, weight, known)
                if self.knobs.rows:
                    self._rows(sheet, first, last)
                else:
                    self._whole(sheet)

    def _sheet(
        self,
        src: Value,
        position: Value,
        dst: Index,
        feature: Index,
        weight: Value,
        known: dict[object, Value],
    ) -> _Sheet:
        far: list[Index] = []
        offset, rest = self.b.const(0, I64), position
        for axis, stride in reversed(list(zip(self.plan.far, self.far_strides, strict=True))):
            at = rest % axis.out * axis.stride - axis.low
            offset, rest = offset + at * stride, rest // axis.out
            far.insert(0, at)
        return _Sheet(self.b.at(src, offset), tuple(far), dst, feature, weight, known)

    # ---- a plane whose rows are shorter than half a vector, or that is small altogether

    def _whole(self, sheet: _Sheet) -> None:
        """All results of a plane, in straight code; a vector holds as many whole rows as fit."""
        b, row, column = self.b, self.plan.row, self.plan.column
        size = self.plan.rows_a_vector * column.out
        src = Stretch(b, sheet.src, 0, (row.size - 1) * self.pitch + column.size)
        firsts = list(range(0, row.out * column.out, size))
        for begin in range(0, len(firsts), self.knobs.vectors):
            block = firsts[begin : begin + self.knobs.vectors]
            counts = [min(size, row.out * column.out - first) for first in block]
            values = [b.number(0.0) for _ in block]
            for positions, users in self._operands(block, counts).items():
                x = src.vector(positions)
                for number, tap in users:
                    values[number] = b.fma(x, b.broadcast(sheet.weight, tap), values[number])
            for value, first, count in zip(values, block, counts, strict=True):
                self._store(value, sheet, sheet.dst + first, count)

    def _operands(
        self, firsts: Sequence[int], counts: Sequence[int]
    ) -> dict[tuple[int | None, ...], list[tuple[int, int]]]:
        """The vectors of src that a block needs, and the (result, tap) pairs that each is for."""
        row, column = self.plan.row, self.plan.column
        found: dict[tuple[int | None, ...], list[tuple[int, int]]] = {}
        for number, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            outs = [divmod(first + lane, column.out) for lane in range(count)]
            for tap in range(row.kernel * column.kernel):
                y, x = divmod(tap, column.kernel)
                positions = tuple(self._position(row.at(out[0], y), column.at(out[1], x)) for out in outs)
                found.setdefault(positions, []).append((number, tap))
        return dict(
            sorted(found.items(), key=lambda item: min((at for at in item[0] if at is not None), default=0))
        )

    def _position(self, row: int | None, column: int | None) -> int | None:
        return None if row is None or column is None else row * self.pitch + column

    # ---- rows of any length

    def _rows(self, sheet: _Sheet, first: Index, last: Index) -> None:
        b, row = self.b, self.plan.row
        with b.loop(first, last, self.knobs.rows, name="row") as start:
            begin = b.smaller(start, row.out - self.knobs.rows)
            top = begin * row.stride - row.low
            lines = {line: self._inside(row, top + line) for line in row.users(self.knobs.rows)}
            line = b.at(sheet.src, top * self.pitch)
            dst = sheet.dst + begin * self.plan.column.out
            self._columns(sheet, _Spot(line, lines, 0, (), dst))

    def _inside(self, axis: Axis, position: Index) -> Value | None:
        return self.b.compare("ult", self.b.const(position, I64), axis.size) if axis.is_padded else None

    def _columns(self, sheet: _Sheet, line: _Spot) -> None:
        """Tiles along a row: a loop over those that read no padding, code of its own for each other."""
        column, width = self.plan.column, min(self.lanes, self.plan.column.out)
        starts, many = column.tiles(width), self.knobs.vectors
        groups = [starts[i : i + many] for i in range(0, len(starts), many)]
        inner = [g for g in groups[:-1] if column.is_inside(g[0], many * width)]
        for group in groups:
            relative = tuple(start - group[0] for start in group)
            if group not in inner:
                spot = replace(line, column=group[0], starts=relative, dst=line.dst + group[0])
                self._tile(sheet, spot)
            elif group == inner[0]:
                with self.b.loop(group[0], inner[-1][0] + 1, many * width, name="column") as first:
                    at = self.b.at(line.line, first * column.stride - column.low)
                    self._tile(
                        sheet, replace(line, line=at, column=None, starts=relative, dst=line.dst + first)
                    )

    def _tile(self, sheet: _Sheet, spot: _Spot) -> None:
        b, plan, rows = self.b, self.plan, self.knobs.rows
        sums = [[b.variable(b.vector, b.number(0.0)) for _ in spot.starts] for _ in range(rows)]
        with ExitStack() as nest:
            tap: Index = 0
            offset: Index = 0
            tests: list[Value] = []
            for axis, stride, position in zip(plan.far, self.far_strides, sheet.far, strict=True):
                index = nest.enter_context(b.loop(0, axis.kernel, name="tap"))
                tap = tap * axis.kernel + index
                offset = offset + index * (axis.dilation * stride)
                test = self._inside(axis, position + index * axis.dilation)
                tests += [test] if test is not None else []
            weight = b.at(sheet.weight, tap * (plan.row.kernel * plan.column.kernel))
            self._products(sums, replace(spot, line=b.at(spot.line, offset)), tests, weight)
        count = min(self.lanes, plan.column.out)
        for r, values in enumerate(sums):
            for start, value in zip(spot.starts, values, strict=True):
                self._store(value.get(), sheet, spot.dst + (r * plan.column.out + start), count)

    def _products(
        self, sums: Sequence[Sequence[Variable]], spot: _Spot, tests: list[Value], weight: Value
    ) -> None:
        """Adds src times weight over the taps of the last two axes."""
        b, row, column = self.b, self.plan.row, self.plan.column
        values = [[place.get() for place in places] for places in sums]
        pairs = [(v, tap) for tap in range(column.kernel) for v in range(len(spot.starts))]
        parts = [pairs[begin : begin + _TESTED] for begin in range(0, len(pairs), _TESTED)]
        for (line, users), part in product(row.users(self.knobs.rows).items(), parts):
            test = spot.lines[line]
            guards = [*tests, *([test] if test is not None else [])]
            elements = zip(part, self._elements(spot, line, guards, part), strict=True)
            for ((v, tap), x), (r, upper) in product(elements, users):
                w = b.broadcast(weight, upper * column.kernel + tap)
                values[r][v] = b.fma(x, w, values[r][v])
        for places, line_values in zip(sums, values, strict=True):
            for place, value in zip(places, line_values, strict=True):
                place.set(value)

    def _elements(
        self, spot: _Spot, line: int, guards: Sequence[Value], pairs: Sequence[tuple[int, int]]
    ) -> list[Value]:
        """What the given taps of the given vectors meet on one line; zeros where it is padding."""
        b = self.b
        if not guards:
            src = self._stretch(spot, line)
            return [src.vector(self._taken(spot, *pair)) for pair in pairs]
        both = guards[0]
        for other in guards[1:]:
            both = b.op(I1, f"and i1 {both.name}, {other.name}")
        places = [b.variable(b.vector, b.number(0.0)) for _ in pairs]
        with b.when(both):
            src = self._stretch(spot, line)
            for place, pair in zip(places, pairs, strict=True):
                place.set(src.vector(self._taken(spot, *pair)))
        return [place.get() for place in places]

    def _stretch(self, spot: _Spot, line: int) -> Stretch:
        """The part of a line that may be read: all of it, or, somewhere inside, what the tile reaches."""
        address = self.b.at(spot.line, line * self.pitch)
        if spot.column is not None:
            return Stretch(self.b, address, 0, self.plan.column.size if self.copy is None else self.pitch)
        return Stretch(self.b, address, 0, self.plan.column.reach(len(spot.starts) * self.lanes))

    def _taken(self, spot: _Spot, vector: int, tap: int) -> list[int | None]:
        column, start = self.plan.column, spot.starts[vector]
        outs = range(start, start + min(self.lanes, column.out))
        if spot.column is None:
            return [out * column.stride + tap * column.dilation for out in outs]
        return [column.at(spot.column + out, tap) for out in outs]

    def _store(self, value: Value, sheet: _Sheet, element: Index, count: int) -> None:
        dtype = self.kernel.dst.dtype
        value = self.tail.apply(value, Place(element, sheet.feature, False, count), sheet.known)
        where = self.b.at(self.dst, element, storage.element_type(dtype))
        storage.write(self.b, dtype, value, where, count=count)

"""Depthwise convolution with channels innermost: vectors along channels, tiles of output positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.depthwise_plan import Plan, convolution_of, depthwise_claims
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame, slots_of
from fuseplan.backends.cpu.ir import I1, Index, Value, Variable
from fuseplan.backends.cpu.windows import Axis
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim, lanes

_MULTIPLIER = 8  # features a channel: each has code of its own


@dataclass(frozen=True)
class Depthwise(Template):
    """Tiles of rows x columns of output positions, one vector of channels each; src is read where it is.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and channels are innermost

    Attributes:
        rows: output rows in a tile.
        columns: output positions along the last axis in a tile.
        block_rows: output rows in a task.
        block_vectors: vectors of channels in a task.
    """

    name: ClassVar[str] = "depthwise"

    rows: int
    columns: int
    block_rows: int
    block_vectors: int

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from depthwise_claims(kernel)
        conv = convolution_of(kernel)
        fewer = conv.features_per_group <= _MULTIPLIER
        yield claim(
            fewer,
            Reason.CHANNEL_MULTIPLIER,
            got=f"{conv.features_per_group} features a channel",
            want=f"at most {_MULTIPLIER}",
            operator=kernel.contraction_step,
        )
        yield claim(_features_innermost(kernel), Reason.CHANNELS_FIRST, got=str(kernel.dst))
        yield from model.layout_claims(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = Plan(kernel)
        for rows, columns in plan.tiles(target)[:2]:
            yield cls(rows, columns, *plan.blocks(target, rows, columns))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel, target, workspace=Plan(kernel).staged.elements)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        conv, plan = convolution_of(kernel), Plan(kernel)
        width = lanes(kernel, target)
        work = (
            conv.flops
            * (-(-conv.channels // width) * width / conv.channels)
            * plan.waste(self.rows, self.columns)
        )
        phases = 2 if plan.staged.copies else 1
        traffic = self.traffic(kernel, target)
        return model.seconds(kernel, target, flops=work, traffic=traffic, efficiency=0.7, phases=phases)

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
        """weight as [vector of channels][tap][feature], zeros after the last channel."""
        if operand.role != "weight":
            return super().pack(kernel, target, operand, array)
        conv, width = convolution_of(kernel), lanes(kernel, target)
        many = conv.features_per_group
        vectors = -(-conv.channels // width)
        padded = np.zeros((vectors * width * many, conv.taps), array.dtype)
        padded[: conv.features] = array.reshape(conv.features, conv.taps)
        return np.ascontiguousarray(padded.reshape(vectors, width * many, conv.taps).swapaxes(1, 2))


def _features_innermost(kernel: Kernel) -> bool:
    return kernel.dst.is_channels_last or prod(kernel.dst.shape[2:]) == 1


@dataclass(frozen=True)
class _Spot:
    """Where a tile stands: the first element under it in src (of the first channel), and its first in dst.

    `far` holds a position in src for each far axis, under the first tap; `lines` says of each line of the
    tile whether it is in src (None: always). `column` is the first column under a tile that reads padding.
    """

    src: Value
    dst: Index
    far: tuple[Index, ...]
    lines: dict[int, Value | None]
    column: int | None


def _parts(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


class _Writer:
    """Writes one kernel."""

    def __init__(self, knobs: Depthwise, kernel: Kernel, target: Target) -> None:
        self.knobs, self.kernel, self.plan = knobs, kernel, Plan(kernel)
        self.conv = self.plan.conv
        slots = slots_of(kernel, workspace=self.plan.staged.copies)
        self.frame = Frame(kernel, target, slots, f"{knobs.text}\n{kernel.text}")
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.head, self.tail = Elementwise(self.frame, "prologue"), Elementwise(self.frame, "epilogue")
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.dst = self.frame.pointer("dst")
        self.dtype = (
            "f64" if kernel.src.dtype == "f64" else "f32" if self.plan.staged.copies else kernel.src.dtype
        )
        self.image_stride, self.far_strides, self.row_stride, self.column_stride = self.plan.strides
        self.vectors = -(-self.conv.channels // self.lanes)
        self.held = self.plan.held(target, knobs.rows, knobs.columns)

    def source(self) -> Source:
        """The whole kernel: phase 0 where src must be copied, then one phase of tiles."""
        b, plan, knobs = self.b, self.plan, self.knobs
        workspace = self.frame.pointer("workspace") if plan.staged.copies else b.parameters[0]
        self.src = staging.emit(self.frame, plan.staged, workspace)
        row_blocks = -(-plan.row.out // knobs.block_rows)
        vector_blocks = -(-self.vectors // knobs.block_vectors)
        sheets = self.conv.batch * prod(axis.out for axis in plan.far)
        with self.frame.tasks(sheets * row_blocks * vector_blocks) as task:
            begin = task % vector_blocks * knobs.block_vectors
            rest = task // vector_blocks
            first, sheet = rest % row_blocks * knobs.block_rows, rest // row_blocks
            end = b.smaller(begin + knobs.block_vectors, self.vectors)
            last = b.smaller(first + knobs.block_rows, plan.row.out)
            with b.loop(first, last, knobs.rows, name="row") as start:
                row = b.smaller(start, plan.row.out - knobs.rows)
                self._line(sheet, row, begin, end)
        return self.frame.source(workspace=plan.staged.elements * model.itemsize(self.kernel))

    def _line(self, sheet: Value, row: Index, begin: Index, end: Index) -> None:
        """All tiles of `knobs.rows` output rows, over a block of channels."""
        b, plan = self.b, self.plan
        rest, offset = sheet, b.const(0, "i64")
        far: list[Index] = []
        for axis, stride in reversed(list(zip(plan.far, self.far_strides, strict=True))):
            position = rest % axis.out * axis.stride - axis.low
            offset, rest = offset + position * stride, rest // axis.out
            far.insert(0, position)
        top = row * plan.row.stride - plan.row.low
        offset = offset + rest * self.image_stride + top * self.row_stride
        lines = {line: self._inside(plan.row, top + line) for line in plan.row.users(self.knobs.rows)}
        dst = (sheet * plan.row.out + row) * plan.column.out
        spot = _Spot(b.at(self.src, offset, self._stored), dst, tuple(far), lines, None)
        self._columns(spot, begin, end)

    @property
    def _stored(self) -> str:
        return storage.element_type(self.dtype)

    def _inside(self, axis: Axis, position: Index) -> Value | None:
        return self.b.compare("ult", self.b.const(position, "i64"), axis.size) if axis.is_padded else None

    def _columns(self, line: _Spot, begin: Index, end: Index) -> None:
        """Tiles along the last axis: a loop over those without padding, code of its own for each other."""
        axis, count = self.plan.column, self.knobs.columns
        starts = axis.tiles(count)
        inner = [start for start in starts[:-1] if axis.is_inside(start, count)]
        for start in starts:
            if start not in inner:
                first = None if axis.is_inside(start, count) else axis.first(start)
                self._channels(self._at(line, start, first), begin, end)
            elif start == inner[0]:
                with self.b.loop(start, inner[-1] + 1, count, name="column") as column:
                    self._channels(self._at(line, column, None), begin, end)

    def _at(self, line: _Spot, column: Index, first: int | None) -> _Spot:
        axis = self.plan.column
        offset = (column * axis.stride - axis.low) * self.column_stride
        dst = (line.dst + column) * self.conv.features
        return replace(line, src=self.b.at(line.src, offset, self._stored), dst=dst, column=first)

    def _channels(self, spot: _Spot, begin: Index, end: Index) -> None:
        """One tile, over a block of channels."""
        b, whole = self.b, self.conv.channels // self.lanes
        if whole:
            with b.loop(begin, b.smaller(end, whole), name="vector") as vector:
                self._features(spot, vector, self.lanes)
        if whole < self.vectors:
            with b.when(b.compare("sgt", b.const(end, "i64"), whole)):
                self._features(spot, whole, self.conv.channels - whole * self.lanes)

    def _features(self, spot: _Spot, vector: Index, count: int) -> None:
        many = self.conv.features_per_group
        for part in range(many):
            features = min(self.lanes, count * many - part * self.lanes)
            if features > 0:
                self._tile(spot, vector, count, part, features)

    # ---- one tile

    def _tile(self, spot: _Spot, vector: Index, count: int, part: int, features: int) -> None:
        """The `part`-th vector of features made from one vector of channels, of which `count` exist."""
        b, knobs, width = self.b, self.knobs, self.lanes * self.conv.features_per_group
        sums = [
            [b.variable(b.vector, b.number(0.0)) for _ in range(knobs.columns)] for _ in range(knobs.rows)
        ]
        channel = vector * self.lanes
        known: dict[object, Value] = {}
        place = Place(0, channel, True, count)
        self.head.prepare(place, known)
        weight = b.at(self.weight, vector * (self.conv.taps * width) + part * self.lanes)
        with ExitStack() as nest:
            tap: Index = 0
            offset: Index = channel
            inside: list[Value] = []
            for axis, stride, position in zip(self.plan.far, self.far_strides, spot.far, strict=True):
                index = nest.enter_context(b.loop(0, axis.kernel, name="tap"))
                tap = tap * axis.kernel + index
                offset = offset + index * (axis.dilation * stride)
                test = self._inside(axis, position + index * axis.dilation)
                inside += [test] if test is not None else []
            src = b.at(spot.src, offset, self._stored)
            near = self.plan.row.kernel * self.plan.column.kernel
            read = _Reader(self, spot, src, place, known, inside, part)
            self._products(sums, read, b.at(weight, tap * (near * width)))
        feature = channel * self.conv.features_per_group + part * self.lanes
        self._store([[place.get() for place in line] for line in sums], spot, feature, features)

    def _products(self, sums: Sequence[Sequence[Variable]], read: _Reader, weight: Value) -> None:
        """Adds src times weight over the taps of the last two axes."""
        b, row, column = self.b, self.plan.row, self.plan.column
        width = self.lanes * self.conv.features_per_group
        values = [[place.get() for place in line] for line in sums]
        columns = column.users(self.knobs.columns)
        for (line, rows), part in product(
            row.users(self.knobs.rows).items(), _parts(list(columns), self.held)
        ):
            elements = zip(part, read.line(line, part), strict=True)
            for (r, upper), (at, x) in product(rows, elements):
                for c, tap in columns[at]:
                    w = b.load(b.at(weight, (upper * column.kernel + tap) * width))
                    values[r][c] = b.fma(x, w, values[r][c])
        for places, line_values in zip(sums, values, strict=True):
            for place, value in zip(places, line_values, strict=True):
                place.set(value)

    def _store(self, values: list[list[Value]], spot: _Spot, feature: Index, count: int) -> None:
        b, dtype, features = self.b, self.kernel.dst.dtype, self.conv.features
        known: dict[object, Value] = {}
        for r, line in enumerate(values):
            for c, value in enumerate(line):
                element = spot.dst + feature + (r * self.plan.column.out + c) * features
                result = self.tail.apply(value, Place(element, feature, True, count), known)
                where = b.at(self.dst, element, storage.element_type(dtype))
                storage.write(b, dtype, result, where, count=count)


@dataclass(frozen=True)
class _Reader:
    """Reads lines of src for one tile: prologue applied, zeros where there is padding."""

    writer: _Writer
    spot: _Spot
    src: Value
    place: Place
    known: dict[object, Value]
    inside: list[Value]
    part: int

    def line(self, line: int, columns: Sequence[int]) -> list[Value]:
        """The elements of one line at the given columns, counted from the tile's first."""
        b = self.writer.b
        test = self.spot.lines[line]
        tests = [*self.inside, *([test] if test is not None else [])]
        if not tests:
            return [self._element(line, column) for column in columns]
        both = tests[0]
        for other in tests[1:]:
            both = b.op(I1, f"and i1 {both.name}, {other.name}")
        places = [b.variable(b.vector, b.number(0.0)) for _ in columns]
        with b.when(both):
            for place, column in zip(places, columns, strict=True):
                place.set(self._element(line, column))
        return [place.get() for place in places]

    def _element(self, line: int, column: int) -> Value:
        writer, b = self.writer, self.writer.b
        first = self.spot.column
        if first is not None and not 0 <= first + column < writer.plan.column.size:
            return b.number(0.0)
        where = b.at(self.src, line * writer.row_stride + column * writer.column_stride, writer._stored)
        x = storage.read(b, writer.dtype, where, writer.lanes, count=self.place.count)
        if not writer.plan.staged.copies:
            x = writer.head.apply(x, self.place, self.known)
        many = writer.conv.features_per_group
        if many == 1:
            return x
        return b.shuffle(x, x, [(self.part * writer.lanes + lane) // many for lane in range(writer.lanes)])

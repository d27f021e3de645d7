"""Depthwise convolution, and groups of few channels, pixels innermost: vectors along a plane's rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.depthwise_plan import PlanePlan, depthwise_claims
from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import Positions, Stretch
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import ceil_div
from fuseplan.backends.cpu.plane_copy import PlaneCopy
from fuseplan.backends.cpu.sums import Sums
from fuseplan.backends.cpu.taps import Count, FarTaps, Joining, counted, counted_taps, guarded, inside
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Step
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, lanes
from fuseplan.messages.reasons import Claim, Reason, claim

_WIDEST = 16  # channels of a group: with more, the rows of all of them leave the near caches
_TESTED = 6  # vectors of src that one test guards: more would leave the registers


@dataclass(frozen=True)
class DepthwisePlanes(model.SumOfProducts):
    """Tiles of rows x vectors of output pixels; rows of src are shifted in registers where they meet padding.

    reads:  src once from memory, again from the first cache for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of its plane
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and pixels are innermost

    Attributes:
        rows: output rows in a tile; 0 for whole planes, with as many rows to a vector as fit.
        vectors: vectors of pixels in a tile.
        features: features in a tile: each vector of src serves all of them.
        block_planes: planes of src, or groups of them, in a task.
        block_rows: output rows in a task.
    """

    rows: int
    vectors: int
    features: int
    block_planes: int
    block_rows: int

    name: ClassVar[str] = "depthwise_planes"
    efficiency: ClassVar[float] = 1.0
    pools: ClassVar[bool] = True
    opens: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield from cls.groups(kernel, target)
        last = kernel.dst.is_channels_last and prod(kernel.dst.shape[2:]) > 1
        yield claim(not last, Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield model.padding_claim(kernel)

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        """What is asked of the convolution's groups."""
        yield from depthwise_claims(kernel)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = PlanePlan(kernel, target)
        for tile in plan.tiles()[:2]:
            yield cls(*tile, *plan.blocks(*tile))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return PlanePlan(kernel, target).waste(self.rows, self.vectors, self.features)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """weight as [feature][channel of a group][tap]."""
        return ()


@dataclass(frozen=True)
class GroupedPlanes(DepthwisePlanes):
    """Depthwise's tiles of pixels for several features of a group at once, summed over the group's channels.

    reads:  src once from memory, again from the first caches for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of a group's planes
    writes: dst once
    chosen: groups of few channels, or one of at most half a vector's, and pixels are innermost
    """

    name: ClassVar[str] = "grouped_planes"

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        conv, few = kernel.contraction, lanes(kernel, target) // 2
        groups, channels = conv.groups, conv.channels_per_group
        is_plain = bool(conv.kernel) and not (conv.written or conv.weight_per_batch)
        fits = 2 <= channels <= (_WIDEST if groups > 1 else few) and (groups > 1 or is_plain)
        want = f"2 or more groups of 2 to {_WIDEST} channels, or a convolution of 2 to {few}"
        yield model.about(kernel, fits, Reason.GROUP_WIDTH, f"{groups} of {channels} channels", want)


@dataclass(frozen=True)
class _Sheet:
    """Planes of results, one for each feature of a tile, that are made from the same planes of src.

    Attributes:
        src: row 0, column 0 under the first tap of the far axes.
        far: position in src along each far axis, under the first tap.
        dst: the first element of the first plane.
        feature: the first feature.
        weight: its weights; those of the next feature follow.
        known: what the epilogue knows of each feature.
    """

    src: Value
    far: tuple[Index, ...]
    dst: Index
    feature: Index
    weight: Value
    known: Sequence[dict[object, Value]]


@dataclass(frozen=True)
class _Spot:
    """Where a tile stands on its sheet.

    Attributes:
        line: src at the row under the first tap, column 0; at the tile's first column where `column` is None.
        lines: whether each line of src under the tile exists.
        column: the first output column, where it is known.
        starts: output columns from the tile's first to the first of each vector.
        row: the position in src under the first tap of the tile's first row.
        dst: the tile's first element.
    """

    line: Value
    lines: dict[int, Value]
    column: int | None
    starts: tuple[int, ...]
    dst: Index
    row: Index


class Writer:
    """Writes one kernel."""

    def __init__(self, knobs: DepthwisePlanes, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(knobs, kernel, target, workspace=PlanePlan(kernel, target).copies)
        self.knobs, self.kernel = knobs, self.frame.kernel
        self.plan = PlanePlan(self.kernel, target)
        self.conv = self.plan.conv
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.tail = Elementwise(self.frame, "epilogue")
        self.joining = Joining(self.frame)
        self.copy = PlaneCopy(self.frame, self.plan, knobs.block_rows) if self.plan.copies else None
        self.size = self.plan.row.out * self.plan.column.out
        self.sheets = prod(axis.out for axis in self.plan.far)
        self._features: dict[tuple[object, int], Index] = {}
        strides = (self.copy.far_strides, self.copy.pitch) if self.copy else self.plan.strides
        self.far, self.pitch = FarTaps(self.b, self.plan.far, strides[0]), strides[1]

    def source(self) -> Source:
        """The whole kernel: one phase, its tasks blocks of planes and of rows."""
        b, plan, knobs, conv = self.b, self.plan, self.knobs, self.conv
        planes = conv.batch * conv.groups
        row_blocks = -(-plan.row.out // knobs.block_rows)
        block: Index = knobs.block_planes
        if not isinstance(planes, int):  # fewer where an extent has few planes
            block = b.smaller(block, planes // (self.frame.threads * 4) + 1)
        with self.frame.tasks(ceil_div(planes, block) * row_blocks) as task:
            first = task % row_blocks * knobs.block_rows
            last = b.smaller(first + knobs.block_rows, plan.row.out)
            begin = task // row_blocks * block
            with b.loop(begin, b.smaller(begin + block, planes), name="plane") as plane:
                self._plane(plane, first, last)
        return self.frame.source(per_thread=self.copy.nbytes if self.copy else 0)

    def _plane(self, plane: Value, first: Index, last: Index) -> None:
        """Rows `first` to `last` of all that is made from one group of planes of src."""
        b, conv, many = self.b, self.conv, self.conv.features_per_group
        group, image = plane % conv.groups, plane // conv.groups
        strides, channel = self.kernel.src.element_strides, group * conv.channels_per_group
        offset = image * strides[0] + channel * strides[1]
        if self.copy is None:
            src = b.at(self.frame.pointer("src"), offset)
        else:
            src = self.copy.emit(offset, channel, first)
        with b.loop(0, many, self.knobs.features, name="feature") as start:
            number = b.smaller(start, many - self.knobs.features)
            feature = group * many + number
            known: list[dict[object, Value]] = [{} for _ in range(self.knobs.features)]
            for index, each in enumerate(known):
                self.tail.prepare(Place(0, self._next(feature, index), False, self.lanes), each)
            weight = b.at(self.joining.weight, feature * conv.depth)
            with b.loop(0, self.sheets, name="sheet") as position:
                dst = ((plane * many + number) * self.sheets + position) * self.size
                far, under, _ = self.far.under(position)
                sheet = _Sheet(b.at(src, under), far, dst, feature, weight, known)
                if self.knobs.rows:
                    self._rows(sheet, first, last)
                else:
                    self._whole(sheet)

    def _next(self, feature: Index, index: int) -> Index:
        """A feature of the tile, always as the same value, by which what is known of it is found."""
        key = (feature if isinstance(feature, int) else feature.name, index)
        if key not in self._features:
            self._features[key] = feature + index
        return self._features[key]

    @contextmanager
    def _taps(self, sheet: _Sheet) -> Iterator[tuple[Value, Index, list[Value]]]:
        """Loops over the taps of the far axes: weights and offset in src of each, and whether it is there."""
        with self.far.each(sheet.far) as (tap, offset, tests):
            near = self.plan.row.kernel * self.plan.column.kernel
            yield self.b.at(sheet.weight, tap * near), offset, tests

    # ---- a plane whose rows are shorter than half a vector, or that is small altogether

    def _whole(self, sheet: _Sheet) -> None:
        """All results of a plane, in straight code; a vector holds as many whole rows as fit."""
        b, plan = self.b, self.plan
        each = plan.rows_a_vector * plan.column.out
        firsts = list(range(0, self.size, each))
        for begin in range(0, len(firsts), self.knobs.vectors):
            block = firsts[begin : begin + self.knobs.vectors]
            counts = [min(each, self.size - first) for first in block]
            sums = Sums(b, self.knobs.features, len(block), self.conv.fill)
            with self._taps(sheet) as (weight, offset, _):
                end = (plan.row.size - 1) * self.pitch + plan.column.size
                src = Stretch(b, b.at(sheet.src, offset), 0, end, self.conv.fill)
                self._whole_products(sums, src, self._operands(block, counts), weight)
            # Read one by one: in another order LLVM's schedule of 14x14 pixels takes 1.1 times as long.
            for index, number in product(range(self.knobs.features), range(len(block))):
                element = sheet.dst + block[number]
                outs = range(block[number], block[number] + counts[number])
                made = self.joining.finished(
                    sums.get(index, number), partial(self._whole_counts, sheet, outs)
                )
                self._store(made, sheet, index, element, counts[number])

    def _whole_counts(self, sheet: _Sheet, outs: range) -> Iterator[Count]:
        """How many taps of some outputs of a plane count, along far axes and in the plane."""
        row, column = self.plan.row, self.plan.column
        yield from (counted(self.b, *each) for each in zip(self.plan.far, sheet.far, strict=True))
        firsts = [(row.first(out // column.out), column.first(out % column.out)) for out in outs]
        yield self._lanes([counted_taps(row, above) * counted_taps(column, left) for above, left in firsts])

    def _lanes(self, counts: list[int]) -> tuple[int, ...]:
        return (*counts, *[1] * (self.lanes - len(counts)))

    def _counts(self, sheet: _Sheet, spot: _Spot, vector: int, row: int) -> Iterator[Count]:
        """How many taps of a vector of a tile's outputs count, along each axis."""
        column = self.plan.column
        yield from (counted(self.b, *each) for each in zip(self.plan.far, sheet.far, strict=True))
        yield counted(self.b, self.plan.row, spot.row + row * self.plan.row.stride)
        if spot.column is None:
            yield column.kernel
            return
        begin = spot.column + spot.starts[vector]
        outs = range(begin, begin + min(self.lanes, column.out))
        yield self._lanes([counted_taps(column, column.first(out)) for out in outs])

    def _whole_products(
        self, sums: Sums, src: Stretch, operands: Mapping[Positions, list[tuple[int, int]]], weight: Value
    ) -> None:
        """Adds each operand times its weights to the results that it is for."""
        b = self.b
        with sums.open() as values:
            for positions, users in operands.items():
                x = src.vector(positions)
                for index, (number, tap) in product(range(self.knobs.features), users):
                    factor = partial(b.broadcast, weight, index * self.conv.depth + tap)
                    values[index][number] = self.joining.join(x, values[index][number], factor)

    def _operands(
        self, firsts: Sequence[int], counts: Sequence[int]
    ) -> dict[Positions, list[tuple[int, int]]]:
        """The vectors of src that a block needs, and the (result, tap) pairs that each is for."""
        row, column = self.plan.row, self.plan.column
        found: dict[Positions, list[tuple[int, int]]] = {}
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
            lines = {line: inside(b, row, top + line) for line in row.users(self.knobs.rows)}
            line = b.at(sheet.src, top * self.pitch)
            dst = sheet.dst + begin * self.plan.column.out
            self._columns(sheet, _Spot(line, lines, 0, (), dst, top))

    def _columns(self, sheet: _Sheet, line: _Spot) -> None:
        """Tiles along a row: a loop over those that read no padding, code of its own for each other."""
        column, width = self.plan.column, min(self.lanes, self.plan.column.out)
        step = self.knobs.vectors * width
        before, inner, behind = column.starts(step)
        whole = replace(line, starts=tuple(range(0, step, width)))
        for start in before:
            self._tile(sheet, replace(whole, column=start, dst=line.dst + start))
        if inner:
            with self.b.loop(inner[0], inner[-1] + 1, step, name="column") as first:
                at = self.b.at(line.line, first * column.stride - column.low)
                self._tile(sheet, replace(whole, line=at, column=None, dst=line.dst + first))
        for start in behind:
            self._tile(sheet, replace(whole, column=start, dst=line.dst + start))
        # The last vector starts early instead of being shorter.
        rest = range((column.tiles(step) - 1) * step, column.out, width)
        begin, *others = (min(start, column.out - width) for start in rest)
        starts = (0, *(start - begin for start in others))
        self._tile(sheet, replace(line, column=begin, starts=starts, dst=line.dst + begin))

    def _tile(self, sheet: _Sheet, spot: _Spot) -> None:
        rows = self.knobs.rows
        sums = Sums(self.b, self.knobs.features * rows, len(spot.starts), self.conv.fill)
        with self._taps(sheet) as (weight, offset, tests):
            self._products(sums, replace(spot, line=self.b.at(spot.line, offset)), tests, weight)
        count = min(self.lanes, self.plan.column.out)
        for index, (v, start), r in product(range(self.knobs.features), enumerate(spot.starts), range(rows)):
            element = spot.dst + (r * self.plan.column.out + start)
            value = sums.get(index * rows + r, v)
            made = self.joining.finished(value, partial(self._counts, sheet, spot, v, r))
            self._store(made, sheet, index, element, count)

    def _products(self, sums: Sums, spot: _Spot, tests: list[Value], weight: Value) -> None:
        """Adds src times weight over the taps of the last two axes."""
        b, row, column = self.b, self.plan.row, self.plan.column
        pairs = [(v, tap) for tap in range(column.kernel) for v in range(len(spot.starts))]
        parts = [pairs[begin : begin + _TESTED] for begin in range(0, len(pairs), _TESTED)]
        with sums.open() as values:
            for (line, users), part in product(row.users(self.knobs.rows).items(), parts):
                read = self._elements(spot, line, part)
                found = guarded(b, [*tests, spot.lines[line]], len(part), read, self.conv.fill)
                elements = zip(part, found, strict=True)
                for ((v, tap), x), index, (r, upper) in product(elements, range(self.knobs.features), users):
                    where = index * self.conv.depth + upper * column.kernel + tap
                    at = index * self.knobs.rows + r
                    values[at][v] = self.joining.join(x, values[at][v], partial(b.broadcast, weight, where))

    def _elements(self, spot: _Spot, line: int, pairs: Sequence[tuple[int, int]]) -> Iterator[Value]:
        """What the given taps of the given vectors meet on one line."""
        src = self._stretch(spot, line)
        yield from (src.vector(self._taken(spot, *pair)) for pair in pairs)

    def _stretch(self, spot: _Spot, line: int) -> Stretch:
        """The part of a line that may be read: all of it, or, somewhere inside, what the tile reaches."""
        address = self.b.at(spot.line, line * self.pitch)
        if spot.column is not None:
            end = self.plan.column.size if self.copy is None else self.pitch
        else:
            end = self.plan.column.reach(len(spot.starts) * self.lanes)
        return Stretch(self.b, address, 0, end, self.conv.fill)

    def _taken(self, spot: _Spot, vector: int, tap: int) -> list[int | None]:
        column, start = self.plan.column, spot.starts[vector]
        outs = range(start, start + min(self.lanes, column.out))
        if spot.column is None:
            return [out * column.stride + tap * column.dilation for out in outs]
        return [column.at(spot.column + out, tap) for out in outs]

    def _store(self, value: Value, sheet: _Sheet, index: int, first: Index, count: int) -> None:
        """Writes pixels of one of the tile's features; `first` is where the first feature's would go."""
        element = first + index * (self.sheets * self.size)
        place = Place(element, self._next(sheet.feature, index), False, count)
        finish(self.frame, self.tail, value, place, sheet.known[index])

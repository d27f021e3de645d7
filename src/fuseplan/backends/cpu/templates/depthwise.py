"""Depthwise convolution, and many narrow groups, channels innermost: vectors along channels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.depthwise_plan import Plan, depthwise_claims
from fuseplan.backends.cpu.elementwise import Elementwise, Place, finish
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.gather import combined
from fuseplan.backends.cpu.grouping import grouping
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import ceil_div, even, pieces
from fuseplan.backends.cpu.sums import Sums
from fuseplan.backends.cpu.taps import FarTaps, Joining, counted, guarded, inside
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Step
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, lanes, moved_once
from fuseplan.messages.reasons import Claim, Reason, claim

_MULTIPLIER = 8  # features a channel: each has code of its own
_WIDEST = 16  # channels of a group: the products of each have code of their own


@dataclass(frozen=True)
class Depthwise(model.SumOfProducts):
    """Tiles of rows x columns of output positions, one vector of channels per position; src is read in place.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and channels are innermost

    Attributes:
        rows: output rows in a tile.
        columns: output positions along the last axis in a tile.
        block_rows: output rows in a task.
        blocks: vectors of channels in a task.
    """

    rows: int
    columns: int
    block_rows: int
    blocks: int

    name: ClassVar[str] = "depthwise"
    efficiency: ClassVar[float] = 1.0
    pools: ClassVar[bool] = True
    opens: ClassVar[bool] = True
    ranges: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield from cls.groups(kernel, target)
        yield claim(model.features_innermost(kernel), Reason.CHANNELS_FIRST, got=str(kernel.dst))
        yield model.padding_claim(kernel)

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        """What is asked of the convolution's groups."""
        yield from depthwise_claims(kernel)
        many, most = kernel.contraction.features_per_group, f"at most {_MULTIPLIER}"
        fewer, got = many <= _MULTIPLIER, f"{many} features a channel"
        yield model.about(kernel, fewer, Reason.CHANNEL_MULTIPLIER, got, most)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = Plan(kernel, target)
        for rows, columns in plan.tiles()[:2]:
            yield cls(rows, columns, *plan.blocks(rows, columns))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return moved_once(kernel, Plan(kernel, target).staged.elements * model.itemsize(kernel))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return Plan(kernel, target).waste(self.rows, self.columns)

    def phases(self, kernel: Kernel, target: Target) -> int:
        return 2 if Plan(kernel, target).staged.copies else 1

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """weight as [block of channels][tap][vector of features][channel of a group][lane]."""
        return grouping(kernel.contraction, lanes(kernel, target)).steps


@dataclass(frozen=True)
class Grouped(Depthwise):
    """Depthwise's tiles over whole groups: a vector of channels is shuffled once for each channel of a group.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: groups so narrow that two or more have their features in one vector, and channels are innermost
    """

    name: ClassVar[str] = "grouped"

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        conv, most = kernel.contraction, lanes(kernel, target) // 2
        channels, features = conv.channels_per_group, conv.features_per_group
        fits = conv.groups > 1 and 2 <= channels <= _WIDEST and features <= most
        got = f"{conv.groups} groups of {channels} channels, {features} features each"
        want = f"2 or more groups of 2 to {_WIDEST} channels, at most {most} features each"
        yield model.about(kernel, fits, Reason.GROUP_WIDTH, got, want)


Pairs = Sequence[tuple[int, int]]  # an output and a tap
Pieces = list[tuple[int, Value]]  # vectors of channels, each with its first
_Use = tuple[int, tuple[int, int], tuple[Value, int, int]]


@dataclass(frozen=True)
class _Spot:
    """Where a tile stands: the first element under it in src (of the first channel), and its first in dst.

    `far` holds a position in src for each far axis, under the first tap, `row` and `at` those of the last two
    axes; `lines` says of each line of the tile whether it is in src. `column` is the first column under a
    tile that reads padding.
    """

    src: Value
    dst: Index
    far: tuple[Index, ...]
    row: Index
    at: Index
    lines: dict[int, Value]
    column: int | None


def _groups(values: Sequence[int], size: int) -> list[Sequence[int]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


class Writer:
    """Writes one kernel."""

    def __init__(self, knobs: Depthwise, kernel: Kernel, target: Target) -> None:
        self.frame = Frame(knobs, kernel, target, workspace=Plan(kernel, target).staged.copies)
        self.knobs, self.kernel = knobs, self.frame.kernel
        self.plan = Plan(self.kernel, target)
        self.conv = self.plan.conv
        self.b, self.lanes = self.frame.body, self.frame.lanes
        self.head, self.tail = Elementwise(self.frame, "prologue"), Elementwise(self.frame, "epilogue")
        self.joining = Joining(self.frame)
        self.dtype = kernel.compute_dtype if self.plan.staged.copies else kernel.src.dtype
        self.image_stride, far_strides, self.row_stride, self.column_stride = self.plan.strides
        self.far = FarTaps(self.b, self.plan.far, far_strides)
        self.held = self.plan.held(knobs.rows, knobs.columns)
        self.grouping = self.plan.grouping
        # Weights of one tap for all features of a block.
        self.tap_size = self.grouping.parts * self.grouping.products * self.lanes

    def source(self) -> Source:
        """The whole kernel: phase 0 where src must be copied, then one phase of tiles."""
        b, plan, knobs = self.b, self.plan, self.knobs
        workspace = self.frame.pointer("workspace") if plan.staged.copies else b.parameters[0]
        self.src = staging.emit(self.frame, plan.staged, workspace)
        block_groups = -(-self.grouping.blocks // knobs.blocks)
        sheets = self.conv.batch * prod(axis.out for axis in plan.far)
        tiles, parts = plan.row.tiles(knobs.rows), sheets * block_groups
        block_rows = even(self.frame, tiles, parts, knobs.block_rows, knobs.rows)
        row_blocks = ceil_div(plan.row.out, block_rows)
        with self.frame.tasks(sheets * row_blocks * block_groups) as task:
            begin = task % block_groups * knobs.blocks
            rest = task // block_groups
            first, sheet = rest % row_blocks * block_rows, rest // row_blocks
            end = b.smaller(begin + knobs.blocks, self.grouping.blocks)
            last = b.smaller(first + block_rows, plan.row.out)
            with b.loop(first, last, knobs.rows, name="row") as start:
                row = b.smaller(start, plan.row.out - knobs.rows)
                self._line(sheet, row, begin, end)
        return self.frame.source(**plan.staged.workspace())

    def _line(self, sheet: Value, row: Index, begin: Index, end: Index) -> None:
        """All tiles of `knobs.rows` output rows, over a block of channels."""
        b, plan = self.b, self.plan
        far, offset, image = self.far.under(sheet)
        top = row * plan.row.stride - plan.row.low
        offset = offset + image * self.image_stride + top * self.row_stride
        lines = {line: inside(b, plan.row, top + line) for line in plan.row.users(self.knobs.rows)}
        dst = (sheet * plan.row.out + row) * plan.column.out
        spot = _Spot(b.at(self.src, offset, self.stored), dst, far, top, 0, lines, None)
        self._columns(spot, begin, end)

    @property
    def stored(self) -> str:
        """The type of one element of what is read."""
        return storage.element_type(self.dtype)

    def _columns(self, line: _Spot, begin: Index, end: Index) -> None:
        """Tiles along the last axis: a loop over those without padding, code of its own for each other."""
        axis, count = self.plan.column, self.knobs.columns
        before, inner, behind = axis.starts(count)
        for start in before:
            self._channels(self._at(line, start, axis.first(start)), begin, end)
        if inner:
            with self.b.loop(inner[0], inner[-1] + 1, count, name="column") as column:
                self._channels(self._at(line, column, None), begin, end)
        for start in (*behind, axis.out - count):
            first = None if axis.is_inside(start, count) else axis.first(start)
            self._channels(self._at(line, start, first), begin, end)

    def _at(self, line: _Spot, column: Index, first: int | None) -> _Spot:
        axis = self.plan.column
        offset = (column * axis.stride - axis.low) * self.column_stride
        dst = (line.dst + column) * self.kernel.pitch
        at = column * axis.stride - axis.low
        return replace(line, src=self.b.at(line.src, offset, self.stored), dst=dst, at=at, column=first)

    def _channels(self, spot: _Spot, begin: Index, end: Index) -> None:
        """One tile, over some blocks of channels."""
        channels, each, task = self.conv.channels, self.grouping.channels, (begin, end)
        part = partial(self._parts, spot)
        pieces(self.b, channels, each, part, name="block", within=task, numbered=True)

    def _parts(self, spot: _Spot, block: Index, count: int) -> None:
        for part in range(self.grouping.parts):
            if self.grouping.features_of(count, part):
                self._tile(spot, block, count, part)

    # ---- one tile

    def _tile(self, spot: _Spot, block: Index, count: int, part: int) -> None:
        """One vector of the features made from a block of channels, of which `count` exist."""
        b, pack = self.b, self.grouping
        sums = Sums(b, self.knobs.rows, self.knobs.columns, self.conv.fill)
        channel = block * pack.channels
        known: dict[object, Value] = {}
        place = Place(0, channel, True, min(count, self.lanes))
        self.head.prepare(place, known)
        first = block * (self.conv.taps * self.tap_size) + part * (pack.products * self.lanes)
        weight = b.at(self.joining.weight, first)
        with self.far.each(spot.far) as (tap, offset, tests):
            src = b.at(spot.src, offset + channel, self.stored)
            near = self.plan.row.kernel * self.plan.column.kernel
            read = _Reader(self, spot, src, place, known, tests, count)
            self._products(sums, read, part, b.at(weight, tap * (near * self.tap_size)))
        feature = block * pack.features + part * self.lanes
        self._store(sums.values(), spot, feature, pack.features_of(count, part))

    def _products(self, sums: Sums, read: _Reader, part: int, weight: Value) -> None:
        """Adds src times weight over the taps of the last two axes and the channels of a group."""
        b, row, column, pack = self.b, self.plan.row, self.plan.column, self.grouping
        columns = column.users(self.knobs.columns)
        sources = [pack.sources(part, i, pack.features_of(read.count, part)) for i in range(pack.products)]
        lines = row.users(self.knobs.rows).items()

        def uses(rows: Pairs, some: Sequence[int], elements: list[Pieces]) -> Iterator[_Use]:
            """Each product of some columns of a line: its number in the group, its row, its element."""
            for number, positions in enumerate(sources):
                xs = [combined(b, vectors, positions) for vectors in elements]
                users = [(x, c, tap) for at, x in zip(some, xs, strict=True) for c, tap in columns[at]]
                yield from ((number, of_row, user) for of_row, user in product(rows, users))

        with sums.open() as values:
            for (line, rows), some in product(lines, _groups(list(columns), self.held)):
                elements = read.line(line, some)
                for number, (r, upper), (x, c, tap) in uses(rows, some, elements):
                    where = (upper * column.kernel + tap) * self.tap_size + number * self.lanes
                    factor = partial(self._factor, weight, where)
                    values[r][c] = self.joining.join(x, values[r][c], factor)

    def _factor(self, weight: Value, where: int) -> Value:
        return self.b.load(self.b.at(weight, where))

    def _store(self, values: list[list[Value]], spot: _Spot, feature: Index, count: int) -> None:
        known: dict[object, Value] = {}
        for r, line in enumerate(values):
            for c, value in enumerate(line):
                place = r * self.plan.column.out + c
                element = spot.dst + feature + place * self.kernel.pitch
                made = self.joining.finished(value, partial(self._counts, spot, r, c))
                finish(self.frame, self.tail, made, Place(element, feature, True, count), known)

    def _counts(self, spot: _Spot, row: int, column: int) -> Iterator[Index]:
        """How many taps of one of a tile's outputs count, along each axis."""
        last = self.plan.column
        yield from (counted(self.b, *each) for each in zip(self.plan.far, spot.far, strict=True))
        yield counted(self.b, self.plan.row, spot.row + row * self.plan.row.stride)
        is_inside = spot.column is None and not self.plan.staged.copies
        yield last.kernel if is_inside else counted(self.b, last, spot.at + column * last.stride)


@dataclass(frozen=True)
class _Reader:
    """Reads lines of src for one tile: prologue applied, `fill` where there is padding."""

    writer: Writer
    spot: _Spot
    src: Value
    place: Place
    known: dict[object, Value]
    inside: list[Value]
    count: int

    def line(self, line: int, columns: Sequence[int]) -> list[list[tuple[int, Value]]]:
        """The channels of one line at some columns, counted from the tile's first, in pieces of a vector."""
        b = self.writer.b
        starts = range(0, self.count, b.lanes)
        wanted = list(product(columns, starts))
        elements = (self._element(line, *each) for each in wanted)
        fill = self.writer.conv.fill
        found = guarded(b, [*self.inside, self.spot.lines[line]], len(wanted), elements, fill)
        begun = zip((start for _, start in wanted), found, strict=True)
        return [[next(begun) for _ in starts] for _ in columns]

    def _element(self, line: int, column: int, start: int) -> Value:
        """The vector of channels that begins `start` channels into the block."""
        writer, b = self.writer, self.writer.b
        first = self.spot.column
        if first is not None and not 0 <= first + column < writer.plan.column.size:
            return b.number(writer.conv.fill)
        offset = line * writer.row_stride + column * writer.column_stride + start
        x = storage.read_at(b, writer.dtype, self.src, offset, min(b.lanes, self.count - start))
        return x if writer.plan.staged.copies else writer.head.apply(x, self.place, self.known)

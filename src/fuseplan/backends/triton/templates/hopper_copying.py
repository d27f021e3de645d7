"""Writes what fills the ring of the kernel for Hopper: one warp's copies, or a group's loads and stores."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import gcd, prod

from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    WIDE,
    Index,
    as_index,
    ceil_div,
    digits,
    number,
    offset,
    power_of_two,
    sliced,
)
from fuseplan.backends.triton.shell import of_launch
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.hopper_schedule import Schedule, advance, widened
from fuseplan.backends.triton.templates.hopper_spread import Spread
from fuseplan.backends.triton.templates.hopper_tiles import even
from fuseplan.backends.triton.templates.product_tiles import row_axes
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import COUNTER_BYTES, Slot


def swizzled(schedule: Schedule, rank: int, beside: int = 0) -> str:
    """The layout of lines in shared memory: that of boxes, with so many elements side by side, or `depth`."""
    size = schedule.itemsize
    return f"gl.NVMMASharedLayout({min(128, (beside or schedule.knobs.depth) * size)}, {8 * size}, {rank})"


ROUNDED = 'gl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [{}], gl.float32, True, 1)'


class Copying:
    """Writes what one warp runs: copies of src and of the weight into the ring.

    Attributes:
        warps: that run it.
        by_channels: whether all taps of some channels come before those of the next ones.
        names: of the arguments.
    """

    warps = 1
    by_channels = False

    def __init__(self, text: Text, schedule: Schedule, grid: int, spread: Spread) -> None:
        self.text, self.schedule, self.grid, self.spread = text, schedule, grid, spread
        self.knobs, self.geometry = schedule.knobs, schedule.geometry
        self.contraction = schedule.geometry.conv
        self.weight = argument(Slot("operand", schedule.kernel.weight.key))
        more = ["src_more"] if self.knobs.reaching and not self.geometry.gathers else []
        held = ["held"] if self.knobs.resident else []
        rings = ("src_ring", "weight_ring", "empty", "full")
        self.names = ["src", *more, self.weight, *rings, *held, *schedule.given]

    def write(self) -> None:
        """The function `produce`."""
        text, schedule = self.text, self.schedule
        with text.function(f"produce({', '.join(self.names)})"):
            schedule.begin(text)
            self.begin()
            if self.knobs.resident:
                self._hold_weight()
            text.line("stage = 0", "phase = 1")
            with self.spread.turns(text, "gl.program_id(0)", self.grid):
                schedule.place_tile(text, needs_feature=not self.knobs.resident)
                with ExitStack() as loops:
                    where, tap = self._loops(loops)
                    self._copy(where, tap)

    def begin(self) -> None:
        """What comes before the first tile."""
        if self.geometry.padded:
            _wait_for_padding(self.text, self.knobs.groups)

    def _hold_weight(self) -> None:
        """Copies the weight of the program's features, once for all of its tiles."""
        text, knobs, schedule = self.text, self.knobs, self.schedule
        across, lines = schedule.across, schedule.lines
        program = number("gl.program_id(0)", self.grid)
        text.line(
            f"row = {program % across * knobs.columns}",
            f"mbarrier.expect(held, {schedule.blocks * lines * schedule.weight_bytes})",
        )
        taps = self.geometry.taps // lines
        parts = range(0, ceil_div(self.geometry.channels, knobs.depth) * knobs.depth, knobs.depth)
        pairs = list(product(range(taps), parts))
        if self.by_channels:
            pairs = [(tap, channel) for channel, tap in product(parts, range(taps))]
        for place, ((tap, channel), line) in enumerate(product(pairs, range(lines))):
            self._load_weight(Index("row"), line * taps + tap, channel, "held", as_index(place))

    def _load_weight(self, row: Index, tap: Index | int, channel: object, full: str, block: Index) -> None:
        """Copies a block of the weight."""
        for piece in range(self.schedule.weight_pieces):
            first = row + piece * even(self.knobs.columns)
            at = f"[{channel}, {first}]" if self.geometry.is_turned else f"[{first}, {tap}, {channel}]"
            into = f"weight_ring.index({block * self.schedule.weight_pieces + piece})"
            self.text.line(f"tma.async_load({self.weight}, {at}, {full}, {into})")

    def _loops(self, loops: ExitStack) -> tuple[list[Index], Index]:
        """Opens the loops over taps and channels; coordinates in src, and the tap's number."""
        where, tap = [], as_index(0)
        outer = self._channel_loop(loops) if self.by_channels else None
        for place, axis in enumerate(self.geometry.axes):
            first = Index(axis.letter) * axis.step - axis.low
            if axis.taps > 1 and not (self.knobs.reaching and place == 0):
                own = Index(f"tap_{axis.letter}")
                loops.enter_context(self.text.block(f"for {own} in range({axis.taps})"))
                first, tap = first + own * axis.dilation, tap * axis.taps + own
            where.append(first)
        return [*where, outer or self._channel_loop(loops)], tap

    def _channel_loop(self, loops: ExitStack) -> Index:
        depth, channels = self.knobs.depth, self.geometry.channels
        most = ceil_div(channels, depth) * depth
        ends = f"begin * {depth}, end * {depth}" if self.knobs.spread else f"0, {most}"
        loops.enter_context(self.text.block(f"for channel in range({ends}, {depth})"))
        if self.contraction.groups == 1:
            return Index("channel")
        feature = Index("feature", 0, self.contraction.features - 1)
        return feature // self.contraction.features_per_group * channels + Index("channel")

    def _copy(self, where: list[Index], tap: Index) -> None:
        self._wait()
        self._expect(self.schedule.src_bytes)
        self._copy_src(where)
        self._copy_weight(tap)
        advance(self.text, self.knobs.stages)

    def _wait(self) -> None:
        self.text.line("mbarrier.wait(empty.index(stage), phase)", "ready = full.index(stage)")

    def _expect(self, more: int) -> None:
        """Tells a stage's barrier how many bytes come: those of the weight, and more."""
        schedule = self.schedule
        weight_bytes = 0 if self.knobs.resident else schedule.lines * schedule.weight_bytes
        self.text.line(f"mbarrier.expect(ready, {weight_bytes + more})")

    def _copy_weight(self, tap: Index) -> None:
        lines = self.schedule.lines
        row = Index("feature") * self.geometry.ways
        if self.contraction.weight_per_batch:
            row = Index("n") * self.geometry.features + row
        for line in range(0 if self.knobs.resident else lines):
            at = tap + line * (self.geometry.taps // lines)
            self._load_weight(row, at, "channel", "ready", Index("stage") * lines + line)

    def _copy_src(self, where: list[Index]) -> None:
        """The rows of the first tap and, where they reach further, the lines behind them."""
        text, schedule = self.text, self.schedule
        line, *rest = where
        if not self.knobs.reaching:
            for piece in range(schedule.pieces):
                at = ", ".join(map(str, [line + piece * even(self.knobs.box[0]), *rest]))
                into = f"src_ring.index({Index('stage') * schedule.pieces + piece})"
                text.line(f"tma.async_load(src, [{at}], ready, {into})")
            return
        size = self.knobs.box[0]
        begins = [
            ("src", 0),
            *(("src_more", size + more) for more in range(0, schedule.reach, schedule.more)),
        ]
        for name, begin in begins:
            into = f"src_ring.index({Index('stage') * schedule.span + begin})"
            view = f"{into}.reinterpret(src.dtype, {name}.block_type.shape, {name}.layout)"
            at = ", ".join(map(str, [line + begin, *rest]))
            text.line(f"tma.async_load({name}, [{at}], ready, {view})")


class Gathering(Copying):
    """Writes what a group of warps runs where src passes registers: loads of src, and copies of the weight.

    Loads are on their way before their stage is free, as many as registers hold. Neighbouring threads load
    neighbours in memory. Each has as many channels of a position side by side as one store takes. src is
    rounded to TF32: a tensor core cuts the other bits, so that all sums were too small. What is read for a
    tap is in the first cache for the next one.
    """

    warps, by_channels = 4, True

    def begin(self) -> None:
        """How boxes of src lie over the threads."""
        schedule, depth = self.schedule, self.knobs.depth
        for rows in dict.fromkeys(prod(box) for _, box in self._boxes):
            self.text.line(
                f"lying_{rows}: gl.constexpr = {self._layout(rows)}",
                f"row_{rows} = gl.arange(0, {rows}, layout=gl.SliceLayout(1, lying_{rows}))",
                f"depth_{rows} = gl.arange(0, {depth}, layout=gl.SliceLayout(0, lying_{rows}))",
            )
        self.text.line(f"lines: gl.constexpr = {swizzled(schedule, 2)}")

    def _layout(self, rows: int) -> str:
        wide = 16 // self.schedule.itemsize
        lanes = min(rows, 32 if self.step > 1 else wide * 32 // self.knobs.depth)
        warps = min(4, max(1, rows // lanes))
        order = "[0, 1]" if self.step > 1 else "[1, 0]"
        threads = f"[{lanes}, {32 // lanes}], [{warps}, {4 // warps}]"
        return f"gl.BlockedLayout([1, {wide}], {threads}, {order})"

    @property
    def step(self) -> int:
        """Elements of src from a channel to the next."""
        return self.schedule.kernel.src.element_strides[1]

    @property
    def _boxes(self) -> list[tuple[int, tuple[int, ...]]]:
        """What is loaded at a time: the line that it begins with, and its extents."""
        box, schedule = self.knobs.box, self.schedule
        more = range(0, schedule.reach, schedule.more or 1)
        return [(0, box), *((box[0] + begin, (schedule.more, *box[1:])) for begin in more)]

    def _copy(self, where: list[Index], tap: Index) -> None:
        boxes = list(enumerate(self._boxes))
        held = [
            sum(prod(box) for _, box in self._boxes[: place + 1]) * self.knobs.depth for place, _ in boxes
        ]
        most = self.schedule.held_loads * 32 * self.warps
        early = [each for each, elements in zip(boxes, held, strict=True) if elements <= most]
        for place, (begin, box) in early:
            self._load(place, where, begin, box)
        self._wait()
        if not self.knobs.resident:
            self._expect(0)
            self._copy_weight(tap)
        for place, (begin, box) in boxes:
            if place >= len(early):
                self._load(place, where, begin, box)
            self._store(place, begin, box)
        self.text.line("fence_async_shared()", "mbarrier.arrive(ready)")
        advance(self.text, self.knobs.stages)

    def _load(self, number: int, where: list[Index], begin: int, box: tuple[int, ...]) -> None:
        """Loads a box of src."""
        text, schedule, depth = self.text, self.schedule, self.knobs.depth
        src, rows = schedule.kernel.src, prod(box)
        is_wide = src.span >= WIDE
        offset, mask = as_index(0), ALL
        row = Index(f"row_{rows}", 0, rows - 1, is_vector=True)
        column = Index(f"depth_{rows}", 0, depth - 1, is_vector=True)
        channels = self.geometry.conv.channels_per_group
        beside, inner = column // channels, column % channels
        for place, axis in enumerate(self.geometry.axes):
            moved = digits(row, box)[place] * axis.step + (0 if place else begin)
            at = text.index(f"{axis.letter}_at", where[place] + moved)
            last = ceil_div(axis.rows, self.knobs.box[place]) * self.knobs.box[place] - 1
            at = replace(at, low=-axis.low, high=last * axis.step + axis.reach - axis.low)
            offset = offset + widened(at, is_wide) * axis.src_stride
            end = schedule.extents[place] if place == schedule.open_place else axis.positions
            spot = at.at(DOWN)
            if axis is self.geometry.axes[-1] and self.geometry.along > 1:
                spot = spot + (beside * axis.dilation).at(ACROSS)
                inner = inner * self.step + beside * (axis.dilation * axis.src_stride)
            mask = mask & (spot >= 0) & (spot < end)
        if self.geometry.along == 1:
            inner = column * self.step
        channel = Index("channel", 0, ceil_div(self.geometry.channels, depth) * depth - depth)
        mask = mask & (channel + column < self.geometry.channels).at(ACROSS)
        first = widened(where[-1], is_wide) * self.step
        pointers = f"src + {first} + {offset.at(DOWN).atom} + {inner.at(ACROSS).atom}"
        text.line(f"read_{number} = gl.load({pointers}{mask.guard()})")

    def _store(self, number: int, begin: int, box: tuple[int, ...]) -> None:
        """Rounds a box, and stores it into the stage."""
        schedule, shape, read = self.schedule, [prod(box), self.knobs.depth], f"read_{number}"
        at = Index("stage") * schedule.span + begin if self.knobs.reaching else Index("stage")
        self.text.line(
            f"{read} = {ROUNDED.format(read)}",
            f"src_ring.index({at}).reinterpret(gl.float32, {shape}, lines).store({read})",
        )


# ---- src in rows of whole units of the copy engine

ACROSS_TILE, LOADED = 256, 64  # columns of a tile; registers of a thread that hold one or two elements each
COUNTER = f"workspace + {COUNTER_BYTES // 4 - 1}"
ORDER = "fence.proxy.async;"  # the copy engine sees the stores before it, also of programs waited for
THREADS = "gl.arange(0, {}, layout=gl.BlockedLayout([1], [32], [{}], [0]))"
FENCE = f'gl.inline_asm_elementwise("{ORDER} mov.b32 $0, $1;", "=r,r", [{THREADS}], gl.int32, False, 1)'


def write_padding(text: Text, schedule: Schedule) -> None:
    """Writes a group's part of the copy of src to the workspace; there, rows begin at multiples of 16 bytes.

    Between the rows nothing is read: a box ends with the channels.
    """
    kernel, geometry = schedule.kernel, schedule.geometry
    pitch, groups, axes = geometry.pitch, schedule.knobs.groups, row_axes(kernel.src, 1)
    wide = gcd(4, *(stride for _, stride in axes))
    lanes = min(32, power_of_two(ceil_div(pitch, wide)))
    columns = min(ACROSS_TILE, power_of_two(pitch))
    height = LOADED * min(wide, 2) * 128 // columns
    rows = of_launch(kernel, geometry.conv.batch * prod(kernel.src.spatial))
    tiles, across = ceil_div(rows, height), ceil_div(pitch, columns)
    is_wide = kernel.open_axis is not None or geometry.src.span + kernel.src.span >= WIDE
    text.line(
        f"# src in rows of {pitch}",
        f"beside: gl.constexpr = gl.BlockedLayout([1, {wide}], [{32 // lanes}, {lanes}], [4, 1], [1, 0])",
        f"padded = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type({named(kernel.src.dtype, 'gl')}))",
    )
    first = Index("gl.program_id(0)") + number("group", groups) * Index("gl.num_programs(0)")
    with text.block(f"for tile in range({first}, {tiles * across}, {Index('gl.num_programs(0)') * groups})"):
        tile = number("tile", tiles * across)
        row = text.index("row", tile // across * height + sliced(height, 1, "beside"))
        column = text.index("column", tile % across * columns + sliced(columns, 0, "beside"))
        mask = text.mask("mask", (row < rows).at(DOWN) & (column < geometry.conv.channels).at(ACROSS))
        row = row.wide(is_wide)
        lying, to = offset(row, axes) if axes else row, row * pitch
        text.line(
            f"read = gl.load(given + {lying.at(DOWN).atom} + {column.at(ACROSS)}{mask.guard()})",
            f"gl.store(padded + {to.at(DOWN).atom} + {column.at(ACROSS)}, read{mask.guard('')})",
        )
    text.line(FENCE.format(128, 4), "gl.barrier()", arrive(COUNTER, "release"))


def _wait_for_padding(text: Text, groups: int) -> None:
    """Waits until the groups of all programs have copied; the last program leaves the counter as it was."""
    wait_for_groups(text, COUNTER, groups, 1)
    text.line(FENCE.format(32, 1))


def arrive(counter: str, order: str) -> str:
    """The text that counts one more, and gives the count before it."""
    return f'gl.atomic_add({counter}, 1, sem="{order}", scope="gpu")'


def wait_for_groups(text: Text, counter: str, groups: int, waiting: int) -> None:
    """Waits until the groups of all programs have arrived; the last of those `waiting` clears the counter."""
    programs = Index("gl.num_programs(0)")
    all_groups, all_waiting = programs * groups, programs * waiting
    with text.block(f"while gl.load({counter}, volatile=True) < {all_groups}"):
        text.line("pass")
    with text.block(f"if {arrive(counter, 'acquire')} == {all_groups} + {all_waiting} - 1"):
        text.line(f'gl.atomic_xchg({counter}, 0, sem="relaxed", scope="gpu")')

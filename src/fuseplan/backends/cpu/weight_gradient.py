"""Gradients of the weights of depthwise convolutions and narrow groups: the sums that two templates share.

An element of the gradient is a sum over all images and output positions. Some output lines at a time add to
sums in registers, and these to the sums of a part in the workspace: what is read stays in the near caches for
all channels, and few roundings are as large as the whole. The second phase adds the parts in their order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Elementwise, Place
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I1
from fuseplan.backends.cpu.loops import cut, offset_of, pieces, places
from fuseplan.backends.cpu.sums import Sums
from fuseplan.backends.cpu.taps import axes, inside
from fuseplan.kernels.contracted import layer
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Traffic, lanes, moved_once
from fuseplan.messages.reasons import Claim, Reason
from fuseplan.scalar import functions

_LONGEST = 20_000  # instructions, about
_POSITIONS = 2048  # whose products are added one after another
_IN_FLIGHT = 8  # sums that keep the multiply-adds busy: two begin in a cycle, and each takes four
_LINE_CYCLES = 16  # of a line's tests and addresses
_TASKS = 4  # of a thread


class Layer:
    """What follows from a gradient's kernel alone: the layer whose weight it is of, and where that reads."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        found = layer(kernel.contraction)
        assert found is not None  # by the claims
        self.kernel, self.target, self.conv, self.lanes = kernel, target, found, lanes(kernel, target)
        *leading, self.column = axes(found)
        self.leading = tuple(leading)
        group, image, _, *steps = kernel.src.element_strides
        self.ends, self.steps = (image, group // found.channels_per_group), steps
        self.lines_of_image = prod(axis.out for axis in leading)
        self.lines = found.batch * self.lines_of_image
        self.tap_rows = prod(axis.kernel for axis in leading)
        self.weights = found.features * found.depth

    def held(self, slots: int) -> tuple[int, int]:
        """Rows of taps, and slots of a row, whose sums are in registers at once: as even as can be."""
        most = max(_IN_FLIGHT, self.target.vector_registers - 4)
        rows = max(1, min(self.tap_rows, most // slots))
        return -(-self.tap_rows // -(-self.tap_rows // rows)), -(-slots // -(-slots // most))

    def cuts(self, units: int) -> tuple[int, int, int]:
        """Lines that are summed at once, parts of the lines, and units of channels in a task."""
        read = self.kernel.src.nbytes + self.kernel.weight.nbytes
        most = min(self.target.l2_bytes * self.lines // (2 * read), _POSITIONS // self.column.out)
        wanted = _TASKS * self.target.threads if self.target.threads > 1 else 1
        chunks = max(-(-self.lines // max(1, most)), min(self.lines, -(-wanted // units)))
        parts = min(chunks, wanted, max(1, read // (4 * self.weights * model.itemsize(self.kernel))))
        return -(-self.lines // chunks), parts, -(-units // min(units, -(-wanted // parts)))

    def waste(self, tile: int, width: int, slots: int, loads: float, shuffles: float) -> float:
        """Time of the tiles over time of the products alone.

        Args:
            tile: positions or vectors of them.
            width: output positions of a tile.
            slots: sums of a row of taps.
            loads, shuffles: of a tile and row of taps.
        """
        rows, size = self.held(slots)
        held = rows * size
        latency = max(1.0, _IN_FLIGHT / (held * copies(held, tile)))
        spilled = max(0, held + tile + 1 - self.target.vector_registers)
        cycles = max(held * tile / 2 * latency, (rows * loads + tile) / 2) + rows * shuffles / 2 + spilled
        passes = -(-self.tap_rows // rows) * -(-slots // size)
        line = passes * (self.column.tiles(width) * cycles + _LINE_CYCLES)
        return line * width / tile / (self.column.out * self.tap_rows * slots / 2)


def copies(held: int, tile: int) -> int:
    """Sums that take turns in the place of one, where few are held."""
    return max(1, min(tile, -(-_IN_FLIGHT // held)))


def gradient_claim(kernel: Kernel) -> Claim:
    """The kernel is the gradient of a grouped convolution's weight, with windows along an axis."""
    conv, got = layer(kernel.contraction), kernel.contraction.text
    return model.about(kernel, conv is not None and bool(conv.kernel), Reason.NO_GRADIENT_OF_GROUPS, got)


def length_claim(found: Layer, slots: int, tiles: float, reads: float, shuffles: float = 0) -> Claim:
    """The code of all sums is not too long: of so many tiles, each with reads, their prologue, and shuffles.

    Without a bound, 63 taps behind a gelu took 36 s to compile.
    """
    rows, size = found.held(slots)
    early = 1 + 2 * sum(functions(stage.expression) for stage in found.kernel.prologue)
    length = -(-slots // size) * rows * tiles * (rows * size + reads * early + shuffles)
    got = f"kernel={found.conv.kernel}, padding={found.conv.padding}"
    return model.about(found.kernel, length <= _LONGEST, Reason.MANY_TAPS, got, "fewer along the last axis")


@dataclass(frozen=True)
class WeightGradient(model.SumOfProducts):
    """A template of gradients.

    Attributes:
        columns: output positions along the last axis in a tile, or vectors of them.
        lines: output lines that are summed at once.
        parts: parts of the lines, each with sums of its own in the workspace.
        block: units of channels in a task.
    """

    columns: int
    lines: int
    parts: int
    block: int

    efficiency: ClassVar[float] = 1.0

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        sums = self.parts * Layer(kernel, target).weights * model.itemsize(kernel)
        return moved_once(kernel, sums)

    def phases(self, kernel: Kernel, target: Target) -> int:
        return 2

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """The output's gradient in its own dtype, its axes as `weight_steps` says."""
        return Packing(operand.shape, operand.dtype, self.weight_steps(kernel, target))


@dataclass(frozen=True)
class Lines:
    """Output lines that are summed at once.

    Attributes:
        begin, end: the numbers of the first and of the one behind the last.
        is_first: whether the part has no sums yet.
        sums: where the part's sums lie.
    """

    begin: Index
    end: Index
    is_first: Value
    sums: Value


@dataclass(frozen=True)
class Spot:
    """What a pass sums for.

    Attributes:
        channel, feature: the first.
        vector: the number of the first vector of sums.
        part: which vector of a block's features.
        count: features of the vector.
    """

    channel: Index
    feature: Index
    vector: Index
    part: int = 0
    count: int = 1


@dataclass(frozen=True)
class Pass:
    """Sums that are in registers at once, and what a tile of a line reads for them.

    Attributes:
        spot: what the sums are for.
        slots: of each row of taps, by their numbers.
        copies: sums that take turns for each.
        sums: a row for each row of taps and copy.
        known: what the prologue knows.
        lines: for each row of taps whether src has its line, and the line's first column.
        grad: the first column of the line of the output's gradient.
    """

    spot: Spot
    slots: range
    copies: int
    sums: Sums
    known: dict[object, Value]
    lines: Sequence[tuple[Value, Value]]
    grad: Value


class Writer(ABC):
    """Writes one kernel.

    Args:
        units: what tasks are made of: blocks of channels.
        vectors: of the workspace that the sums of a part take.
        width: output positions in a tile.
        steps: elements of the output's gradient between neighbours: images, features, lines, columns.
    """

    def __init__(
        self,
        knobs: WeightGradient,
        found: Layer,
        units: int,
        vectors: int,
        width: int,
        steps: tuple[int, int, int, int],
    ) -> None:
        self.knobs, self.layer, self.kernel, self.conv = knobs, found, found.kernel, found.conv
        self.frame = Frame(knobs, found.kernel, found.target, workspace=True)
        self.b, self.lanes, self.units, self.width = self.frame.body, found.lanes, units, width
        self.head, self.tail = Elementwise(self.frame, "prologue"), Elementwise(self.frame, "epilogue")
        self.room, self.steps, self.column = vectors * found.lanes, steps[:3], steps[3]
        self.dtypes = found.kernel.src.dtype, found.kernel.weight.dtype
        self.kinds = tuple(map(storage.element_type, self.dtypes))

    def source(self) -> Source:
        """The whole kernel: the sums of parts of the lines, then the sums of all."""
        b, knobs = self.b, self.knobs
        blocks = -(-self.units // knobs.block)
        with self.frame.tasks(knobs.parts * blocks) as task:
            part, first = task // blocks, task % blocks * knobs.block
            last = b.smaller(first + knobs.block, self.units)
            begin, end = cut(part, knobs.parts, self.layer.lines)
            sums = b.at(self.frame.pointer("workspace"), part * self.room)
            with b.loop(begin, end, knobs.lines, name="chunk") as chunk:
                is_first = b.compare("eq", chunk, begin)
                lines = Lines(chunk, b.smaller(chunk + knobs.lines, end), is_first, sums)
                with b.loop(first, last, name="unit") as unit:
                    self.add(unit, lines)
        self.frame.wait(knobs.parts * blocks)
        self.finish()
        return self.frame.source(workspace=knobs.parts * self.room * model.itemsize(self.kernel))

    @abstractmethod
    def add(self, unit: Index, lines: Lines) -> None:
        """Adds the products of some lines to the part's sums, for a unit of channels."""

    @abstractmethod
    def tile(self, some: Pass, start: Index, count: int) -> None:
        """Adds the products of a tile of `count` positions; one that reads padding starts at a number."""

    @abstractmethod
    def finish(self) -> None:
        """The second phase: writes dst."""

    # ---- the first phase

    def passes(self, spot: Spot, slots: int, lines: Lines) -> None:
        """All sums of a spot, of which a row of taps has so many, some at a time."""
        rows, size = self.layer.held(slots)
        for start in range(0, slots, size):
            part = partial(self._pass, spot, range(start, min(start + size, slots)), lines)
            pieces(self.b, self.layer.tap_rows, rows, part, name="taps")

    def _pass(self, spot: Spot, slots: range, lines: Lines, first: Index, rows: int) -> None:
        b, turns = self.b, copies(rows * len(slots), self.knobs.columns)
        sums, known = Sums(b, rows * turns, len(slots)), dict[object, Value]()
        self.head.prepare(Place(0, 0, True, self.lanes), known)
        src, grad = self.frame.pointer("src"), self.frame.pointer("operand", self.kernel.weight.key)
        with b.loop(lines.begin, lines.end, name="line") as line:
            image, *outs = places(line, [self.conv.batch, *(axis.out for axis in self.layer.leading)])
            begin = b.at(src, offset_of((image, spot.channel), self.layer.ends), self.kinds[0])
            under = [self._under(begin, outs, first + row) for row in range(rows)]
            where = offset_of((image, spot.feature, line % self.layer.lines_of_image), self.steps)
            self._line(Pass(spot, slots, turns, sums, known, under, b.at(grad, where, self.kinds[1])))
        for (row, values), (index, slot) in product(enumerate(sums.values()), enumerate(slots)):
            number, tap = divmod(slot, self.layer.column.kernel)
            vector = (first + row // turns) * self.layer.column.kernel + (number * self.conv.taps + tap)
            where = b.at(lines.sums, (vector + spot.vector) * self.lanes)
            is_first = lines.is_first if row % turns == 0 else Value(b, I1, "false")
            before = b.select(is_first, self.b.number(0.0), b.load(where))
            b.store(before + values[index], where)

    def _under(self, src: Value, outs: Sequence[Index], row: Index) -> tuple[Value, Value]:
        """Whether src has the line under a row of taps, and where that line begins."""
        leading = self.layer.leading
        taps = places(row, [axis.kernel for axis in leading])
        met = zip(leading, outs, taps, strict=True)
        at = [out * axis.stride + tap * axis.dilation - axis.low for axis, out, tap in met]
        tests = [inside(self.b, axis, position) for axis, position in zip(leading, at, strict=True)]
        return self.b.both(tests), self.b.at(src, offset_of(at, self.layer.steps[:-1]), self.kinds[0])

    def _line(self, some: Pass) -> None:
        """Tiles along a line: a loop over those that read no padding, code of its own for each other."""
        axis, width = self.layer.column, self.width
        before, inner, behind = axis.starts(width)
        last = (axis.tiles(width) - 1) * width
        rest = (*before, *behind, last)
        if not behind and last + width <= axis.out and axis.is_inside(last, width):
            inner, rest = range(inner[0] if inner else last, last + 1, width), rest[:-1]
        if inner:
            with self.b.loop(inner[0], inner[-1] + 1, width, name="column") as start:
                self.tile(some, start, width)
        for start in rest:
            self.tile(some, start, min(width, axis.out - start))

    # ---- the second phase

    def whole(self, vector: Index, count: int) -> list[Value]:
        """The sums over all parts of some vectors, in the order of the parts."""
        b, sums = self.b, Sums(self.b, 1, count)
        begin = b.at(self.frame.pointer("workspace"), vector * self.lanes)
        with b.loop(0, self.knobs.parts, name="part") as part, sums.open() as values:
            at = b.at(begin, part * self.room)
            values[0][:] = [
                each + b.load(b.at(at, index * self.lanes)) for index, each in enumerate(values[0])
            ]
        return sums.values()[0]

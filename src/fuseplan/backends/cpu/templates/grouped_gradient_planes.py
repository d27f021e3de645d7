"""Gradients of the weights of depthwise convolutions and groups of few channels, pixels innermost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from operator import add
from typing import ClassVar

from fuseplan.backends.cpu import storage
from fuseplan.backends.cpu.elementwise import Place, finish
from fuseplan.backends.cpu.gather import Stretch, transposed
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.loops import ceil_div, within
from fuseplan.backends.cpu.weight_gradient import (
    Layer,
    Lines,
    Pass,
    Spot,
    WeightGradient,
    Writer,
    gradient_claim,
    length_claim,
)
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Step
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.messages.reasons import Claim, Reason, claim

_VECTORS = 4  # of a tile
_FINISHED = 16  # vectors of results in a task


@dataclass(frozen=True)
class GroupedGradientPlanes(WeightGradient):
    """Sums of taps in registers, each lane over other pixels, over tiles of vectors of a line.

    reads:  src and the output's gradient once from memory, from the near caches for each few rows of taps and
            for each feature of a group
    writes: dst once, from sums of parts in the workspace
    chosen: the weight is a grouped convolution's, and pixels are innermost
    """

    name: ClassVar[str] = "grouped_gradient_planes"

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield gradient_claim(kernel)
        is_dense = kernel.src.element_strides[-1] == 1 or kernel.src.shape[-1] == 1
        yield claim(is_dense, Reason.SCATTERED_POSITIONS, got=str(kernel.src))
        found = Layer(kernel, target)
        taps, tiles = found.column.kernel, found.column.edges / found.lanes + _VECTORS
        yield length_claim(found, taps, tiles, taps * min(found.column.stride, 4))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = Layer(kernel, target)
        tiles = range(1, min(_VECTORS, -(-found.column.out // found.lanes)) + 1)
        for vectors in sorted(tiles, key=partial(_waste, found))[:2]:
            yield cls(vectors, *found.cuts(found.conv.features))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return _waste(Layer(kernel, target), self.columns)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return _Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The output's gradient as its axes are: pixels innermost."""
        return ()


def _waste(found: Layer, vectors: int) -> float:
    column, reads = found.column, min(found.column.stride, 4)
    each, width = vectors * column.kernel, vectors * found.lanes
    return found.waste(vectors, width, column.kernel, each * reads, each * (reads - 1))


class _Writer(Writer):
    def __init__(self, knobs: GroupedGradientPlanes, kernel: Kernel, target: Target) -> None:
        found = Layer(kernel, target)
        plane = found.lines_of_image * found.column.out
        steps = found.conv.features * plane, plane, found.column.out, 1
        width, room = knobs.columns * found.lanes, max(found.weights, found.lanes)
        super().__init__(knobs, found, found.conv.features, room, width, steps)

    def add(self, unit: Index, lines: Lines) -> None:
        conv = self.conv
        group, each = unit // conv.features_per_group, conv.channels_per_group
        with self.b.loop(0, each, name="channel") as number:
            spot = Spot(group * each + number, unit, (unit * each + number) * conv.taps)
            self.passes(spot, self.layer.column.kernel, lines)

    def tile(self, some: Pass, start: Index, count: int) -> None:
        b, grad = self.b, self.b.at(some.grad, start, self.kinds[1])
        outs = [range(first, min(first + self.lanes, count)) for first in range(0, count, self.lanes)]
        factors = [storage.read_at(b, self.dtypes[1], grad, each.start, len(each)) for each in outs]
        pairs = list(product(enumerate(some.slots), enumerate(outs)))
        every = [(index, vector, self._positions(start, tap, each)) for (index, tap), (vector, each) in pairs]
        met = [(index, vector, at) for index, vector, at in every if set(at) != {None}]
        for row, (is_there, line) in enumerate(some.lines):
            with b.when(is_there), some.sums.open() as values:
                src = self._stretch(some, line, start, count)
                for index, vector, positions in met:
                    turn = values[row * some.copies + vector % some.copies]
                    turn[index] = b.fma(src.vector(positions), factors[vector], turn[index])

    def _stretch(self, some: Pass, line: Value, start: Index, count: int) -> Stretch:
        """What may be read of a line: all of it from its first element on, or what a tile inside reaches."""
        column, kind = self.layer.column, self.kinds[0]
        is_known = isinstance(start, int)
        address = line if is_known else self.b.at(line, start * column.stride - column.low, kind)
        read = partial(self._read, some, address)
        return Stretch(self.b, address, 0, column.size if is_known else column.reach(count), 0.0, read)

    def _read(self, some: Pass, address: Value, start: int, count: int) -> Value:
        x = storage.read_at(self.b, self.dtypes[0], address, start, count)
        return self.head.apply(x, Place(0, 0, False, count), some.known)

    def _positions(self, start: Index, tap: int, outs: range) -> list[int | None]:
        """Where a stretch has the elements that a tap meets; nothing stands in lanes without an output."""
        column = self.layer.column
        if not isinstance(start, int):
            return [out * column.stride + tap * column.dilation for out in outs]
        return [column.at(start + out, tap) for out in outs] + [None] * (self.lanes - len(outs))

    def finish(self) -> None:
        """Vectors of sums become lanes, and then one vector; the last one begins early."""
        b, total = self.b, self.layer.weights
        count, size = min(self.lanes, total), _FINISHED * self.lanes
        with self.frame.tasks(ceil_div(total, size)) as task:
            begin, end = within(b, task, size, total)
            with b.loop(begin, end, self.lanes, name="vector") as start:
                first = b.smaller(start, total - count)
                value = reduce(add, transposed(b, self.whole(first, self.lanes)))
                finish(self.frame, self.tail, value, Place(first, 0, False, count), {})

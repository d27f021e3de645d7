"""Gradients of the weights of depthwise convolutions and narrow groups, channels innermost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fuseplan.backends.cpu import model, storage
from fuseplan.backends.cpu.elementwise import Place, finish
from fuseplan.backends.cpu.gather import combined
from fuseplan.backends.cpu.grouping import Grouping, grouping
from fuseplan.backends.cpu.ir import Index, Value
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
from fuseplan.kernels.packing import Step, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, lanes
from fuseplan.messages.reasons import Claim, Reason, claim

_WIDEST = 16  # channels of a group: the products of each have code of their own
_MULTIPLIER = 8  # features a channel: likewise
_COLUMNS = 8  # positions in a tile


@dataclass(frozen=True)
class GroupedGradient(WeightGradient):
    """Sums of taps in registers, vectors of features, over tiles of output positions; src is read in place.

    reads:  src and the output's gradient once from memory, from the near caches for each few rows of taps
    writes: dst once, from sums of parts in the workspace
    chosen: the weight is a depthwise convolution's, or one of narrow groups, and channels are innermost
    """

    name: ClassVar[str] = "grouped_gradient"

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield gradient_claim(kernel)
        found, most = Layer(kernel, target), lanes(kernel, target)
        conv, column = found.conv, found.column
        own, many = conv.channels_per_group, conv.features_per_group
        fits = many <= (_MULTIPLIER if own == 1 else most) and own <= _WIDEST
        got, want = f"{own} channels, {many} features", f"at most {_WIDEST} channels, {most} features"
        yield model.about(kernel, fits, Reason.GROUP_WIDTH, got, want)
        group, _, channel, *_ = kernel.src.element_strides
        is_last = group == own and (own == 1 or channel == 1)
        yield claim(is_last, Reason.CHANNELS_FIRST, got=str(kernel.src))
        # Of tiles of four positions, for each of these.
        pack, lines = grouping(conv, most), column.kernel / 4 + column.stride
        reads = lines * -(-pack.channels // most)
        shuffles = reads * pack.products * (pack.products > 1)
        tiles, slots = column.edges + 2 * _COLUMNS, column.kernel * pack.products
        yield length_claim(found, slots, tiles, reads, shuffles)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = Layer(kernel, target)
        tiles = range(1, min(_COLUMNS, found.column.out) + 1)
        cuts = found.cuts(grouping(found.conv, found.lanes).blocks)
        for columns in sorted(tiles, key=partial(_waste, found))[:2]:
            yield cls(columns, *cuts)

    def waste(self, kernel: Kernel, target: Target) -> float:
        return _waste(Layer(kernel, target), self.columns)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return _Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The output's gradient, (images, groups, features of a group, 1, *positions), features innermost."""
        axes = len(kernel.weight.shape)
        return (Transpose((0, *range(3, axes), 1, 2)),)


def _waste(found: Layer, columns: int) -> float:
    pack, conv = grouping(found.conv, found.lanes), found.conv
    elements = len(found.column.users(columns))
    shuffles = 0 if conv.features == conv.groups == conv.channels else elements * pack.products
    loads = elements * -(-pack.channels // pack.lanes)
    slots = found.column.kernel * pack.products
    small = 1 + 0.01 * columns  # of equals the smaller: less code
    return small * pack.waste * found.waste(columns, columns, slots, loads, shuffles)


class _Writer(Writer):
    def __init__(self, knobs: GroupedGradient, kernel: Kernel, target: Target) -> None:
        found = Layer(kernel, target)
        conv, line = found.conv, found.column.out * found.conv.features
        self.pack: Grouping = grouping(conv, found.lanes)
        self.depth = conv.depth  # vectors of sums of a vector of features
        # The last block begins early, and makes what the one before makes too.
        self.groups = min(conv.groups, self.pack.channels // conv.channels_per_group)
        units = -(-conv.groups // self.groups)
        steps = found.lines_of_image * line, 1, line, conv.features
        super().__init__(knobs, found, units, units * self.pack.parts * self.depth, knobs.columns, steps)

    def _spots(self, unit: Index) -> Iterator[Spot]:
        """Each vector of features of a block."""
        conv = self.conv
        group = self.b.smaller(unit * self.groups, conv.groups - self.groups)
        for part in range(self.pack.parts):
            count = self.pack.features_of(self.groups * conv.channels_per_group, part)
            feature = group * conv.features_per_group + part * self.lanes
            vector = (unit * self.pack.parts + part) * self.depth
            if count:
                yield Spot(group * conv.channels_per_group, feature, vector, part, count)

    def add(self, unit: Index, lines: Lines) -> None:
        for spot in self._spots(unit):
            self.passes(spot, self.layer.column.kernel * self.pack.products, lines)

    def tile(self, some: Pass, start: Index, count: int) -> None:
        b, column, features = self.b, self.layer.column, some.spot.count
        grad = b.at(some.grad, start * self.column, self.kinds[1])
        places = range(0, count * self.column, self.column)
        factors = [storage.read_at(b, self.dtypes[1], grad, place, features) for place in places]
        begin = start * column.stride - column.low
        users = column.users(count)
        if isinstance(begin, int):
            users = {at: pairs for at, pairs in users.items() if 0 <= begin + at < column.size}
        for row, (is_there, line) in enumerate(some.lines):
            src = b.at(line, begin * self.layer.steps[-1], self.kinds[0])
            with b.when(is_there), some.sums.open() as values:
                for at, pairs in users.items():
                    self._products(some, values[row * some.copies :], src, at, pairs, factors)

    def _products(
        self,
        some: Pass,
        values: list[list[Value]],
        src: Value,
        at: int,
        pairs: list[tuple[int, int]],
        factors: list[Value],
    ) -> None:
        """Adds the products of the channels at one position of a line of src with those that it meets."""
        vectors: list[tuple[int, Value]] = []
        for index, slot in enumerate(some.slots):
            number, tap = divmod(slot, self.layer.column.kernel)
            for position in (position for position, met in pairs if met == tap):
                vectors = vectors or self._channels(some, src, at)
                x = combined(self.b, vectors, self.pack.sources(some.spot.part, number, some.spot.count))
                turn = values[position % some.copies]
                turn[index] = self.b.fma(x, factors[position], turn[index])

    def _channels(self, some: Pass, src: Value, at: int) -> list[tuple[int, Value]]:
        """The channels of a block at a position, in vectors, each with its first."""
        channels, found = self.groups * self.conv.channels_per_group, []
        for first in range(0, channels, self.lanes):
            count = min(self.lanes, channels - first)
            x = storage.read_at(self.b, self.dtypes[0], src, at * self.layer.steps[-1] + first, count)
            found.append((first, self.head.apply(x, Place(0, 0, True, count), some.known)))
        return found

    def finish(self) -> None:
        with self.frame.tasks(self.units) as unit:
            for spot in self._spots(unit):
                with self.b.loop(0, self.depth, name="slot") as slot:
                    (value,) = self.whole(spot.vector + slot, 1)
                    place = Place(spot.feature * self.depth + slot, 0, True, spot.count, step=self.depth)
                    finish(self.frame, self.tail, value, place, {})

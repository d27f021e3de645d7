"""Depthwise convolution and pools: every feature reads one channel, so there is no product, only bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates.depthwise_writer import HELD_WEIGHTS, DepthwiseKnobs, DepthwiseWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    accuracy_claim,
    contraction_claims,
    layout_claims,
    sum_claim,
    summation_bound,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import functions, leaves_of

_TAPS = 128  # each has code of its own
# Products of a thread, all with code of their own, by the most taps: 1372 of 49 taps took half a minute to
# compile, and spilled; 484 of 121 taps took 23 s, half as many 8 s.
_PRODUCTS = {25: 512, _TAPS: 250}
# Instructions of the formulas of a thread, likewise: 2,400 take 2 s to compile on a quiet core, 21,000 half a
# minute, of `f32[7x48x16x48, nhwc] -> sigmoid -> gelu(tanh) -> softplus -> max_pool2d(1) -> tanh`.
_FORMULAS = 3000
_OPERAND = 10  # for an element of an operand: 768 of abs, minimum and scale took 46 s
_MEASURED = 1.1  # measured over estimated seconds, geometric mean over the tuned suite on one H100
_CLOCK = 1.7e9
_L2_BYTES = 5.5e12  # a second: rows that two programs load come from there once
_UNDER_WAY = 18e3  # bytes that a processor has to have asked for at any time, to be given memory's rate
_WASTE = 1.2  # positions or features of all tiles over the fewest: beyond it a tile is not tried
_SMALLEST = (128, 1, 1, 4, 1, 1)  # with channels last: an output a thread
_SIDES = ((2, 4, 2), (2, 4, 1), (2, 7, 2), (4, 2, 2), (4, 4, 1), (4, 4, 2))  # features a thread, span, ahead


@dataclass(frozen=True)
class GpuDepthwise(DepthwiseKnobs, GpuTemplate):
    """Depthwise convolutions and pools in one to three axes, any kernel, stride and dilation, layout of src.

    reads:  src once from memory, the weight once per program; a thread loads each element of src once for all
            of its outputs, `ahead` rows before it multiplies them
    writes: dst once
    chosen: where each group has one channel; for pools, which have no weight

    Attributes:
        columns: threads of a tile along w; with channels last, threads along w times features.
        features: features in a tile; 1 with channels last.
        rows: output rows of a program.
        warps: warps of a program.
        span: output positions along w that a thread has.
        ahead: rows of src whose loads are under way while one row is multiplied.
    """

    name: ClassVar[str] = "depthwise"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel, pools=True)
        conv, step = kernel.contraction, kernel.centre_step
        yield claim(
            conv.is_depthwise,
            Reason.NOT_DEPTHWISE,
            got=f"{conv.groups} groups of {conv.channels} channels",
            want="as many groups as channels",
            operator=step,
        )
        few = conv.taps <= _TAPS
        yield claim(few, Reason.MANY_TAPS, got=conv.taps, want=f"at most {_TAPS}", operator=step)
        yield from layout_claims(kernel)
        yield accuracy_claim(summation_bound(kernel), accuracy)
        yield sum_claim(kernel)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        tiles = _channels_last(kernel) if kernel.dst.is_channels_last else _first(kernel)
        every = [cls(*tile) for tile in dict.fromkeys(tiles)]
        lengths = _lengths(kernel)
        code = {each: each._formulas(kernel, *lengths) for each in every}
        fitting = [each for each in every if code[each] <= _FORMULAS]
        smallest = cls(*_SMALLEST) if kernel.dst.is_channels_last else min(every, key=lambda each: code[each])
        yield from fitting or [smallest]

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as [tap][feature]."""
        features, channels, *taps = kernel.weight.axes
        return weight_packing(kernel.weight, (*taps, features, channels))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The bytes in memory at the rate that the loads under way allow, or the instructions."""
        writer = DepthwiseWriter(self, kernel, "")
        held = max(1, min(65536 // (32 * self._registers(writer)), 64)) // self.warps * self.warps
        asked = held * 32 * self.vector * kernel.src.itemsize * self.span * writer.stride[2] * self.ahead
        places = max(1, target.processors) * max(1, held // self.warps)
        used = model.fill(writer.count, places) if writer.count < 4 * places else 1.0
        moving = model.seconds(target, self.traffic(kernel, target), used=used * min(1.0, asked / _UNDER_WAY))
        reach = (writer.kernel_size[1] - 1) * writer.dilation[1] + 1 - writer.stride[1]
        again = max(0, reach) / (self.rows * writer.stride[1]) * kernel.src.nbytes / _L2_BYTES
        steps = self._instructions(writer) * writer.count * self.warps
        issuing = steps / (4 * max(1, target.processors) * _CLOCK)
        return _MEASURED * max(moving + again, model.LAUNCH_SECONDS + issuing)

    def _registers(self, writer: DepthwiseWriter) -> int:
        """Of a thread, estimated: sums under way, weights, loaded rows, addresses."""
        height = writer.kernel_size[1]
        sums = self.span * -(-height // writer.stride[1])
        weights = 0 if writer.pool else min(prod(writer.kernel_size[1:]), HELD_WEIGHTS // self.vector)
        loaded = (self.ahead + 1) * len(writer.reads) * writer.kernel.src.itemsize / 4
        return min(255, int(24 + self.vector * (sums + weights + loaded)))

    def _instructions(self, writer: DepthwiseWriter) -> float:
        """Of a thread: products, what loads and widens a row, what finishes and stores an output."""
        outputs, taps = self.rows * self.span, prod(writer.kernel_size)
        finishing = 2 + sum(functions(stage.expression) for stage in writer.kernel.epilogue)
        return 40 + outputs * (self.vector * (taps + finishing) + 3) + self._loads(writer) * (self.vector + 2)

    def _loads(self, writer: DepthwiseWriter) -> int:
        """Elements of src that a thread reads for each feature."""
        rows = (self.rows - 1) * writer.stride[1] + (writer.kernel_size[1] - 1) * writer.dilation[1] + 1
        return writer.kernel_size[0] * min(rows, self.rows * writer.kernel_size[1]) * len(writer.reads)

    def _formulas(self, kernel: Kernel, before: int, behind: int) -> int:
        """Instructions of the operators in front of the sum and behind it, all with code of their own."""
        loads = self._loads(DepthwiseWriter(self, kernel, "")) if before else 0
        return self.vector * (loads * before + self.rows * self.span * behind)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per product: the number of products times 2^-24, in f64 times 2^-53."""
        return summation_bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return DepthwiseWriter(self, kernel, self.text).source(target)


_Tile = tuple[int, int, int, int, int, int]


def _channels_last(kernel: Kernel) -> Iterator[_Tile]:
    """Narrow vectors and a few outputs a thread: so many threads that memory is always asked for enough.

    Positions and features are one axis, as they are in memory: no number of features leaves threads idle.
    """
    height, width, _ = _extents(kernel)
    most = _outputs(kernel.contraction.taps)
    fewest = min(span for _, span, _ in _SIDES)
    sizes = [size for size in (4, 7, 8, 2, 1) if size * fewest <= most and height > 1]
    rows = sorted(sizes, key=lambda size: _waste(height, size))[:2] or [1]
    spans = _fitting(width, tuple(span for span in (7, 4, 2) if span * min(rows) <= most))
    narrow = 1 if kernel.src.itemsize <= 4 else 2
    for side, span, ahead in _SIDES:
        for warps, high in product((1, 2, 4), rows):
            if span in spans and high * span <= most:
                yield side // narrow * 32 * warps, 1, high, warps, span, ahead


def _first(kernel: Kernel) -> Iterator[_Tile]:
    """Neighbours along w are neighbours in memory: 16 bytes of them a thread."""
    height, width, features = _extents(kernel)
    fitting = [tile for tile in _PLANES if tile[0] < 2 * width and tile[1] < 2 * features]
    most = _outputs(kernel.contraction.taps)
    for columns, block, warps in fitting or [(4, 8, 1)]:
        for rows in (8, 4, 2, 1):
            if rows < 2 * height and rows <= most:
                yield columns, block, rows, warps, 1, 1


_PLANES = ((128, 4, 4), (64, 8, 4), (32, 8, 2), (16, 16, 2), (8, 16, 1), (4, 8, 1), (1, 32, 1))


def _lengths(kernel: Kernel) -> tuple[int, int]:
    """Instructions of the operators in front of the sum for an element of src; behind it for one of dst."""
    is_exact = not dtype_of(kernel.dst.dtype).is_narrow
    before = [formula for stage in kernel.prologue for formula in stage.expressions]
    behind = (stage.expression for stage in kernel.epilogue)
    names = frozenset[str]().union(*map(leaves_of, before))
    operands = sum(each.key in names and bool(each.axes) and not each.is_channel for each in kernel.operands)
    first = model.instructions(before, is_exact=is_exact) + _OPERAND * operands
    return first, model.instructions(behind, is_exact=is_exact)


def _extents(kernel: Kernel) -> tuple[int, int, int]:
    """Output rows, positions of a row, features."""
    spatial = kernel.dst.spatial
    return spatial[-2] if len(spatial) > 1 else 1, spatial[-1], kernel.contraction.features


def _outputs(taps: int) -> int:
    """The most outputs of a thread; it has two at least with channels last."""
    products = next(each for most, each in _PRODUCTS.items() if taps <= most)
    return max(2, products // taps)


def _waste(size: int, block: int) -> float:
    return -(-size // block) * block / size


def _fitting(size: int, blocks: tuple[int, ...]) -> list[int]:
    """The blocks that cover a size with little beside it, in their order."""
    least = min(_waste(size, block) for block in blocks)
    return [block for block in blocks if _waste(size, block) <= _WASTE * least]

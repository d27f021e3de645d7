"""Depthwise convolution: every feature reads one channel, so there is no matrix product, only bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, Packing, vector_packing
from fuseplan.backends.triton.templates.depthwise_writer import DepthwiseKnobs, DepthwiseWriter
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim, layout_claims, summation_bound

_TAPS = 128  # each has code of its own
_MEASURED = 1.5  # measured over estimated seconds, geometric mean over the tuned suite on one H100
_CACHED = 9.0e12  # bytes a second that all first caches of an H100 give to such loads


@dataclass(frozen=True)
class GpuDepthwise(DepthwiseKnobs, GpuTemplate):
    """Depthwise convolution in one to three axes, any kernel, stride and dilation, any layout of src.

    reads:  src once from memory (a row is loaded once for all output rows of a program that need it, and once
        a shift along w from the first cache), the weight once a program
    writes: dst once
    chosen: where each group has one channel

    Attributes:
        columns: output positions along w in a tile.
        features: features in a tile.
        rows: output rows of a program.
        warps: of a program.
    """

    name: ClassVar[str] = "depthwise"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        conv, step = kernel.contraction, kernel.contraction_step
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

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        features = kernel.contraction.features
        width = kernel.dst.spatial[-1]
        height = kernel.dst.spatial[-2] if len(kernel.dst.spatial) > 1 else 1
        tiles = [
            (columns, block, warps)
            for columns, block, warps in _tiles(kernel.dst.is_channels_last)
            if columns < 2 * width and block < 2 * features
        ]
        for columns, block, warps in tiles or [(4, 8, 1)]:
            for rows in (8, 4, 2, 1):
                if rows < 2 * height:
                    yield cls(columns, block, rows, warps)

    def packing(self, kernel: Kernel, operand: KernelOperand) -> Packing:
        """The weight as [tap][feature]."""
        if operand.role != "weight":
            return vector_packing(kernel, operand)
        features, channels, *taps = kernel.weight_axes
        axes = (*taps, features, channels)
        return Packing(axes, tuple(operand.shape[axis] for axis in axes), operand.dtype)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        """The bytes in memory, or those that pass the first caches: each row of src once a shift along w."""
        writer = DepthwiseWriter(self, kernel, "")
        depths, height, width = writer.kernel_size
        rows = (self.rows - 1) * writer.stride[1] + (height - 1) * writer.dilation[1] + 1
        loaded = depths * width * min(rows, self.rows * height) / self.rows
        elements = writer.programs * self.rows * self.columns * self.features
        cached = elements * (1 + loaded) * kernel.src.itemsize / _CACHED
        used = model.fill(writer.programs, max(1, target.processors) * max(1, 16 // self.warps))
        moving = model.seconds(target, self.traffic(kernel, target), used=used)
        return _MEASURED * max(moving, model.LAUNCH_SECONDS + cached / used)

    def error_bound(self, kernel: Kernel) -> float:
        return summation_bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return DepthwiseWriter(self, kernel, self.text).source()


def _tiles(channels_last: bool) -> tuple[tuple[int, int, int], ...]:
    """Columns, features and warps: 16 bytes a thread along the innermost axis."""
    if channels_last:
        return ((4, 128, 2), (4, 16, 1), (16, 64, 4), (16, 32, 2))
    return ((128, 4, 4), (64, 8, 4), (32, 8, 2), (16, 16, 2), (8, 16, 1), (4, 8, 1), (1, 32, 1))

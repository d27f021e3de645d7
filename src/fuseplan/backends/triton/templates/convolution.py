"""Convolution as an implicit matrix product through pointers: every convolution, on any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates.convolution_choice import choices, seconds
from fuseplan.backends.triton.templates.convolution_sum import writer_of
from fuseplan.backends.triton.templates.convolution_tiles import Knobs, Tiles
from fuseplan.backends.triton.templates.product_cost import bound
from fuseplan.backends.triton.templates.product_tiles import arithmetics
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.packing import Packing
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    dst_claim,
    factor_claim,
    layout_claims,
)


@dataclass(frozen=True)
class GpuConvolution(Knobs, GpuTemplate):
    """Tiles of output positions x features, src gathered tap by tap: any kernel, stride, groups, layout.

    reads:  src once from memory, and once per tap and block of features from the caches; weight once for each
            block of positions
    writes: dst once
    chosen: where no template for one kind of convolution fits, and for channels first

    Attributes:
        positions: output positions in a tile, a run over the whole batch.
        features: features in a tile.
        depth: products summed in one step.
        joined: channels of a position that one thread loads and joins; 1 where memory has them side by side.
        ahead: a tile of src is loaded into registers while the tile before it is multiplied.
        swapped: the product is features x positions, so that few positions waste nothing of the matrix unit.
        arithmetic: how products are computed, as in `product`.
        warps: warps of a program.
        stages: steps in flight.
    """

    name: ClassVar[str] = "convolution"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        per_batch = kernel.contraction.weight_per_batch
        yield claim(not per_batch, Reason.WEIGHT_PER_BATCH, operator=kernel.contraction_step)
        yield dst_claim(kernel)
        yield from layout_claims(kernel)
        yield factor_claim(kernel)
        least = min(bound(kernel, each) for each in arithmetics(kernel, target, "strict"))
        yield accuracy_claim(least, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        arithmetic = arithmetics(kernel, target, accuracy)[0]
        for knobs in choices(kernel, target, arithmetic):
            yield cls(**asdict(knobs))

    def tiles(self, kernel: Kernel) -> Tiles:
        """The sizes that follow from the knobs."""
        return Tiles(kernel, self.positions, self.features, self.depth)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return seconds(self, kernel, target)

    def error_bound(self, kernel: Kernel) -> float:
        """On tensor cores 2^-23 per product plus the factors' rounding; else one rounding per product."""
        return bound(kernel, self.arithmetic)

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """The weight as [feature][tap][channel], whole tiles of features, and whole steps of channels."""
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        tiles = self.tiles(kernel)
        features, channels, *taps = kernel.weight_axes
        extents = (tiles.weight_rows, *tiles.conv.kernel, tiles.weight_channels)
        if not taps:  # a matrix product's weight has no axes for its one tap
            extents = (tiles.weight_rows, tiles.weight_channels)
        halves = self.arithmetic == "tf32x3"
        return weight_packing(operand, (features, *taps, channels), extents, halves=halves)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return writer_of(self, kernel, self.text).source()

"""Depthwise convolution with pixels innermost: vectors along the rows of one plane at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.depthwise_plan import PlanePlan, depthwise_claims
from fuseplan.backends.cpu.template import weight_packing
from fuseplan.backends.cpu.templates.depthwise_planes_writer import DepthwisePlanesKnobs, Writer
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.packing import Packing
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template


@dataclass(frozen=True)
class DepthwisePlanes(DepthwisePlanesKnobs):
    """Tiles of rows x vectors of output pixels; rows of src are shifted in registers where they meet padding.

    reads:  src once from memory, again from the first cache for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of its plane
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and pixels are innermost
    """

    name: ClassVar[str] = "depthwise_planes"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from depthwise_claims(kernel)
        last = kernel.dst.is_channels_last and prod(kernel.dst.shape[2:]) > 1
        yield claim(not last, Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield model.padding_claim(kernel)
        yield from cls.claims(kernel, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = PlanePlan(kernel, target)
        for tile in plan.tiles()[:2]:
            yield cls(*tile, *plan.blocks(*tile))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        waste = PlanePlan(kernel, target).waste(self.rows, self.vectors, self.features)
        work, traffic = kernel.contraction.flops * waste, self.traffic(kernel, target)
        return model.seconds(kernel, target, flops=work, traffic=traffic, efficiency=1.0)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """weight as [feature][channel of a group][tap]."""
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        return weight_packing(kernel)

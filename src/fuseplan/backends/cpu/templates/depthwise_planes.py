"""Depthwise convolution, and groups of few channels, pixels innermost: vectors along a plane's rows."""

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

_WIDEST = 16  # channels of a group: with more, the rows of all of them leave the near caches


@dataclass(frozen=True)
class DepthwisePlanes(DepthwisePlanesKnobs):
    """Tiles of rows x vectors of output pixels; rows of src are shifted in registers where they meet padding.

    reads:  src once from memory, again from the first cache for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of its plane
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and pixels are innermost
    """

    name: ClassVar[str] = "depthwise_planes"
    efficiency: ClassVar[float] = 1.0

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield from cls.groups(kernel)
        last = kernel.dst.is_channels_last and prod(kernel.dst.shape[2:]) > 1
        yield claim(not last, Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield model.padding_claim(kernel)

    @classmethod
    def groups(cls, kernel: Kernel) -> Iterator[Claim]:
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

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """weight as [feature][channel of a group][tap]."""
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        return weight_packing(kernel)


@dataclass(frozen=True)
class GroupedPlanes(DepthwisePlanes):
    """Depthwise's tiles of pixels for several features of a group at once, summed over the group's channels.

    reads:  src once from memory, again from the first caches for each tile; with a prologue, another dtype or
            other strides each thread first makes a plain copy of a group's planes
    writes: dst once
    chosen: groups of few channels, and pixels are innermost
    """

    name: ClassVar[str] = "grouped_planes"

    @classmethod
    def groups(cls, kernel: Kernel) -> Iterator[Claim]:
        """What is asked of the convolution's groups."""
        groups, channels = kernel.contraction.groups, kernel.contraction.channels_per_group
        fits, want = groups > 1 and 2 <= channels <= _WIDEST, f"2 or more groups of 2 to {_WIDEST} channels"
        yield model.about(kernel, fits, Reason.GROUP_WIDTH, f"{groups} of {channels} channels", want)

"""Depthwise convolution with channels innermost: vectors along channels, tiles of output positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.depthwise_plan import Plan, depthwise_claims
from fuseplan.backends.cpu.grouping import grouping
from fuseplan.backends.cpu.template import weight_packing
from fuseplan.backends.cpu.templates.depthwise_writer import DepthwiseKnobs, Writer
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.packing import Packing
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import (
    Accuracy,
    Template,
    Traffic,
    lanes,
)

_MULTIPLIER = 8  # features a channel: each has code of its own


@dataclass(frozen=True)
class Depthwise(DepthwiseKnobs):
    """Tiles of rows x columns of output positions, one vector of channels per position; src is read in place.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and channels are innermost
    """

    name: ClassVar[str] = "depthwise"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from depthwise_claims(kernel)
        conv = kernel.contraction
        fewer = conv.features_per_group <= _MULTIPLIER
        yield claim(
            fewer,
            Reason.CHANNEL_MULTIPLIER,
            got=f"{conv.features_per_group} features a channel",
            want=f"at most {_MULTIPLIER}",
            operator=kernel.contraction_step,
        )
        yield claim(model.features_innermost(kernel), Reason.CHANNELS_FIRST, got=str(kernel.dst))
        yield model.padding_claim(kernel)
        yield from cls.claims(kernel, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = Plan(kernel, target)
        for rows, columns in plan.tiles()[:2]:
            yield cls(rows, columns, *plan.blocks(rows, columns))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return model.traffic(kernel, target, workspace=Plan(kernel, target).staged.elements)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        plan = Plan(kernel, target)
        work = plan.conv.flops * plan.waste(self.rows, self.columns)
        phases = 2 if plan.staged.copies else 1
        traffic = self.traffic(kernel, target)
        return model.seconds(kernel, target, flops=work, traffic=traffic, efficiency=1.0, phases=phases)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """weight as [block of channels][tap][vector of features][channel of a group][lane]."""
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        return weight_packing(kernel, *grouping(kernel.contraction, lanes(kernel, target)).steps)

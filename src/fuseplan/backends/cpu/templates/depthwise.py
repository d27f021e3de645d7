"""Depthwise convolution, and many narrow groups, channels innermost: vectors along channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.depthwise_plan import Plan, depthwise_claims
from fuseplan.backends.cpu.grouping import grouping
from fuseplan.backends.cpu.templates.depthwise_writer import DepthwiseKnobs, Writer
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Step
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, lanes, moved_once
from fuseplan.messages.reasons import Claim, Reason, claim

_MULTIPLIER = 8  # features a channel: each has code of its own
_WIDEST = 16  # channels of a group: the products of each have code of their own


@dataclass(frozen=True)
class Depthwise(DepthwiseKnobs):
    """Tiles of rows x columns of output positions, one vector of channels per position; src is read in place.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: each channel is convolved alone (groups = channels) and channels are innermost
    """

    name: ClassVar[str] = "depthwise"
    efficiency: ClassVar[float] = 1.0
    pools: ClassVar[bool] = True
    opens: ClassVar[bool] = True
    ranges: ClassVar[bool] = True

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        yield from cls.groups(kernel, target)
        yield claim(model.features_innermost(kernel), Reason.CHANNELS_FIRST, got=str(kernel.dst))
        yield model.padding_claim(kernel)

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        """What is asked of the convolution's groups."""
        yield from depthwise_claims(kernel)
        many, most = kernel.contraction.features_per_group, f"at most {_MULTIPLIER}"
        fewer, got = many <= _MULTIPLIER, f"{many} features a channel"
        yield model.about(kernel, fewer, Reason.CHANNEL_MULTIPLIER, got, most)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        plan = Plan(kernel, target)
        for rows, columns in plan.tiles()[:2]:
            yield cls(rows, columns, *plan.blocks(rows, columns))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return moved_once(kernel, Plan(kernel, target).staged.elements * model.itemsize(kernel))

    def waste(self, kernel: Kernel, target: Target) -> float:
        return Plan(kernel, target).waste(self.rows, self.columns)

    def phases(self, kernel: Kernel, target: Target) -> int:
        return 2 if Plan(kernel, target).staged.copies else 1

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(self, kernel, target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """weight as [block of channels][tap][vector of features][channel of a group][lane]."""
        return grouping(kernel.contraction, lanes(kernel, target)).steps


@dataclass(frozen=True)
class Grouped(Depthwise):
    """Depthwise's tiles over whole groups: a vector of channels is shuffled once for each channel of a group.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: groups so narrow that two or more have their features in one vector, and channels are innermost
    """

    name: ClassVar[str] = "grouped"

    @classmethod
    def groups(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        """What is asked of the convolution's groups."""
        conv, most = kernel.contraction, lanes(kernel, target) // 2
        channels, features = conv.channels_per_group, conv.features_per_group
        fits = conv.groups > 1 and 2 <= channels <= _WIDEST and features <= most
        got = f"{conv.groups} groups of {channels} channels, {features} features each"
        want = f"2 or more groups of 2 to {_WIDEST} channels, at most {most} features each"
        yield model.about(kernel, fits, Reason.GROUP_WIDTH, got, want)

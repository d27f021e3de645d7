"""Convolution in many narrow groups, channels innermost: several groups share one vector of features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates.depthwise import Depthwise
from fuseplan.kernel import Kernel
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, lanes

_WIDEST = 16  # channels of a group: the products of each have code of their own


@dataclass(frozen=True)
class Grouped(Depthwise):
    """Depthwise's tiles over whole groups: a vector of channels is shuffled once for each channel of a group.

    reads:  src about twice from a near cache, once from memory; weight once for each tile
    writes: dst once
    chosen: groups so narrow that two or more have their features in one vector, and channels are innermost
    """

    name: ClassVar[str] = "grouped"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        conv = kernel.contraction
        most = lanes(kernel, target) // 2
        fits = conv.groups > 1 and 2 <= conv.channels_per_group <= _WIDEST and conv.features_per_group <= most
        yield claim(
            fits,
            Reason.GROUP_WIDTH,
            got=f"{conv.groups} groups of {conv.channels_per_group} channels, "
            f"{conv.features_per_group} features each",
            want=f"2 or more groups of 2 to {_WIDEST} channels, at most {most} features each",
            operator=kernel.contraction_step,
        )
        yield claim(model.features_innermost(kernel), Reason.CHANNELS_FIRST, got=str(kernel.dst))
        yield model.padding_claim(kernel)
        yield from cls.claims(kernel, accuracy)

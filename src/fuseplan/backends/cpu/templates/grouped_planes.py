"""Convolution in many narrow groups, pixels innermost: several features share each vector of pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates.depthwise_planes import DepthwisePlanes
from fuseplan.kernel import Kernel
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy

_WIDEST = 16  # channels of a group: with more, the rows of all of them leave the near caches


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
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        conv = kernel.contraction
        yield claim(
            conv.groups > 1 and 2 <= conv.channels_per_group <= _WIDEST,
            Reason.GROUP_WIDTH,
            got=f"{conv.groups} of {conv.channels_per_group} channels",
            want=f"2 or more groups of 2 to {_WIDEST} channels",
            operator=kernel.contraction_step,
        )
        last = kernel.dst.is_channels_last and prod(kernel.dst.shape[2:]) > 1
        yield claim(not last, Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield model.padding_claim(kernel)
        yield from cls.claims(kernel, accuracy)

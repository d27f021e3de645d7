"""How channels and features share vectors where each feature needs few channels."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.packing import Pad, Reshape, Step, Transpose


@dataclass(frozen=True)
class Grouping:
    """Blocks of channels and the vectors of features that are made from each.

    Attributes:
        channels: channels of a block; they lie side by side.
        features: features made from them; they lie side by side too.
        parts: vectors that a block's features take.
    """

    conv: Contraction
    lanes: int
    channels: int
    features: int
    parts: int

    @property
    def blocks(self) -> int:
        """Blocks of all channels; the last may have fewer."""
        return -(-self.conv.channels // self.channels)

    @property
    def products(self) -> int:
        """Products a tap and feature: channels of a group."""
        return self.conv.channels_per_group

    @property
    def waste(self) -> float:
        """Lanes computed over features."""
        return self.blocks * self.parts * self.lanes / self.conv.features

    def features_of(self, channels: int, part: int) -> int:
        """How many features one part has, where a block has so many channels."""
        made = channels // self.conv.channels_per_group * self.conv.features_per_group
        return max(0, min(self.lanes, made - part * self.lanes))

    def sources(self, part: int, number: int, count: int) -> list[int]:
        """The channel of a block that each of a part's first lanes multiplies in product `number`."""
        conv = self.conv
        groups = [(part * self.lanes + lane) // conv.features_per_group for lane in range(count)]
        return [group * conv.channels_per_group + number for group in groups]

    @property
    def steps(self) -> tuple[Step, ...]:
        """weight, (features, channels of a group, *kernel), as [block][tap][part][product][lane]."""
        conv, each = self.conv, self.features // self.parts
        inner = self.products, conv.taps
        return (
            Reshape((conv.features, *inner)),
            Pad((self.blocks * self.features, *inner)),
            Reshape((self.blocks, self.parts, each, *inner)),
            Transpose((0, 4, 1, 3, 2)),
            Pad((self.blocks, conv.taps, self.parts, self.products, self.lanes)),
        )


def grouping(conv: Contraction, lanes: int) -> Grouping:
    """A vector of channels, each convolved alone; or as many groups as have their features in one vector."""
    if conv.channels_per_group == 1:
        return Grouping(conv, lanes, lanes, lanes * conv.features_per_group, conv.features_per_group)
    groups = min(conv.groups, max(1, lanes // conv.features_per_group))
    return Grouping(conv, lanes, groups * conv.channels_per_group, groups * conv.features_per_group, 1)

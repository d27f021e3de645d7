"""How an implicit matrix product is cut into tiles: groups side by side, features, positions, depth."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fuseplan.backends.triton.index import WIDE
from fuseplan.kernel import Convolution, Kernel
from fuseplan.locks import cached_property

LEAST = 16  # a matrix unit's tile has at least so many features, positions, and products in a sum
NARROW = 16  # with fewer channels a group, taps and channels are summed over as one axis


@dataclass(frozen=True)
class Knobs:
    """The fields of `GpuConvolution`, which says what they mean."""

    positions: int
    features: int
    depth: int
    joined: int = 1
    ahead: bool = False
    swapped: bool = False
    arithmetic: str = "native"
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True)
class Tiles:
    """The sizes that follow from a kernel and the extents of a tile.

    Several groups that are too narrow for a tile alone stand side by side in one: `merged` of them have
    `channels` channels and `features` features together, and weights between different groups are zero.

    Attributes:
        kernel: what is computed.
        positions, block_features, depth: output positions, features, and products of a sum in a tile.
    """

    kernel: Kernel
    positions: int
    block_features: int
    depth: int

    @property
    def conv(self) -> Convolution:
        """The kernel's."""
        return self.kernel.contraction

    @cached_property
    def merged(self) -> int:
        """Groups that stand side by side in a tile."""
        return merged_groups(self.conv)

    @property
    def group_blocks(self) -> int:
        """Tiles along the groups."""
        return -(-self.conv.groups // self.merged)

    @property
    def channels(self) -> int:
        """Channels that a tile's features read."""
        return self.merged * self.conv.channels_per_group

    @property
    def features(self) -> int:
        """Features of the groups that stand side by side."""
        return self.merged * self.conv.features_per_group

    @property
    def feature_blocks(self) -> int:
        """Tiles along the features of one block of groups."""
        return -(-self.features // self.block_features)

    @property
    def position_blocks(self) -> int:
        """Tiles along the output positions of the whole batch."""
        return -(-self.conv.rows // self.positions)

    @property
    def programs(self) -> int:
        """All tiles."""
        return self.feature_blocks * self.group_blocks * self.position_blocks

    @property
    def is_flat(self) -> bool:
        """Taps and channels are summed over as one axis, because there are so few channels."""
        return self.merged == 1 and self.channels < NARROW and self.conv.taps > 1

    @property
    def channel_blocks(self) -> int:
        """Steps of the sum for one tap; not asked where the sum is flat."""
        return -(-self.channels // self.depth)

    @property
    def steps(self) -> int:
        """Steps of the sum."""
        if self.is_flat:
            return -(-self.conv.depth // self.depth)
        return self.conv.taps * self.channel_blocks

    @property
    def weight_channels(self) -> int:
        """Channels of one tap in a packed row of the weight: whole steps where one tap has many."""
        if self.is_flat or self.merged > 1:
            return self.conv.channels_per_group
        return self.channel_blocks * self.depth

    @property
    def weight_rows(self) -> int:
        """Packed rows: every tile reads whole ones."""
        return (self.group_blocks - 1) * self.features + self.feature_blocks * self.block_features

    @property
    def is_wide(self) -> bool:
        """Whether any offset needs 64 bits."""
        weight = self.weight_rows * self.conv.taps * self.weight_channels
        positions = (self.position_blocks + 1) * self.positions
        reach = max(self.kernel.src.span, self.kernel.dst.span) + self._overhang
        return max(weight, positions, reach) >= WIDE

    @property
    def _overhang(self) -> int:
        """How far offsets of elements that are masked out may lie outside of src."""
        steps = self.kernel.src.element_strides[2:]
        around = (low + high for low, high in self.conv.padding)
        return sum(map(prod, zip(steps, around, strict=False)))

    @property
    def products(self) -> int:
        """Multiplications of all tiles, those for padding counted."""
        return self.programs * self.positions * self.block_features * self.steps * self.depth


def merged_groups(conv: Convolution) -> int:
    """How many groups stand side by side in a tile: as many as fill the least tile, at most 64 channels."""
    if conv.groups == 1:
        return 1
    filling = -(-LEAST // conv.features_per_group)
    allowed = max(1, 64 // conv.channels_per_group)
    return min(filling, allowed, conv.groups)


def power_of_two(size: int, most: int) -> int:
    """The least power of two that holds `size`, from LEAST to `most`."""
    return max(LEAST, min(most, 1 << (size - 1).bit_length()))

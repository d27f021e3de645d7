"""Attention on Hopper: a warp that copies, and groups of warps whose products overlap with exponentials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.templates.attention import GpuAttention
from fuseplan.backends.triton.templates.hopper_attention_rows import BESIDE_A_BYTE, bytes_beside, limits
from fuseplan.backends.triton.templates.hopper_attention_writer import (
    RINGS,
    AttentionLots,
    HopperAttentionKnobs,
    HopperAttentionWriter,
)
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.messages.reasons import Claim, Reason, claim

# Groups and keys of a block, for heads of up to so many elements.
TILES = {64: ((3, 128), (2, 128), (3, 64)), 128: ((2, 128), (3, 64)), 256: ((2, 64),)}
# Spills the place of a pair of tiles: 187 us for 151 us without further tiles on an H200, 16x16x1024x64.
CROWDED = (3, 128)
MOST_STAGES = 4

# One processor of an H100: a fit to 280 measurements, 31 shapes of 128 to 16,384 keys. The last two lines
# were fitted to 446 times of 52 random shapes on an H200.
FLOPS_A_SECOND = 8.4e12
EXPONENTIALS = 85e9  # a second
SHOWN = {True: 1.15, False: 3.6}  # of the exponentials' time beside products: where groups take turns, or not
TURN = 0.42e-6  # of a block, for groups to wait for their turn
TILE_SECONDS = {True: 1.4e-6, False: 3.1e-6}  # before the first scores and behind the last product


@dataclass(frozen=True)
class HopperAttention(HopperAttentionKnobs):
    """Attention with copies and products that run beside the exponentials.

    reads:  src once; key and value once for each tile of queries, most often from the second cache
    writes: dst once, by copies from shared memory
    chosen: on sm_90, for f16 and bf16, where there are queries for tiles

    One warp copies blocks of keys and values into two rings in shared memory. Groups of four warps have 64
    queries each, and read the same blocks.

    Attributes:
        groups: groups of four warps that multiply.
        keys: keys of a block.
        stages: blocks of each ring.
        persistent: whether programs go on to further tiles; the copies for these begin early.
        in_turn: whether groups begin their products one after the other.
    """

    name: ClassVar[str] = "hopper_attention"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = GpuAttention.error_scale

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from limits(GpuAttention, RINGS, kernel, target, accuracy)
        yield claim(any(cls._made(kernel, target)), Reason.UNSEEN_KEYS)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        yield from sorted(cls._made(kernel, target), key=lambda each: each.seconds(kernel, target))

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[HopperAttention]:
        size = max(kernel.attention.size, kernel.attention.features)
        listed = next(tiles for most, tiles in TILES.items() if size <= most)
        for (groups, keys), persistent, in_turn in product(listed, (False, True), (False, True)):
            if (groups, keys) == CROWDED and persistent and kernel.attention.is_causal:
                continue
            tried = (cls(groups, keys, stages, persistent, in_turn) for stages in range(MOST_STAGES, 1, -1))
            sizes = {each: each.lots(kernel, target) for each in tried}
            fitting = [each for each, lots in sizes.items() if lots.shared_bytes <= target.l1_bytes]
            # results of their own let the next tile's queries come early, which is worth a stage
            made = max(fitting, key=lambda each: sizes[each].holds_dst)
            if not sizes[made].is_idle:
                yield made

    def lots(self, kernel: Kernel, target: Target) -> AttentionLots:
        """What follows from the choice for a kernel."""
        return AttentionLots(self, kernel, target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        lots = self.lots(kernel, target)
        pairs = lots.rows * self.keys
        products = 2 * pairs * (lots.size + lots.features) / FLOPS_A_SECOND
        shown = SHOWN[self.in_turn] + BESIDE_A_BYTE * bytes_beside(kernel)
        block = products + shown * pairs / EXPONENTIALS + TURN * self.in_turn
        inside = lots.seconds(block, TILE_SECONDS[self.persistent])
        moved = model.seconds(target, self.traffic(kernel, target))
        return round(max(inside + model.LAUNCH_SECONDS, moved), 9)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """As `attention`: weights rounded to src's dtype, scores that are sums, and the sums of the keys."""
        return GpuAttention.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        lots = self.lots(kernel, target)
        return HopperAttentionWriter(lots, kernel, self.text).source(target)

"""The gradients of attention on Hopper: a warp that copies, and products that run beside the exponentials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.templates.attention_gradient import GpuAttentionGradient
from fuseplan.backends.triton.templates.hopper_attention_gradient_writer import (
    GradientLots,
    HopperGradientKnobs,
    HopperGradientWriter,
)
from fuseplan.backends.triton.templates.hopper_attention_rows import BESIDE_A_BYTE, bytes_beside, limits
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.language.attend import AttendGradient
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import text

ROLES = ("key", "value", "lse", "delta", "grad")
# Groups, others of a block, and whether products lag, for heads of up to so many elements.
BY_QUERY = {64: ((2, 128, True), (2, 64, True)), 128: ((2, 64, True),)}
BY_KEY = {64: ((2, 128, False), (2, 64, True)), 128: ((2, 64, True),)}
# With a soft cap, or a number beside each score: blocks of 128 spill, and products that lag behind two sums.
CROWDED_BY_QUERY = {128: ((2, 64, True),)}
CROWDED_BY_KEY = {64: ((2, 64, True),), 128: ((2, 64, False),)}
MOST_STAGES = 4
SMALL = 64  # elements of a head for which groups take no turns, and keys have registers for a soft cap

# One processor of an H200: 0.93 to 1.19 of 42 measurements, six shapes of 1,024 to 16,384 rows.
FLOPS_A_SECOND = 8.4e12
EXPONENTIALS = 85e9  # a second
SHOWN = {"query": 2.4, "key": 5.0}  # of the exponentials' time beside products
SHOWN_AT_ONCE = 3.8  # where products do not lag
TURNS = {False: 0.96, True: 1.03}  # a block's time where groups take turns; where rows meet a triangle
TILE_SECONDS = {True: 2.5e-6, False: 5e-6}  # before the first scores and behind the last product


@dataclass(frozen=True)
class HopperAttentionGradient(HopperGradientKnobs):
    """Products with the slopes of scores, with copies and products that run beside the exponentials.

    reads:  src, grad and the sums once; key and value once for each tile of queries; or the other way round
    writes: dst once, and the gradient of value, by copies from shared memory
    chosen: on sm_90, for f16 and bf16, where there are rows for tiles

    One warp copies blocks into two rings in shared memory. Groups of four warps have 64 rows each, and read
    the same blocks. Rows are queries, or keys for the gradients of key and value.

    Attributes:
        groups: groups of four warps that multiply.
        keys: rows of a block, which are queries where a tile's rows are keys.
        stages: blocks of each ring; a block of the first one stays until the next one's products have begun.
        persistent: whether programs go on to further tiles.
        in_turn: whether groups begin their products one after the other.
        lagging: whether a block's slopes are multiplied with the next block's scores.
    """

    name: ClassVar[str] = "hopper_attention_gradient"
    opens: ClassVar[bool] = False
    error_scale: ClassVar[str] = GpuAttentionGradient.error_scale

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from limits(GpuAttentionGradient, ROLES, kernel, target, accuracy)
        made = kernel.attention
        size, most = max(made.size, made.features), max(BY_KEY)
        yield claim(size <= most, Reason.HEAD_SIZE, got=size, want=f"at most {most}", operator=0)
        is_full = cls._is_key(kernel) and size > SMALL
        is_crowded = is_full and not made.is_scaled
        yield claim(not is_crowded, Reason.CAPPED_SLOPES, got=text(made.score), operator=0)
        yield claim(any(cls._made(kernel, target)), Reason.UNSEEN_KEYS)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        yield from sorted(cls._made(kernel, target), key=lambda each: each.seconds(kernel, target))

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[HopperAttentionGradient]:
        made, is_key = kernel.attention, cls._is_key(kernel)
        size, is_crowded = max(made.size, made.features), not made.is_scaled or bytes_beside(kernel)
        crowded, usual = (CROWDED_BY_KEY, BY_KEY) if is_key else (CROWDED_BY_QUERY, BY_QUERY)
        tiles = crowded if is_crowded else usual
        listed = next(each for most, each in tiles.items() if size <= most)
        is_plain = size > SMALL and is_key and is_crowded
        forms = (
            ((False,), (False,)) if is_plain else ((True, False), (True, False) if size > SMALL else (False,))
        )
        for (groups, keys, lagging), persistent, in_turn in product(listed, *forms):
            tried = (
                cls(groups, keys, stages, persistent, in_turn, lagging)
                for stages in range(MOST_STAGES, 1, -1)
            )
            fits = (each for each in tried if each.lots(kernel, target).shared_bytes <= target.l1_bytes)
            chosen = next(fits, None)
            if chosen and not chosen.lots(kernel, target).is_idle:
                yield chosen

    @staticmethod
    def _is_key(kernel: Kernel) -> bool:
        return isinstance(kernel.centre, AttendGradient) and kernel.centre.by == "key"

    def lots(self, kernel: Kernel, target: Target) -> GradientLots:
        """What follows from the choice for a kernel."""
        return GradientLots(self, kernel, target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        lots, made = self.lots(kernel, target), kernel.attention
        pairs, by = lots.rows * self.keys, lots.meeting.by
        each = 2 * lots.size + lots.features * (2 if lots.is_rising else 1)
        shown = (SHOWN[by] if self.lagging else SHOWN_AT_ONCE) + BESIDE_A_BYTE * bytes_beside(kernel)
        block = 2 * pairs * each / FLOPS_A_SECOND + shown * pairs / EXPONENTIALS
        block *= TURNS[made.is_causal] if self.in_turn else 1.0
        inside = lots.seconds(block, TILE_SECONDS[self.persistent])
        moved = model.seconds(target, self.traffic(kernel, target))
        return round(max(inside + model.LAUNCH_SECONDS, moved), 9)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """As `attention_gradient`: weights and slopes rounded to src's dtype, and the sums."""
        return GpuAttentionGradient.bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        lots = self.lots(kernel, target)
        return HopperGradientWriter(lots, kernel, self.text).source(target)

"""Attention on a CPU: scores block by block, in the caches alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fuseplan.backends.attending import Heads
from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates.attention_tiles import AttentionKnobs
from fuseplan.backends.cpu.templates.attention_writer import AttentionWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, lanes, unit_roundoff
from fuseplan.language.attend import Attend
from fuseplan.messages.reasons import Claim, Reason, claim

EFFICIENCY = {4: 0.8, 2: 0.7, 1: 0.5}  # of the multiply-adds, by the vectors of queries in a tile
KEYS = 96  # of a block: with 64 queries, its scores fit the first cache


@dataclass(frozen=True)
class Attention(AttentionKnobs):
    """Softmax of scores and a product with it, with the scores of a block in the first cache.

    reads:  src once; key and value once for each block of queries, from the second cache
    writes: dst once
    chosen: for every plan with attention

    The lanes of a vector are queries, so that no maximum and no sum crosses lanes, and keys and values are
    read where they lie, an element at a time for all queries of a tile.

    Attributes:
        vectors: vectors of queries in a tile.
        tiles: tiles of a block, a task's queries.
        keys: keys of a block.
    """

    name: ClassVar[str] = "attention"
    error_scale: ClassVar[str] = "the largest |value|, for scores of size 1"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(isinstance(kernel.centre, Attend), Reason.NO_ATTENTION)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        width = lanes(kernel, target)
        rows = Heads(kernel.attention, width).rows
        for vectors in (4, 2, 1):
            if 4 * vectors >= target.vector_registers or (vectors > 1 and rows <= vectors * width // 2):
                continue
            for tiles in (1, 2, 4):
                if tiles == 1 or (vectors == 4 and rows > tiles * vectors * width // 2):
                    yield cls(vectors, tiles, KEYS)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        made, width = kernel.attention, lanes(kernel, target)
        heads, block = Heads(made, width), self.vectors * self.tiles * width
        blocks = -(-heads.rows // block)
        waste = blocks * block / heads.rows
        tasks = heads.groups * blocks
        waste *= -(-tasks // target.threads) * target.threads / tasks
        moved = self.traffic(kernel, target)
        efficiency = EFFICIENCY[self.vectors]
        return model.seconds(kernel, target, flops=made.flops * waste, traffic=moved, efficiency=efficiency)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding for each product of a score, and for each key that a sum has."""
        made = kernel.attention
        return (made.size + made.keys + log2(made.keys + 1) + 8) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return AttentionWriter(self, kernel, target).source()

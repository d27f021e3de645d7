"""Attention on a CPU: scores block by block, in the caches alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, log2
from typing import ClassVar

from fuseplan.backends.attending import Heads
from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates.attention_few import FewWriter, few_rows
from fuseplan.backends.cpu.templates.attention_tiles import AttentionKnobs
from fuseplan.backends.cpu.templates.attention_writer import AttentionWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, lanes, unit_roundoff
from fuseplan.language.attend import Attend
from fuseplan.messages.reasons import Claim, Reason, claim

EFFICIENCY = {4: 0.8, 2: 0.7, 1: 0.5}  # of the multiply-adds, by the vectors of queries in a tile
IN_HALVES = {4: 0.8, 2: 0.78, 1: 0.77}  # measured on Zen 4, of 128 to 659 queries and head sizes 64 to 128
_FEW_TASKS = 4  # of a thread: the last one of more leaves others idle for a short time
KEYS = 96  # of a block with four vectors: with 64 queries, its scores fit the first cache


@dataclass(frozen=True)
class Attention(AttentionKnobs):
    """Softmax of scores and a product with it, with the scores of a block in the first cache.

    reads:  src once; key and value once for each block of queries, from the second cache
    writes: dst once
    chosen: for every plan with attention

    The lanes of a vector are queries, so that no maximum and no sum crosses lanes, and keys and values are
    read where they lie, an element at a time for all queries of a tile. Of up to half as many queries as a
    vector has lanes, the lanes are elements of keys and values instead.

    Attributes:
        vectors: vectors of queries in a tile.
        tiles: tiles of a block, a task's queries.
        keys: keys of a block.
        shares: of the keys of a task, each a task, where there are fewer blocks of queries than threads.
    """

    shares: int = 1

    name: ClassVar[str] = "attention"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the largest |value|, for scores of size 1"
    centre: ClassVar[type] = Attend

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(isinstance(kernel.centre, cls.centre), Reason.NO_ATTENTION)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        width = lanes(kernel, target)
        rows = Heads.of(kernel, width).rows
        for vectors in (4, 2, 1):
            if 4 * vectors >= target.vector_registers or (vectors > 1 and rows <= vectors * width // 2):
                continue
            for tiles in (1, 2, 4):
                if tiles == 1 or (vectors == 4 and rows > tiles * vectors * width // 2):
                    made = cls(vectors, tiles, KEYS * 4 // vectors)
                    yield made
                    yield from made._shared(kernel, target)

    def _shared(self, kernel: Kernel, target: Target) -> Iterator[Attention]:
        """The same with shares of keys for each thread, where the tasks are few."""
        wanted, tasks = target.threads, self._tasks(kernel, target)
        if kernel.open_axis is None and tasks % wanted and tasks < _FEW_TASKS * wanted:
            counts = {-(-wanted // tasks), wanted // gcd(tasks, wanted)}
            yield from (
                replace(self, shares=each) for each in counts if 1 < each <= kernel.attention.keys // KEYS
            )

    def _tasks(self, kernel: Kernel, target: Target) -> int:
        """Blocks of queries."""
        heads = Heads.of(kernel, lanes(kernel, target))
        return heads.groups * -(-heads.rows // self._block(kernel, target))

    def _block(self, kernel: Kernel, target: Target) -> int:
        """Queries of a task; of few, what these cost in others."""
        few = self._few(kernel, target)
        return few + 3 if few else self.vectors * self.tiles * lanes(kernel, target)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        block, tasks = self._block(kernel, target), self._tasks(kernel, target) * self.shares
        waste = Heads.of(kernel, lanes(kernel, target)).waste(block)
        waste *= -(-tasks // target.threads) * target.threads / tasks
        joined = 4 * tasks * block * kernel.attention.features if self.shares > 1 else 0
        return model.seconds(
            kernel,
            target,
            flops=kernel.flops * waste + joined,
            traffic=self.traffic(kernel, target),
            efficiency=(IN_HALVES if model.in_halves(target) else EFFICIENCY)[self.vectors],
            phases=1 + (self.shares > 1),
        )

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding for each product of a score, and for each key that a sum has."""
        made = kernel.attention
        return (made.size + made.keys + log2(made.keys + 1) + 8) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        writer = FewWriter if self._few(kernel, target) else AttentionWriter
        return writer(self, kernel, target, self.shares).source()

    def _few(self, kernel: Kernel, target: Target) -> int:
        return few_rows(kernel, target) if self.vectors == self.tiles == 1 else 0

"""Attention on GPUs: scores block by block, in registers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import log2
from typing import ClassVar, TypeVar

from fuseplan.backends.attending import Heads
from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.attention_rows import HALVES, LEAST, SUMMED, AttentionKnobs, padded
from fuseplan.backends.triton.templates.attention_writer import FEW, AttentionWriter
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim
from fuseplan.language.attend import Attend
from fuseplan.language.dtypes import FACTORS, dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim

Tile = tuple[int, int, int, int]

WIDEST = 256  # elements of a head
# Queries and keys of a tile, warps, and stages, for heads of up to so many elements. Of 16-bit elements 128 x
# 128 with 4 warps spills.
TILES = {
    64: ((128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (16, 128, 4, 3), (16, 64, 4, 3)),
    128: ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (16, 64, 4, 3), (16, 32, 4, 3)),
    256: ((128, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (16, 32, 4, 2)),
}
SINGLE = ((64, 32, 8, 2), (32, 32, 4, 2), (16, 32, 4, 2))  # of f32: products without tensor cores
# Of f32 in three products: for Hopper, whose products take the second factor from shared memory; for others.
# Each with the share of a third of the peak that it reaches on an H200: 4x16x1024x64, 2x8x2048x80, and
# 2x16x2048x128, causal, and 2x8x2048x256, causal. Of 256 elements tiles of 64 queries spill and were wrong.
THREE: dict[int, dict[Tile, float]] = {
    64: {
        (128, 64, 8, 2): 0.42, (64, 64, 4, 2): 0.35, (64, 32, 4, 2): 0.33, (32, 32, 4, 2): 0.34,
        (16, 64, 4, 2): 0.29,
    },
    96: {(128, 32, 8, 2): 0.31, (64, 32, 4, 2): 0.29, (32, 32, 4, 2): 0.18, (16, 32, 4, 2): 0.09},
    128: {(16, 32, 4, 2): 0.285, (32, 32, 4, 2): 0.26, (128, 32, 8, 2): 0.24},
    256: {(16, 32, 4, 2): 0.27, (16, 16, 4, 2): 0.15, (32, 32, 8, 2): 0.15, (32, 16, 8, 2): 0.13},
}  # fmt: skip
THREE_ELSEWHERE: dict[int, dict[Tile, float]] = {
    64: {(32, 32, 4, 2): 0.34, (16, 64, 4, 2): 0.29},
    128: {(32, 32, 4, 2): 0.26, (16, 32, 4, 2): 0.285},
    256: {},
}
REACHED = {128: 0.62, 64: 0.5, 32: 0.3, 16: 0.12}  # of the peak's products, by the queries of a tile
IEEE = 0.21  # of the peak without tensor cores: 4x16x1024x64 on an H200
EXPONENTIALS = 1.2e12  # scores a second of an H100: maximum, exponential, sum, and the product's factor
FIRST = (
    0.5  # blocks that a program could compute until its first one is there: 1.0 to 1.3 of H200's short rows
)


@dataclass(frozen=True)
class GpuAttention(AttentionKnobs):
    """Softmax of scores and a product with it, with the scores in registers alone.

    reads:  src once; key and value once for each tile of queries, most often from the second cache
    writes: dst once; with the keys in parts, each part's sums to the workspace and back
    chosen: for every plan with attention

    Attributes:
        rows: queries of a tile; of few queries, those of all heads that read the same keys.
        keys: keys of a step.
        parts: programs that share a tile; each takes a part of the keys, the last one joins the parts.
        warps: warps of a program.
        stages: steps whose loads are under way at once.
        arithmetic: arithmetic of the products: `native`; of f32, `tf32x3` (as in `product`) or `ieee`.
    """

    name: ClassVar[str] = "attention"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the largest |value|, for scores of size 1"
    centre: ClassVar[type] = Attend

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(isinstance(kernel.centre, cls.centre), Reason.NO_ATTENTION)
        made = kernel.attention
        dtype = kernel.src.dtype
        is_taken = dtype in FACTORS and kernel.compute_dtype == "f32"
        yield claim(is_taken, Reason.ATTENTION_DTYPE, got=dtype, want="f16, bf16 or f32", operator=0)
        size = max(made.size, made.features)
        yield claim(size <= WIDEST, Reason.HEAD_SIZE, got=size, want=f"at most {WIDEST}", operator=0)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        made = [each for each in cls._made(kernel, target) if each._is_exact_enough(kernel, accuracy)]
        fitting = [each for each in made if each.shared_bytes(kernel) <= target.l1_bytes]
        least = min(made, key=lambda each: each.shared_bytes(kernel))
        yield from sorted(fitting or [least], key=lambda each: each.seconds(kernel, target))

    def _is_exact_enough(self, kernel: Kernel, accuracy: Accuracy) -> bool:
        if isinstance(accuracy, str):
            return accuracy != "strict" or self.arithmetic != "tf32x3"
        return self.error_bound(kernel) <= accuracy

    @staticmethod
    def three(kernel: Kernel) -> Mapping[Tile, float]:
        """The tiles of three products on Hopper, with the share of a third of the peak that each reaches."""
        return of_size(kernel, THREE)

    @classmethod
    def _tiles(cls, kernel: Kernel, target: Target) -> Iterator[tuple[str, Tile]]:
        """Arithmetic; queries and keys of a tile, warps, and stages."""
        if kernel.src.dtype != "f32":
            yield from (("native", each) for each in of_size(kernel, TILES))
            return
        if target.name.startswith("sm_"):
            three = cls.three(kernel) if target.name == "sm_90" else of_size(kernel, THREE_ELSEWHERE)
            yield from (("tf32x3", each) for each in three)
        yield from (("ieee", each) for each in SINGLE)

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[GpuAttention]:
        made, heads = kernel.attention, Heads(kernel.attention, FEW)
        for arithmetic, (rows, keys, warps, stages) in cls._tiles(kernel, target):
            if rows > LEAST and rows >= 2 * heads.rows:
                continue
            tiles = heads.groups * ceil_div(heads.rows, rows)
            most = min(2 * target.processors // tiles, ceil_div(made.keys, 2 * keys), 64)
            tried = [cls(rows, keys, 1, warps, fewer, arithmetic) for fewer in range(stages, 0, -1)]
            fits = (each for each in tried if each.shared_bytes(kernel) <= target.l1_bytes)
            chosen = next(fits, tried[-1])
            yield chosen
            # Of larger tiles in parts, ptxas makes the products wait for one another. Tiles of an open axis
            # may be more than counters.
            has_counters = tiles <= COUNTER_BYTES // 4 and kernel.open_axis is None
            if most > 1 and rows < 128 and has_counters:
                yield replace(chosen, parts=most)

    def shared_bytes(self, kernel: Kernel) -> int:
        """Of the tiles whose loads are under way, and of the queries."""
        made, item = kernel.attention, kernel.src.itemsize
        size, features = padded(made.size), padded(made.features)
        if self.arithmetic == "tf32x3":
            loading = item * (self.stages - 1) * self.keys * (size + features)
            return loading + HALVES * (self.rows * size + self.keys * max(size, features))
        return item * (self.stages * self.keys * (size + features) + self.rows * size)

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        return AttentionWriter(self, kernel, self.text).workspace_bytes

    def seconds(self, kernel: Kernel, target: Target) -> float:
        made, rates = kernel.attention, model.rates(target)
        programs, pairs, products = self._work(kernel)
        most = {"native": rates.half, "tf32x3": rates.tf32 / 3, "ieee": rates.single}[self.arithmetic]
        rate = most * self._reached(kernel)
        scale = rates.half / model.RATES["sm_90"].half
        # Programs read the keys of a head again from the second cache, at about thrice the memory's rate.
        again = pairs / self.rows * (made.size + made.features) * kernel.src.itemsize / (3 * rates.memory)
        used = model.fill(programs, target.processors)
        seconds = max(products / rate + pairs / (EXPONENTIALS * scale), again) / used
        meeting = 2e-6 if self.parts > 1 else 0.0
        return round(max(seconds, model.seconds(target, self.traffic(kernel, target))) + meeting, 9)

    def _reached(self, kernel: Kernel) -> float:
        """What the tile's products come to, of the peak."""
        if self.arithmetic == "tf32x3":
            tile = self.rows, self.keys, self.warps
            known = {each[:3]: share for each, share in self.three(kernel).items()}
            return known.get(tile, min(known.values()))
        return IEEE if self.arithmetic == "ieee" else REACHED[self.rows]

    def _work(self, kernel: Kernel) -> tuple[int, float, float]:
        """Programs, scores that they compute in whole blocks, and operations of the products."""
        made, heads = kernel.attention, Heads(kernel.attention, FEW)
        tiles = ceil_div(heads.rows, self.rows)
        rows = self.rows // heads.members if heads.members > 1 else self.rows
        spans = [made.seen(first * rows, rows) for first in range(tiles)]
        steps = sum(ceil_div(end - begin, self.keys) + (self.parts - 1) for begin, end in spans)
        pairs = heads.groups * (steps + FIRST * tiles) * self.rows * self.keys
        products = 2 * pairs * (padded(made.size) + padded(made.features))
        return tiles * heads.groups * self.parts, pairs, products

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Weights rounded to src's dtype, exponentials of scores that are sums, and the sums of the keys."""
        made, row = kernel.attention, dtype_of(kernel.src.dtype)
        weights = row.epsilon if row.is_narrow else 0.0
        weights *= 3 if made.rotary else 1  # turned queries and keys are rounded too
        return weights + (made.size + made.keys / 16 + log2(made.keys + 1) + 16) * 2.0**-24

    def error_bound(self, kernel: Kernel) -> float:
        """`bound`; in three products, besides, what factors lose, and tensor cores of sums: as `product`."""
        lost = sum(depth * 2.0**-23 + 2.0**-21 for depth in self._depths(kernel))
        return self.bound(kernel) + (lost if self.arithmetic == "tf32x3" else 0.0)

    def _depths(self, kernel: Kernel) -> tuple[int, ...]:
        """Of each product, how many a tensor core sums before their sum leaves it."""
        return min(SUMMED, kernel.attention.size), self.keys

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return AttentionWriter(self, kernel, self.text).source(target)


Listed = TypeVar("Listed")


def of_size(kernel: Kernel, tiles: Mapping[int, Listed]) -> Listed:
    """The tiles for heads of so many elements."""
    size = max(padded(kernel.attention.size), padded(kernel.attention.features))
    return next(each for most, each in tiles.items() if size <= most)

"""The gradients of attention on GPUs: scores are computed again block by block, in registers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fuseplan.backends.attending import Heads
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.attention import GpuAttention, Tile, of_size
from fuseplan.backends.triton.templates.attention_gradient_writer import GradientWriter
from fuseplan.backends.triton.templates.attention_rows import padded
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.attend import AttendGradient
from fuseplan.language.dtypes import dtype_of

# Rows of a tile, others of a step, warps, and stages, for heads of up to so many elements: none spills on an
# H100, and with 4 warps none on an MI300X, where a warp of 8 has half of the registers.
BY_QUERY = {
    64: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (16, 64, 4, 2)),
    128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (16, 32, 4, 2)),
    256: ((128, 32, 8, 2), (64, 32, 8, 2), (16, 32, 4, 1)),
}
BY_KEY = {
    64: ((128, 64, 8, 2), (64, 64, 4, 2), (16, 64, 4, 2)),
    128: ((128, 64, 8, 2), (128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 4, 2), (16, 32, 4, 2)),
    256: ((64, 32, 8, 2), (16, 32, 4, 1)),
}
# Of keys: 255 registers for 128 elements, if nothing is between product and exponential.
FULL = (128, 64, 8, 2)
# Of the peak's products on an H200, by rows, others and warps, for keys: causal, 4096 of each.
REACHED_BY_KEY = {
    (128, 64, 8): 0.48, (64, 64, 4): 0.5, (64, 32, 4): 0.45, (128, 32, 8): 0.38, (64, 64, 8): 0.27,
}  # fmt: skip
IEEE = 0.1  # of the peak without tensor cores: 2x16x2048x128, causal, on an H200
SINGLE = ((32, 32, 8, 1), (16, 16, 4, 1))  # of f32: products without tensor cores
# Of f32 in three products, each with the share of a third of the peak that it reaches on an H200, by query
# and by key: 4x16x2048x64, causal and not, 4x8x1500x32, 3x5x777x48, 2x8x1000x80 and 2x8x1024x96. Of 128
# elements, 2x16x2048x128, larger tiles spill, and of 256 each does.
SMALL: tuple[dict[Tile, float], dict[Tile, float]] = (
    {(128, 32, 8, 1): 0.43, (64, 32, 4, 1): 0.4, (16, 32, 4, 2): 0.29, (16, 16, 4, 2): 0.13},
    {(128, 16, 8, 1): 0.295, (64, 16, 4, 1): 0.283, (16, 32, 4, 2): 0.245, (16, 16, 4, 2): 0.13},
)
THREE: dict[int, tuple[dict[Tile, float], dict[Tile, float]]] = {
    32: (SMALL[0], {(64, 16, 4, 1): 0.283, (16, 32, 4, 2): 0.245}),
    48: ({(128, 32, 8, 1): 0.18, (16, 32, 4, 2): 0.075}, {(128, 16, 8, 1): 0.114, (16, 32, 4, 2): 0.063}),
    64: SMALL,
    80: ({(64, 32, 4, 1): 0.14, (16, 32, 4, 2): 0.082}, {(64, 16, 4, 1): 0.098, (16, 32, 4, 2): 0.046}),
    96: ({(64, 32, 4, 1): 0.27, (16, 32, 4, 2): 0.22}, {(16, 32, 4, 2): 0.18, (16, 16, 4, 2): 0.065}),
    128: ({(16, 32, 4, 2): 0.22, (16, 16, 4, 2): 0.125},) * 2,
    256: ({}, {}),
}


@dataclass(frozen=True)
class GpuAttentionGradient(GpuAttention):
    """Products with the slopes of scores, with the scores in registers alone.

    reads:  src, grad and the sums once; key and value once for each tile of queries; or the other way round
    writes: dst once, and the gradient of value
    chosen: for every plan with a gradient of attention

    The knobs are those of `GpuAttention`, with keys in the place of queries for the gradients of key and
    value; the others of a tile are in one part.
    """

    name: ClassVar[str] = "attention_gradient"
    opens: ClassVar[bool] = False
    error_scale: ClassVar[str] = "the largest sum of its terms, for scores of size 1"
    centre: ClassVar[type] = AttendGradient

    @staticmethod
    def three(kernel: Kernel) -> Mapping[Tile, float]:
        return of_size(kernel, THREE)[Heads.of(kernel, 0).by == "key"]

    @classmethod
    def _tiles(cls, kernel: Kernel, target: Target) -> Iterator[tuple[str, Tile]]:
        if kernel.src.dtype == "f32":
            if target.name == "sm_90":
                yield from (("tf32x3", each) for each in cls.three(kernel))
            yield from (("ieee", each) for each in SINGLE)
            return
        made, heads = kernel.attention, Heads.of(kernel, 0)
        size = max(padded(made.size), padded(made.features))
        listed = of_size(kernel, BY_KEY if heads.by == "key" else BY_QUERY)
        is_crowded = bool(not made.is_scaled or made.bias_axes or made.mask_axes or made.window)
        if size > 64 and (is_crowded or heads.others % FULL[1]) and heads.by == "key":
            listed = tuple(each for each in listed if each != FULL)
        yield from (("native", each) for each in listed)

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[GpuAttention]:
        heads, most = Heads.of(kernel, 0), 8 if target.name.startswith("sm_") else 4
        for arithmetic, (rows, keys, warps, stages) in cls._tiles(kernel, target):
            if warps <= most and (rows == 16 or rows < 2 * heads.rows):
                yield cls(rows, keys, 1, warps, stages, arithmetic)

    def shared_bytes(self, kernel: Kernel) -> int:
        """Of the blocks whose loads are under way, of the tile's rows, and of weights and slopes."""
        made, item = kernel.attention, kernel.src.itemsize
        row = padded(made.size) + padded(made.features)
        return item * (row * (self.stages * self.keys + self.rows) + 2 * self.rows * self.keys)

    def _work(self, kernel: Kernel) -> tuple[int, float, float]:
        made, heads = kernel.attention, Heads.of(kernel, 0)
        tiles = ceil_div(heads.rows, self.rows)
        # The pairs that places allow, in whole blocks: about half a block more at each edge of a band.
        pairs = made.pairs * (tiles * self.rows / heads.rows) * (1 + self.keys / (2 * heads.others))
        return tiles * heads.groups, pairs, kernel.flops / max(1, made.pairs) * pairs

    def _reached(self, kernel: Kernel) -> float:
        tile = self.rows, self.keys, self.warps
        if self.arithmetic == "ieee":
            return IEEE
        usual = super()._reached(kernel)
        return REACHED_BY_KEY.get(tile, usual) if Heads.of(kernel, 0).by == "key" else usual

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Weights and slopes rounded to src's dtype, exponentials of scores that are sums, and the sums."""
        made, row = kernel.attention, dtype_of(kernel.src.dtype)
        rounded = 2 * row.epsilon if row.is_narrow else 0.0
        terms = max(made.keys, made.queries * made.group)
        return rounded + (made.size + made.features + terms / 16 + log2(terms + 1) + 16) * 2.0**-24

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return GradientWriter(self, kernel, self.text).source(target)

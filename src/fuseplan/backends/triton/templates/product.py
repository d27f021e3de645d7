"""A product with its elementwise tail: `matmul` and every convolution, in Triton for any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.parts import gates_beside
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import product_cost, product_search
from fuseplan.backends.triton.templates.product_pairs import writer_of
from fuseplan.backends.triton.templates.product_tiles import Knobs, Tiles
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Halves, Packing, Rounded
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    contraction_claims,
    layout_claims,
    moved_once,
)
from fuseplan.messages.reasons import Claim


@dataclass(frozen=True)
class Product(Knobs, GpuTemplate):
    """Tiles of output positions x features, one per program; src as rows of a matrix, or gathered tap by tap.

    Any window, stride, groups, layout, strides of src and dtype, on any GPU; gated products of one group.

    reads:  src once for each block of features and each tap, unless a cache still holds it; weight likewise
        for each block of rows
    writes: dst once; with the sum in parts, each part's sums to the workspace and back
    chosen: for f32, few rows, channels first, groups, a prologue, or a GPU other than Hopper

    Each f32 is two numbers of 11 bits, multiplied in three products on tensor cores (`tf32x3`), on GPUs
    that have them. `strict` multiplies in IEEE f32.

    Attributes:
        rows: output positions of a tile, a run over the whole batch.
        features: features of a tile.
        depth: products summed in one step: channels of one tap, or pairs of tap and channel of few channels.
        split: programs that share a tile; each takes a part of the sum, the last adds the parts in order.
        swapped: the product's first axis holds the features, which suits few rows.
        maps: the copy engine reads src and weight (sm_90 and later).
        arithmetic: arithmetic of the products: `native` (f16, bf16, i8, and fp8 as f16), `tf32x3`, `tf32`,
            `ieee`, or `summed` element by element.
        apart: the small products of `tf32x3` have a sum of their own through all steps.
        group: row tiles in a group; a group goes through all features before the next group begins.
        parts: pieces of the tile that the epilogue takes one after another.
        warps: warps of a program.
        stages: steps whose loads are under way at once.
        ahead: src is loaded into registers one step ahead. Asynchronous copies do not support neighbours that
            are aligned to less than 4 bytes.
        joined: channels of a position that one thread loads and joins; 1 where memory has them side by side.
    """

    name: ClassVar[str] = "product"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel)
        yield from layout_claims(kernel, gated=True)
        exact = product_search.arithmetics(kernel, target, "strict")[0]
        yield accuracy_claim(product_cost.bound(kernel, exact), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        is_open = kernel.open_axis is not None
        for knobs in product_search.choices(kernel.representative, target, accuracy):
            if not is_open or knobs.split == 1:  # counters and parts of as many tiles as a call has: no room
                yield cls(**vars(knobs))

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as [image][feature][tap][channel]: whole tiles of features, whole steps of channels.

        In a gated product, features of gates and of values take turns.
        """
        tiles, per_batch = Tiles(kernel, self), int(kernel.contraction.weight_per_batch)
        images, (features, channels, *taps) = kernel.weight_axes[:per_batch], kernel.weight_axes[per_batch:]
        sizes = (
            kernel.contraction.kernel if taps else ()
        )  # a matrix product's weight has no axes for its one tap
        extents = (*(tiles.batches,) * per_batch, tiles.weight_rows, *sizes, tiles.weight_channels)
        axes, inner = (*images, features, *taps, channels), (*sizes, kernel.contraction.channels_per_group)
        gates = gates_beside(kernel.parts, kernel.contraction.features // 2, 1, inner)
        last = (Halves(),) if self.is_halved else (Rounded(),) if self.arithmetic == "tf32" else ()
        return weight_packing(kernel.weight, axes, extents, gates=gates, last=last)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return moved_once(kernel, Tiles(kernel, self).workspace_bytes)

    def flops(self, kernel: Kernel) -> int:
        times = 3 if self.arithmetic == "tf32x3" else 1
        return kernel.flops + (times - 1) * kernel.contraction.flops

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return product_cost.seconds(self, kernel.representative, target)

    def error_bound(self, kernel: Kernel) -> float:
        """On tensor cores 2^-23 per product plus the factors' rounding; else one rounding per product."""
        return product_cost.bound(kernel, self.arithmetic)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return writer_of(self, kernel, self.text).source()

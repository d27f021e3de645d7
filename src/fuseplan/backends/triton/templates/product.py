"""A matrix product with its elementwise tail: 1x1 convolutions and `matmul`, in Triton for any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import product_cost, product_tiles
from fuseplan.backends.triton.templates.product_shape import Knobs, ProductShape, is_halved, weight_extents
from fuseplan.backends.triton.templates.product_writer import ProductWriter
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.packing import Packing
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim, factor_claim, layout_claims


@dataclass(frozen=True)
class Product(Knobs, GpuTemplate):
    """Tiles of rows x features, one per program; any layout and strides of src, any dtype, any GPU.

    reads:  src once for each block of features, unless the second cache still holds it; weight likewise for
        each block of rows
    writes: dst once; with the depth in parts, each part's sums to the workspace and back
    chosen: for f32, few rows, channels first, a prologue, or a GPU other than Hopper

    Each f32 is two numbers of 11 bits, multiplied in three products on tensor cores (`tf32x3`), on GPUs
    that have them. `strict` multiplies in IEEE f32.

    Attributes:
        rows: output positions of a tile.
        features: features of a tile.
        depth: channels of one step.
        split: programs that share a tile; each takes a part of the depth, the last adds the parts in order.
        swapped: the tile's first axis holds the features, which suits few rows.
        maps: the copy engine reads src and weight (sm_90 and later).
        arithmetic: arithmetic of the products: `native` (f16 and bf16), `tf32x3`, `tf32`, `ieee`, or `summed`
            element by element.
        group: row tiles in a group; a group goes through all features before the next group begins.
        parts: pieces of the tile that the epilogue takes one after another.
        warps: warps of a program.
        stages: steps whose loads are under way at once.
        ahead: src is loaded into registers one step ahead. Asynchronous copies do not support neighbours that
            are aligned to less than 4 bytes.
    """

    name: ClassVar[str] = "product"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        conv, step = kernel.contraction, kernel.contraction_step
        is_product = conv.is_matrix_product and conv.groups == 1
        yield claim(is_product, Reason.NOT_POINT_CONVOLUTION, got=conv.text, operator=step)
        yield from layout_claims(kernel)
        yield factor_claim(kernel)
        least = min(
            product_cost.bound(kernel, each) for each in product_tiles.arithmetics(kernel, target, "strict")
        )
        yield accuracy_claim(least, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        for knobs in product_tiles.choices(kernel, target, accuracy):
            yield cls(**vars(knobs))

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """The weight as (features, depth), behind the image where each has its own; padded to whole tiles."""
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        shape = ProductShape.of(kernel)
        features, depth = weight_extents(self, shape, kernel.src.itemsize)
        axes = kernel.weight_axes
        first = int(kernel.contraction.weight_per_batch)
        extents = (*(shape.batches,) * first, features, depth, *(1,) * (len(axes) - first - 2))
        return weight_packing(operand, axes, extents, halves=is_halved(self))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        kept = ProductWriter(self, kernel, "").workspace_bytes
        return model.traffic(kernel, workspace=kept)

    def flops(self, kernel: Kernel) -> int:
        times = 3 if self.arithmetic == "tf32x3" else 1
        return kernel.flops + (times - 1) * kernel.contraction.flops

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return product_cost.seconds(self, kernel, target)

    def error_bound(self, kernel: Kernel) -> float:
        """On tensor cores 2^-23 per product plus the factors' rounding; else one rounding per product."""
        return product_cost.bound(kernel, self.arithmetic)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ProductWriter(self, kernel, self.text).source()

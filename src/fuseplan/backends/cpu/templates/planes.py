"""1x1 convolutions between tensors that are stored channels first: products of planes, never transposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.template import weight_packing
from fuseplan.backends.cpu.templates import planes_writer
from fuseplan.backends.cpu.templates.planes_writer import PlanesKnobs
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.layouts import LAYOUTS
from fuseplan.packing import Packing, Reshape, Tiles, Transpose
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import (
    Accuracy,
    Template,
    Traffic,
    lanes,
)
from fuseplan.tensor import TensorSpec

_ROWS = 16  # most features in a tile: larger ones leave more of the last tile unused


@dataclass(frozen=True)
class Planes(PlanesKnobs):
    """Tiles of features x positions in registers: lanes are positions, weights are spread over them.

    reads:  src once for each group of features, into the thread's part of the workspace; weight once for each
            block of positions
    writes: dst once, in whole vectors of positions
    chosen: for planes that are large, or whole vectors; else `direct` transposes tiles in registers
    """

    name: ClassVar[str] = "planes"
    efficiency: ClassVar[float] = 0.95

    @classmethod
    def takes(cls, kernel: Kernel, target: Target) -> Iterator[Claim]:
        conv, count = kernel.contraction, prod(kernel.dst.spatial)
        plain = conv.is_matrix_product and conv.groups == 1
        yield model.about(kernel, plain, Reason.NOT_POINT_CONVOLUTION, conv.text)
        yield model.about(kernel, count > 1, Reason.NOT_POINT_CONVOLUTION, f"{count} position", "several")
        yield claim(_has_planes(kernel.dst), Reason.CHANNELS_LAST, got=str(kernel.dst))
        yield claim(planes_writer.is_in_planes(kernel.src), Reason.SCATTERED_POSITIONS, got=str(kernel.src))

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        tiles = sorted(_tiles(kernel, target), key=lambda tile: _waste(kernel, target, *tile))
        for rows, vectors in tiles[:2]:
            yield cls(rows, vectors, *_blocks(kernel, target, rows, vectors))

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        groups = -(-planes_writer.feature_tiles(kernel, self.rows) // self.block_tiles)
        moved = model.traffic(kernel, target)
        return Traffic(moved.read + (groups - 1) * kernel.src.nbytes, moved.written)

    def waste(self, kernel: Kernel, target: Target) -> float:
        # Without a prologue the copy is made between products and costs nothing; with one it is made before
        # them, in about two cycles a vector.
        before = 4 / min(self.rows * self.block_tiles, kernel.dst.channels) if kernel.prologue else 0
        return _waste(kernel, target, self.rows, self.vectors) * (1 + before)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return planes_writer.Writer(self, kernel, target).source()

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """The weight as [image][tile][channel][feature of the tile]; the last tile begins early.

        There is one image unless each has a weight of its own.
        """
        if operand.role != "weight":
            return super().packing(kernel, target, operand)
        conv = kernel.contraction
        images = conv.batch if conv.weight_per_batch else 1
        matrices = Reshape((images, conv.features, conv.channels))
        return weight_packing(kernel, matrices, Tiles(1, self.rows), Transpose((0, 1, 3, 2)))


def _has_planes(spec: TensorSpec) -> bool:
    return spec.layout == LAYOUTS[spec.rank][0]


def _tiles(kernel: Kernel, target: Target) -> Iterator[tuple[int, int]]:
    """Tiles whose accumulators, vectors of src and one spread weight fit the registers."""
    conv, width = kernel.contraction, lanes(kernel, target)
    for vectors in range(1, min(4, -(-prod(conv.dst_spatial) // width)) + 1):
        top = min(_ROWS, conv.features, (target.vector_registers - 1 - vectors) // vectors)
        for rows in range(max(1, top // 2), top + 1):
            yield rows, vectors


def _waste(kernel: Kernel, target: Target, rows: int, vectors: int) -> float:
    """Time of the tiles over time of the same products without a loss."""
    conv, width = kernel.contraction, lanes(kernel, target)
    positions = prod(conv.dst_spatial)
    features = planes_writer.feature_tiles(kernel, rows) * rows / conv.features

    def cost(vectors: int) -> float:
        """Of a tile, in products: at two loads and two products a cycle, a product taking 4 to 5 cycles."""
        products = rows * vectors
        return max(products, rows + vectors, 10)

    whole, left = divmod(positions, vectors * width)
    rest = -(-left // width)
    spent = whole * cost(vectors) + (cost(rest) if rest else 0)
    small = 1 + 0.001 * rows * vectors  # of equals the smaller: less code, less to compile
    return features * spent * width / (positions * rows) * small


def _blocks(kernel: Kernel, target: Target, rows: int, vectors: int) -> tuple[int, int]:
    """Tiles of positions and of features in a task: src's part fits the second cache, threads get several."""
    conv, width = kernel.contraction, lanes(kernel, target)
    count = planes_writer.position_tiles(kernel, vectors * width)
    tiles = planes_writer.feature_tiles(kernel, rows)
    tile_bytes = conv.channels * vectors * width * model.itemsize(kernel)
    block = max(1, min(count, 16 // vectors, int(target.l2_bytes * 0.4) // tile_bytes))
    wanted = 4 * target.threads if target.threads > 1 else 1
    # Narrower blocks copy nothing twice; below two tiles, lines of src are read in pieces.
    block = max(min(block, 2), min(block, -(-conv.batch * count // wanted)))
    block = -(-count // -(-count // block))
    parts = min(max(1, tiles // 2), -(-wanted // (conv.batch * -(-count // block))))
    return block, -(-tiles // parts)

"""3x3 and 5x5 convolution with a quarter of the multiplications, the tail applied in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from fuseplan.backends.cpu import dots, model, transforms
from fuseplan.backends.cpu.templates.winograd_grid import Grid, WinogradKnobs, tiles_of
from fuseplan.backends.cpu.templates.winograd_writer import Writer
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Join, Packing, Pad, Product, Reshape, Step, Transpose
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    contraction_claims,
    lanes,
    layout_claims,
    moved_once,
)
from fuseplan.language.bounds import EXACT_IN_I32
from fuseplan.messages.reasons import Claim, Reason, claim

# Outputs along one side of a tile, by the kernel's size.
TILES = {3: (4, 2), 5: (2,)}
STRICT_SIZE = 4  # the largest transformed tile whose points are whole numbers


@dataclass(frozen=True)
class Winograd(WinogradKnobs):
    """Transforms tiles of src, multiplies by transformed weights position by position, transforms back.

    A task does all three for a block of tiles and some panels of features, so no thread waits for another. A
    tile whose outputs are not all finite is computed again by the definition: an infinity or a NaN reaches
    the outputs that it reaches in direct convolution, and no others.

    reads:  src once for each part of the features, transformed weights once for each block of tiles
    writes: dst once
    chosen: 3x3 and 5x5 kernels with stride 1, unless channels are few or the caller bounds the error; for
        3x3, tile=4 takes 36 multiplications for 16 outputs, tile=2 takes 16 for 4 but has less than half the
        weights to stream; for 5x5, tile=2 takes 36 for 4
    """

    name: ClassVar[str] = "winograd"
    opens: ClassVar[bool] = True
    ranges: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the sum of |weight| times its channel's largest |src| in the tile"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel)
        conv = kernel.contraction
        plain = {*conv.stride, *conv.dilation, conv.groups} == {1}
        fits = conv.kernel in ((3, 3), (5, 5)) and plain
        yield model.about(kernel, fits, Reason.NO_TRANSFORM, conv.text)
        is_f32 = kernel.compute_dtype == "f32" and (not kernel.largest_sum or any(_tiles(kernel, target)))
        yield claim(is_f32, Reason.FLOAT64, got=kernel.src.dtype)
        yield model.padding_claim(kernel)
        yield from layout_claims(kernel)
        tiles = _tiles(kernel, target)
        strict = accuracy != "strict" or any(_is_strict(kernel, tile) for tile in tiles)
        got, want = "the transforms of F(2x2, 5x5)", "accuracy other than strict"
        yield model.about(kernel, strict, Reason.ACCURACY, got, want)
        yield accuracy_claim(min(_bound(kernel, tile) for tile in tiles), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        """The quickest knobs, by the model, of each tile that is exact enough."""
        for tile in _tiles(kernel, target):
            allowed = accuracy != "strict" or _is_strict(kernel, tile)
            if allowed and accuracy_claim(_bound(kernel, tile), accuracy).holds:
                grids = _considered(kernel, target, tile)
                best = min(grids, key=lambda grid: _cycles(grid, target)).knobs
                yield cls(tile, best.rows, best.vectors, best.block, best.panels)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        grid = Grid(kernel, target, self)
        plain = moved_once(kernel)
        transformed = grid.positions * grid.weight_plane * model.itemsize(kernel)
        return Traffic(plain.read + transformed - kernel.weight.nbytes, plain.written, plain.workspace)

    def flops(self, kernel: Kernel) -> int:
        """Two a product, those of the transforms, and the elementwise ones."""
        conv = kernel.contraction
        taps = conv.kernel[0]
        size, cost = self.tile + taps - 1, transforms.cost(self.tile, taps)
        products = 2 * size**2 * conv.channels * conv.features
        before = 2 * size * cost.src_operations * conv.channels
        after = (size + self.tile) * cost.dst_operations * conv.features
        return tiles_of(conv, self.tile) * (products + before + after) + kernel.flops - conv.flops

    def seconds(self, kernel: Kernel, target: Target) -> float:
        grid = Grid(kernel, target, self)
        return model.seconds(
            kernel,
            target,
            flops=_cycles(grid, target) * 4 * grid.lanes * target.threads,
            traffic=self.traffic(kernel, target),
            efficiency=0.95,
        )

    def error_bound(self, kernel: Kernel) -> float:
        """Roundings from src to dst times the unit roundoff times the transforms' growth (see `_bound`)."""
        return _bound(kernel, self.tile)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return Writer(Grid(kernel, target, self), target).source()

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """The weight as [position][panel][channel][feature of the panel], then as [tap][channel][feature].

        Zeros follow the last feature. The second part serves tiles that are not finite. Of integers there is
        none, and two channels of a feature are side by side.
        """
        grid, conv = Grid(kernel, target, self), kernel.contraction
        channels, width = conv.channels, grid.panels * grid.panel
        transformed = (
            Product(grid.transforms.squared),
            Pad((grid.positions, grid.steps * grid.each, width)),
            Reshape((grid.positions, grid.steps, grid.each, grid.panels, grid.panel)),
            Transpose((0, 3, 1, 4, 2)),
        )
        plain = (Pad((conv.taps, channels, width)),)
        taps = Reshape((conv.features, channels, conv.taps)), Transpose((2, 1, 0))
        return (*taps, *transformed) if grid.dot else (*taps, Join((transformed, plain)))

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        packed, dot = super().packing(kernel, target, operand), dots.pairs(kernel, target)
        return replace(packed, dtype=dot.dtype) if dot and operand.role == "weight" else packed


def _tiles(kernel: Kernel, target: Target) -> tuple[int, ...]:
    """The tiles whose transforms are exact enough; of integers, those that 16 and 32 bits hold exactly.

    Sums are known by their last 32 bits, of which the division takes those of the divisor's power of two.
    """
    found = TILES[kernel.contraction.kernel[0]]
    if not kernel.largest_sum:
        return found
    if dots.pairs(kernel, target) is None:
        return ()
    taps, largest = kernel.contraction.kernel[0], max(map(abs, kernel.factors))

    def fits(made: transforms.Transforms) -> bool:
        src, weight = made.most
        power = 1 << transforms.power_of_two(made.divisor)
        return src * largest < 2**15 > weight * 2**7 and kernel.largest_sum * power < EXACT_IN_I32

    return tuple(tile for tile in found if fits(transforms.whole(tile, taps)))


def _is_strict(kernel: Kernel, tile: int) -> bool:
    return kernel.largest_sum > 0 or tile + kernel.contraction.kernel[0] - 1 <= STRICT_SIZE


def _bound(kernel: Kernel, tile: int) -> float:
    """b such that |error| <= b * (sum of |weight| times its channel's largest |src| in the tile).

    To first order. An element of src is rounded in both passes of the src transform, a weight once, a product
    and its sum once a channel, an output in both passes of the dst transform: n roundings, each at most u, on
    any way from src to dst. They apply to |A'| (|G| |w| |G'| * |B'| |x| |B|) |A|, which is at most `growth`
    times the sum above, so b = n * u * growth (Higham, Accuracy and Stability of Numerical Algorithms,
    2002, section 3.1; Barabasz et al., ACM TOMS 46(4), 2020, for Toom and Cook's algorithms). Neighbours in
    the tile take part, so the largest |src| stands where direct convolution's bound has the very element.
    The errors met are far smaller, as they are with direct convolution. Of integers there are none.
    """
    conv, taps = kernel.contraction, kernel.contraction.kernel[0]
    if kernel.largest_sum:
        return 0.0
    cost = transforms.cost(tile, taps)
    roundings = conv.channels + 1 + 2 * cost.src_roundings + 2 * cost.dst_roundings
    return roundings * 2.0**-24 * transforms.transforms(tile, taps).growth


# ---- the choice of knobs


def _considered(kernel: Kernel, target: Target, tile: int) -> Iterator[Grid]:
    """The better register tiles with blocks of a few sizes, features whole or shared out among threads."""
    conv, width, threads = kernel.contraction, lanes(kernel, target), target.threads
    tiles, most = tiles_of(conv, tile), -(-conv.features // width)
    is_paired = kernel.largest_sum > 0  # a product has a register of its own
    for rows, vectors in _register_tiles(tiles, most, target, target.vector_registers - 1 - is_paired):
        panels = -(-most // vectors)
        parts = sorted({-(-panels // splits) for splits in (1, 2, threads, 2 * threads)})
        for block, part in product(_blocks(tiles, rows, threads), parts):
            grid = Grid(kernel, target, Winograd(tile, rows, vectors, block, part))
            if grid.fewest_tiles >= rows:
                yield grid


def _register_tiles(tiles: int, most: int, target: Target, registers: int) -> list[tuple[int, int]]:
    """Register tiles whose sums and one row of weights fit so many registers: the best six.

    One tile at a time, one vector, always fits, whatever the blocks.
    """
    fitting = [
        (rows, vectors)
        for vectors in range(1, min(3, most) + 1)
        for rows in range(1, min(tiles, 16, (registers - vectors) // vectors) + 1)
    ]

    def loss(shape: tuple[int, int]) -> float:
        rows, vectors = shape
        edges = -(-tiles // rows) * rows / tiles * -(-most // vectors) * vectors / most
        return edges * _product_cost(rows, vectors, target)

    return [*sorted(fitting, key=loss)[:6], (1, 1)]


def _blocks(tiles: int, rows: int, threads: int) -> list[int]:
    """Tiles a task: one to six register tiles, all, or a thread's share of all."""
    shares = (-(-tiles // parts) for parts in (1, threads, 2 * threads))
    return sorted({min(size, tiles) for size in (*(rows * count for count in (1, 2, 3, 4, 6)), *shares)})


def _cycles(grid: Grid, target: Target) -> float:
    """Every thread's tasks, in rounds: threads that have none in the last one wait.

    The more tasks, the less it matters that one takes longer than it should.
    """
    tasks, threads = grid.blocks * grid.splits, target.threads
    uneven = 1 + 0.03 * min(1.0, (threads - 1) / tasks)
    return -(-tasks // threads) * _task_cycles(grid, target) * uneven


def _task_cycles(grid: Grid, target: Target) -> float:
    """Cycles of the largest task: products or their weights' arrival, whichever is longer, and transforms."""
    knobs, tiles = grid.knobs, grid.most_tiles
    vectors = -(-min(grid.columns, grid.conv.features) // grid.lanes)
    sums = grid.positions * -(-tiles // knobs.rows) * knobs.rows * grid.steps * vectors
    products = sums / 2 * _product_cost(knobs.rows, knobs.vectors, target)
    if grid.dot:
        products *= grid.each / dots.speed(grid.dot, target)
    weights = 4 * grid.positions * grid.weight_plane
    rate = model.arrival(target, weights)
    # Weights that leave room for a task in the second cache stay there.
    stays = weights <= 0.75 * target.l2_bytes
    streaming = 0.0 if stays else 4 * grid.positions * grid.steps * grid.columns / rate
    room = target.l2_bytes - weights if stays else target.l2_bytes
    # Transforms do two operations and move a vector in a cycle, less far from the caches.
    cost = grid.cost
    before = grid.size * cost.src_operations + 1.5 * grid.positions
    after = (grid.size + grid.tile) * cost.dst_operations / 2 + grid.positions + grid.tile**2
    own = 4 * grid.own_elements
    far = 1.0 if own <= room else 1.5 if own * target.threads <= target.l3_bytes / 4 else 2.5
    around = tiles * (grid.depth // grid.lanes * before + vectors * after) * far
    return max(products, streaming) + 0.2 * streaming + around


def _product_cost(rows: int, vectors: int, target: Target) -> float:
    """Time of a product in a register tile over half a cycle.

    Two loads and two products a cycle are what current cores do, and a product takes 4 to 5 cycles. A vector
    of weights is read for `rows` products, mostly from the second cache.
    """
    products = rows * vectors
    streaming = 1 + 0.015 * max(0.0, 2 * target.vector_bytes / rows - 16)
    return max(1.0, (rows + vectors) / products, 10 / products) * streaming

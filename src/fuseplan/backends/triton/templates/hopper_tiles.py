"""How a contraction lies in tiles that Hopper's copy engine moves: boxes of rows, columns of features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import prod

from fuseplan.emit import TensorMap
from fuseplan.kernel import Kernel
from fuseplan.tensor import TensorSpec

ALIGNED = 8  # two-byte elements in the 16 bytes that the copy engine's addresses and strides are multiples of
HALF = 2  # bytes of an f16 or bf16
MOST_BOX = 256  # positions that a box spans along one axis
MOST_STEP = 8  # positions from one element of a box to the next


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Geometry:
    """A contraction as dst rows times features.

    A row is one position of `extents`: dst's axes but the channel's, outermost first. Where the positions
    of src lie evenly and each is read once, for the row of the same index, they are one axis.
    """

    kernel: Kernel

    @cached_property
    def is_flat(self) -> bool:
        """Whether rows are one axis."""
        contraction = self.kernel.contraction
        one_weight = not contraction.weight_per_batch
        return contraction.is_matrix_product and one_weight and _even(self.kernel.src)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Rows along each axis."""
        contraction = self.kernel.contraction
        return (contraction.rows,) if self.is_flat else (contraction.batch, *contraction.dst_spatial)

    @property
    def axes(self) -> tuple[str, ...]:
        """A letter for each axis of the rows, as generated code names coordinates."""
        return ("m",) if self.is_flat else ("n", *"zyx"[4 - len(self.extents) :])

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """src positions from one row to the next, along each axis."""
        return (1,) if self.is_flat else (1, *self.kernel.contraction.stride)

    @property
    def channels(self) -> int:
        """Channels that one feature reads at one position."""
        return self.kernel.contraction.channels_per_group

    @property
    def features(self) -> int:
        """Features of dst."""
        return self.kernel.contraction.features

    def tiles(self, box: tuple[int, ...], columns: int) -> tuple[tuple[int, ...], int]:
        """How many tiles there are along each axis of the rows, and along the features."""
        return tuple(map(ceil_div, self.extents, box)), ceil_div(self.features, columns)

    def blocks(self, depth: int) -> int:
        """Products of tiles that make one tile of dst, `depth` channels each."""
        return self.kernel.contraction.taps * ceil_div(self.channels, depth)

    def boxes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Boxes of so many rows, those first that cover dst with the fewest, and of these the roundest."""
        size = rows.bit_length() - 1
        cuts = product(range(size + 1), repeat=len(self.extents))
        boxes = [tuple(1 << cut for cut in each) for each in cuts if sum(each) == size]
        return tuple(sorted(filter(self._fits, boxes), key=self._cost))

    def _fits(self, box: tuple[int, ...]) -> bool:
        one_weight = box[0] == 1 or not self.kernel.contraction.weight_per_batch
        return one_weight and all(
            (size - 1) * step < MOST_BOX for size, step in zip(box, self.steps, strict=True)
        )

    def _cost(self, box: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """How many boxes dst takes, and how many src positions one of them needs over all taps."""
        taps = (1,) if self.is_flat else (1, *self.kernel.contraction.kernel)
        reach = ((size - 1) * step + tap for size, step, tap in zip(box, self.steps, taps, strict=True))
        return prod(self.tiles(box, 1)[0]), prod(reach), box

    # ---- tensor maps

    def src_map(self, box: tuple[int, ...], depth: int) -> TensorMap:
        """src in boxes of rows x `depth` channels."""
        return _map(self.kernel.src, self.is_flat, (*box, depth), (*self.steps, 1))

    def dst_map(self, box: tuple[int, ...], columns: int) -> TensorMap:
        """dst, and what is stored as dst is, in boxes of rows x features."""
        return _map(self.kernel.dst, self.is_flat, (*box, columns), (1,) * (len(box) + 1))

    def weight_map(self, columns: int, depth: int) -> TensorMap:
        """The packed weight, (feature, tap, channel), in boxes of `columns` x 1 x `depth`.

        Images with a weight of their own have their features one after the other.
        """
        contraction = self.kernel.contraction
        images = contraction.batch if contraction.weight_per_batch else 1
        shape = (images * self.features, contraction.taps, self.channels)
        strides = (shape[1] * shape[2], shape[2], 1)
        return TensorMap(self.kernel.weight.dtype, shape, strides, (columns, 1, depth), (1, 1, 1))


def _even(spec: TensorSpec) -> bool:
    """Whether the positions of a channels-last tensor lie at one distance from each other."""
    outer = [
        (extent, stride)
        for extent, stride in zip(*_outer(spec), strict=True)
        if extent > 1
    ]  # fmt: skip
    return all(stride == size * inner for (_, stride), (size, inner) in pairwise(outer))


def _outer(spec: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents and strides of all axes but the channel's: batch first, then the spatial ones."""
    strides = spec.element_strides
    return (spec.batch, *spec.spatial), (strides[0], *strides[2:])


def _map(spec: TensorSpec, is_flat: bool, box: tuple[int, ...], steps: tuple[int, ...]) -> TensorMap:
    extents, strides = _outer(spec)
    # an axis of one position is never stepped along, but its stride has to be one that the engine takes
    idle = max(ALIGNED, ceil_div(spec.channels, ALIGNED) * ALIGNED)
    moved = tuple(s if extent > 1 else idle for extent, s in zip(extents, strides, strict=True))
    if is_flat:
        longest = [s for extent, s in zip(extents, strides, strict=True) if extent > 1]
        extents, moved = (prod(extents),), (min(longest, default=idle),)
    return TensorMap(spec.dtype, (*extents, spec.channels), (*moved, 1), box, steps)


def strides_fit(spec: TensorSpec) -> Iterator[int]:
    """The strides of a channels-last tensor that are stepped along and that the copy engine does not take."""
    for extent, stride in zip(*_outer(spec), strict=True):
        if extent > 1 and stride % ALIGNED:
            yield stride

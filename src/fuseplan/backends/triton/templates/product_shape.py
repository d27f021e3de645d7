"""What a matrix product is to its kernel: rows, depth and features, and where they lie in the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fuseplan.backends.triton.index import Axis, merged
from fuseplan.kernel import Kernel
from fuseplan.tensor import TensorSpec


@dataclass(frozen=True)
class Knobs:
    """The fields of `Product`, which says what they mean."""

    rows: int
    features: int
    depth: int
    split: int = 1
    swapped: bool = False
    maps: bool = False
    arithmetic: str = "native"
    group: int = 8
    parts: int = 1
    warps: int = 4
    stages: int = 3
    ahead: bool = False


def is_halved(knobs: Knobs) -> bool:
    """Whether the weight is packed as its two factors: where src is the factor that passes registers."""
    return knobs.arithmetic == "tf32x3" and not knobs.swapped


@dataclass(frozen=True)
class ProductShape:
    """dst[batch, row, feature] = sum over depth of src[batch, row, depth] * weight[batch, feature, depth].

    Attributes:
        batches: products side by side; 1 where all images share a weight, and images are rows then.
        rows: output positions of one product.
        features: of the weight.
        depth: channels of src.
        image_rows: output positions of one image.
    """

    batches: int
    rows: int
    features: int
    depth: int
    image_rows: int

    @classmethod
    def of(cls, kernel: Kernel) -> ProductShape:
        """The shape of a kernel whose contraction is a matrix product."""
        conv = kernel.contraction
        batches = conv.batch if conv.weight_per_batch else 1
        return cls(batches, conv.rows // batches, conv.features, conv.channels, prod(conv.dst_spatial))


def row_axes(spec: TensorSpec, batches: int) -> tuple[Axis, ...]:
    """The axes that make up the rows of one product, outermost first, merged where one continues another."""
    first = 0 if batches == 1 else 2
    strides = spec.element_strides
    axes = [(spec.shape[axis], strides[axis]) for axis in range(spec.rank) if axis >= first and axis != 1]
    return merged(axes)


def image_axes(spec: TensorSpec) -> tuple[tuple[Axis, ...], int]:
    """One image without gaps, in storage order: its positions' axes, merged, and its channels' stride."""
    order = sorted(range(1, spec.rank), key=lambda axis: spec.element_strides[axis])
    steps, step = [0] * spec.rank, 1
    for axis in order:
        steps[axis] = step
        step *= spec.shape[axis]
    return merged([(spec.shape[axis], steps[axis]) for axis in range(2, spec.rank)]), steps[1]


def steps_of(knobs: Knobs, depth: int) -> int:
    """Steps along the depth that one program takes."""
    return -(-depth // (knobs.depth * knobs.split))


def weight_extents(knobs: Knobs, shape: ProductShape, itemsize: int) -> tuple[int, int]:
    """Features and depth of a packed weight: whole tiles, so that loads need no mask; 16 bytes for maps."""
    if knobs.maps:
        unit = 16 // itemsize
        return shape.features, -(-shape.depth // unit) * unit
    features = -(-shape.features // knobs.features) * knobs.features
    return features, steps_of(knobs, shape.depth) * knobs.split * knobs.depth

"""The matrix product: a convolution without taps, with its weight as matrices are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fuseplan.fields import one_of, positive, true_or_false
from fuseplan.op import Array, Op, Shape, operand, operator
from fuseplan.ops.conv import PRECISIONS, check_precision
from fuseplan.tensor import TensorSpec


def _weight(op: Matmul, src: TensorSpec) -> Shape:
    matrix = (op.features, src.channels) if op.transposed else (src.channels, op.features)
    return (src.batch, *matrix) if op.batched else matrix


@operator
class Matmul(Op):
    """dst[n, f, ..] = sum over c of src[n, c, ..] * weight[c, f]

    src: (n, c, ..), any rank; dst: (n, features, ..). weight: (c, features); `transposed`: (features, c), as
    torch.nn.Linear stores it; `batched`: one for each image, (n, c, features) or (n, features, c).

    The sum is over src's channels, axis 1: rows of a matrix [M, K] are f32[MxK]. A src of three axes or more
    says its layout: PyTorch's batch of matrices [B, M, K] is f32[BxKxM, nwc], the same bytes in memory, named
    in the logical order n, c, w. f32[BxKxM, ncw] has the channels outside the places.
    `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    kind = "contraction"
    onnx = "MatMul"
    torch = "matmul"

    weight = operand(_weight)
    features: int
    transposed: bool = False
    batched: bool = False
    precision: str = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("features", positive(self.name, "features", self.features))
        true_or_false(self.name, "transposed", self.transposed)
        true_or_false(self.name, "batched", self.batched)
        one_of(self.name, "precision", self.precision, PRECISIONS)

    def output(self, src: TensorSpec) -> TensorSpec:
        """n, features, and the spatial axes of src.

        Raises:
            PlanError: the precision is not for src's dtype.
        """
        check_precision(self.name, self.precision, src)
        return src.with_shape((src.batch, self.features, *src.spatial))

    def reference(self, src: Array, operands: Mapping[str, Array], parameters: Mapping[str, float]) -> Array:
        """The product in float64."""
        weight = np.asarray(operands["weight"], np.float64)
        return product(src, weight if self.transposed else np.swapaxes(weight, -2, -1))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Each order of the weight, and each rank, on odd sizes."""
        yield "f32[7x5]", cls(9)
        yield "f32[3x5]", cls(4, transposed=True)
        yield "f32[2x5x7, nwc]", cls(3, batched=True)
        yield "f32[3x4x5, ncw]", cls(6, transposed=True, batched=True)
        yield "f32[2x5x3x7, nhwc]", cls(11)
        yield "f32[1x3x3x2x5, ncdhw]", cls(2)


def product(src: Array, weight: Array) -> Array:
    """src (n, c, ..) times weight (features, c), or (n, features, c), in float64."""
    rows = np.asarray(src, np.float64).reshape(*src.shape[:2], -1)
    with np.errstate(all="ignore"):  # infinities and NaN are results like any other
        made: Array = np.matmul(weight, rows)
    return made.reshape(src.shape[0], weight.shape[-2], *src.shape[2:])

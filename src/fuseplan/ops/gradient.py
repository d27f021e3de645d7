"""Gradients of weights: contractions over the rows that the forward pass keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fuseplan.language.declarations import Array, Shape, operand
from fuseplan.language.fields import one_of, positive
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op, operator
from fuseplan.ops.conv import PRECISIONS, check_precision


def _grad(op: LinearWeightGradient, src: TensorSpec) -> Shape:
    return (*src.shape[:-1], op.features)


@operator
class LinearWeightGradient(Op):
    """dst[f, c] = sum over all rows of grad[.., f] * src[.., c]

    The gradient of the weight of `linear(features)`: src is the layer's input, `grad` the gradient of its
    output. The sum is over every axis but the last, in a fixed order: equal tensors give equal bits.

    src: (.., c), any rank; grad: (.., features); dst: (features, c). A plan has no other operator beside it.

    `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    kind = "contraction"
    is_alone = True

    grad = operand(_grad)
    features: int
    precision: str = "full"

    @property
    def reads(self) -> str:
        """The last axis."""
        return "rows"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("features", positive(self.name, "features", self.features))
        one_of(self.name, "precision", self.precision, PRECISIONS)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The weight's shape.

        Raises:
            PlanError: the precision is not for src's dtype.
        """
        check_precision(self.name, self.precision, src)
        return TensorSpec((self.features, src.shape[-1]), src.dtype)

    def reference(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        names: str | None = None,
    ) -> Array:
        """The product in float64."""
        rows = np.asarray(operands["grad"], np.float64).reshape(-1, self.features)
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            made: Array = rows.T @ np.asarray(src, np.float64).reshape(-1, src.shape[-1])
        return made

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        """Each rank, on odd sizes."""
        yield "f32[7x5]", cls(9)
        yield "f32[2x7x5]", cls(3)
        yield "f32[2x3x7x5]", cls(11)
        yield "f32[1x3x2x5x3]", cls(2)


GRADIENTS = (LinearWeightGradient,)

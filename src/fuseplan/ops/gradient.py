"""Gradients of weights: contractions over the rows, or the images and positions, of the forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuseplan.language.declarations import Array, count, operand, word
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Given, Op, operator
from fuseplan.ops.conv import CONVOLUTIONS, PRECISIONS, OfConvolution, check_precision
from fuseplan.ops.windows import columns_of


@operator
class LinearWeightGradient(Op):
    """dst[f, c] = sum over all rows of grad[.., f] * src[.., c]

    The gradient of the weight of `linear(features)`: src is the layer's input, `grad` the gradient of its
    output. The sum is over every axis but the last, in a fixed order: equal tensors give equal bits.

    src: (.., c), any rank; grad: (.., features); dst: (features, c). Operators beside it in a
    kernel are formulas of one element, without tensors.

    `precision` is `full`, or `tf32`: then the factors of f32 may be rounded to 10 bits.
    """

    kind = "contraction"
    reads = "rows"
    is_gradient = True

    grad = operand(lambda op, src: (*src.shape[:-1], op.features))
    features: int = count()
    precision: str = word(PRECISIONS, default="full")

    def output(self, src: TensorSpec) -> TensorSpec:
        """The weight's shape; a PlanError where the precision is not for src's dtype."""
        check_precision(self.name, self.precision, src)
        return TensorSpec((self.features, src.shape[-1]), src.dtype)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        rows = given.operands["grad"].reshape(-1, self.features)
        return rows.T @ given.src.reshape(-1, given.src.shape[-1]), {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[7x5]", cls(9)
        yield "f32[2x7x5]", cls(3)
        yield "f32[2x3x7x5]", cls(11)
        yield "f32[1x3x2x5x3]", cls(2)


@operator
class ConvWeightGradient(OfConvolution):
    """What gradients of the weights of convolutions share: the convolution's fields."""

    is_gradient = True
    grad = operand(OfConvolution.convolved)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The weight's shape: (features, c/groups, *kernel).

        Raises:
            PlanError: the convolution is none of src.
        """
        self.convolved(src)
        return TensorSpec(self.weight_shape(src), src.dtype)

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The sum in float64: for each image and group, a product of matrices over the positions."""
        dst, grad = given.by.zeros(self.weight_shape(given.spec)), given.operands["grad"]
        for some, columns in columns_of(given.src, self.window(given.spec), self.groups, given.by):
            features = grad[some].reshape(*columns.shape[:2], -1, columns.shape[-1])
            dst += (features @ columns.swapaxes(-1, -2)).sum(0).reshape(dst.shape)
        return dst, {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        for src, op in CONVOLUTIONS[cls.axes - 1].samples():
            fields: dict[str, Any] = op.attributes()
            yield src, cls(**fields)


@operator
class Conv1dWeightGradient(ConvWeightGradient, axes=1):
    """dst[f, c, k] = sum over n, o of grad[n, f, o] * src[n, c, o*stride + k*dilation - padding]

    src: (n, c, w); grad: (n, features, output); dst: (features, c/groups, kernel). Its fields have the
    meaning of `conv2d_weight_gradient`'s.
    """


@operator
class Conv2dWeightGradient(ConvWeightGradient, axes=2):
    """dst[f, c, k, l] = sum over n, o, p of grad[n, f, o, p] * src[n, c, o*stride + k*dilation - padding, ..]

    The gradient of the weight of `conv2d` with the same fields, as PyTorch's `nn.grad.conv2d_weight`: src is
    the layer's input, `grad` the gradient of its output. The order of the sum is fixed: equal tensors give
    equal bits.

    src: (n, c, h, w), any strides; grad: (n, features, *output); dst: (features, c/groups, *kernel), dense.
    Operators beside it in a kernel are formulas of one element, without tensors.
    """


@operator
class Conv3dWeightGradient(ConvWeightGradient, axes=3):
    """dst[f, c, k..] = sum over n, o.. of grad[n, f, o..] * src[n, c, o*stride + k*dilation - padding, ..]

    src: (n, c, d, h, w); grad: (n, features, *output); dst: (features, c/groups, *kernel). Its fields have
    the meaning of `conv2d_weight_gradient`'s.
    """


WEIGHT_GRADIENTS = (Conv1dWeightGradient, Conv2dWeightGradient, Conv3dWeightGradient)
GRADIENTS = (LinearWeightGradient, *WEIGHT_GRADIENTS)

"""Gradients of normalizations of rows and of softmax: statistics, then a formula of one element."""

from __future__ import annotations

from fuseplan.language.declarations import operand, parameter
from fuseplan.language.fields import true_or_false
from fuseplan.language.reduction import Moments, Statistic, Sums
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import operator
from fuseplan.ops.normalization import Keys
from fuseplan.ops.reductions import Axes, OverAxes
from fuseplan.ops.rows import RowNormalization
from fuseplan.scalar import Scalar, exp, leaf, sqrt


def _is_affine(op: LayerNormBackward | RmsNormBackward) -> bool:
    return op.affine


class RowBackward(RowNormalization):
    """What gradients of normalizations of rows share: the scaled gradient, and the field `affine`."""

    affine: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        true_or_false(self.name, "affine", self.affine)

    def scaled(self, keys: Keys) -> Scalar:
        """The gradient behind the normalization: x, times the scale where there is one."""
        return leaf("x") * leaf(keys["scale"]) if self.affine else leaf("x")


@operator
class LayerNormBackward(RowBackward):
    """inverse * (g - sum(g)/c - n * sum(g*n)/c)

    The gradient of src of `layer_norm`: x is the gradient of its output, g = x * scale, inverse =
    1/sqrt(variance + epsilon) and n = (input - mean) * inverse, by the statistics of each row of input,
    which are computed again. Sums are over the c elements of a row.

    input: the shape of src, layer_norm's src. scale: (c,), with `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when=_is_affine)
    affine: bool = True
    epsilon: float = parameter(default=1e-5)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """Mean and variance of a row of input; then the two sums of the gradient."""
        scaled, moments = self.scaled(keys), (keys["row_mean"], keys["row_variance"])
        sums = Sums((keys["gradient_sum"], keys["product_sum"]), (scaled, scaled * self._normalized(keys)))
        return Moments(moments, (leaf(keys["input"]),)), sums

    def _inverse(self, keys: Keys) -> Scalar:
        return 1 / sqrt(leaf(keys["row_variance"]) + leaf(keys["epsilon"]))

    def _normalized(self, keys: Keys) -> Scalar:
        return (leaf(keys["input"]) - leaf(keys["row_mean"])) * self._inverse(keys)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factors of a row are computed once."""
        gradient, product = (leaf(keys[name]) / self.count(src) for name in ("gradient_sum", "product_sum"))
        return self._inverse(keys) * (self.scaled(keys) - gradient - self._normalized(keys) * product)


@operator
class RmsNormBackward(RowBackward):
    """inverse * (g - n * sum(g*n)/c)

    The gradient of src of `rms_norm`: x is the gradient of its output, g = x * scale, inverse =
    1/sqrt(mean(input**2) + epsilon), computed again for each row of input, and n = input * inverse. The sum
    is over the c elements of a row.

    input: the shape of src, rms_norm's src. scale: (c,), with `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when=_is_affine)
    affine: bool = True
    epsilon: float = parameter(default=1e-5)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """The sums of a row's squares, and of input times the gradient."""
        at = leaf(keys["input"])
        return (Sums((keys["square_sum"], keys["product_sum"]), (at * at, self.scaled(keys) * at)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factors of a row are computed once."""
        count = self.count(src)
        inverse = 1 / sqrt(leaf(keys["square_sum"]) / count + leaf(keys["epsilon"]))
        mean = leaf(keys["product_sum"]) / count * (inverse * inverse)
        return inverse * (self.scaled(keys) - leaf(keys["input"]) * mean)


@operator
class SoftmaxBackward(OverAxes):
    """result * (x - sum(x * result))

    The gradient of src of `softmax(axes)`: x is the gradient of its output. The sum is over `axes`, the last
    one unless told.

    result: the shape of src, softmax's output.
    """

    result: str | None = operand("element", default=None, kw_only=True)
    axes: Axes = -1

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """The sum of the gradient times the output."""
        return (Sums((keys["product_sum"],), (leaf("x") * leaf(keys["result"]),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula."""
        return leaf(keys["result"]) * (leaf("x") - leaf(keys["product_sum"]))


@operator
class LogSoftmaxBackward(OverAxes):
    """x - exp(result) * sum(x)

    The gradient of src of `log_softmax(axes)`: x is the gradient of its output. The sum is over `axes`, the
    last one unless told.

    result: the shape of src, log_softmax's output.
    """

    result: str | None = operand("element", default=None, kw_only=True)
    axes: Axes = -1

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """The sum of the gradient."""
        return (Sums((keys["gradient_sum"],), (leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula."""
        return leaf("x") - exp(leaf(keys["result"])) * leaf(keys["gradient_sum"])


ROW_GRADIENTS = (LayerNormBackward, RmsNormBackward, SoftmaxBackward, LogSoftmaxBackward)

"""Gradients of normalizations and of softmax: statistics, then a formula of one element."""

from __future__ import annotations

from fuseplan.errors import PlanError
from fuseplan.language.declarations import operand, parameter, result, word
from fuseplan.language.reduction import Moments, Statistic, Sums
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import operator
from fuseplan.ops.normalization import Keys, OfChannels, OfGroups, RowNormalization, Standardized
from fuseplan.ops.reductions import OverAxes
from fuseplan.ops.training import STATISTICS
from fuseplan.scalar import Scalar, exp, leaf, sqrt


def _scaled(op: StandardizedBackward | RmsNormBackward, keys: Keys) -> Scalar:
    """The gradient behind the normalization: x, times the scale where there is one."""
    return leaf("x") * leaf(keys["scale"]) if op.affine else leaf("x")


class _OfOperands:
    """A gradient of src that gives those of the operands besides, where the plan asks for them.

    With statistics `saved`, those of each row are operands.
    """

    affine: bool
    gradients: bool
    statistics: str

    @property
    def is_saved(self) -> bool:
        """Whether the statistics are operands."""
        return self.statistics == "saved"

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.gradients and not self.affine:
            raise PlanError("gradients=True without a scale", field="gradients", got="affine=False")


class StandardizedBackward(Standardized):
    """inverse * (g - sum(g)/count - n * sum(g*n)/count): the gradient of src of a `Standardized`."""

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        moments = (keys["row_mean"], keys["row_variance"])
        return Moments(moments, (leaf(keys["input"]),)), self.gradient_sums(keys)

    def gradient_sums(self, keys: Keys) -> Statistic:
        """The sums of the gradient behind the scale, and of it times the normalized input."""
        scaled, (apart, inverse) = _scaled(self, keys), self.normalized(keys)
        return Sums((keys["gradient_sum"], keys["product_sum"]), (scaled, scaled * (apart * inverse)))

    def normalized(self, keys: Keys, at: str = "input") -> tuple[Scalar, Scalar]:
        return super().normalized(keys, at)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factors that elements share are computed once."""
        gradient, product = (leaf(keys[name]) / self.count(src) for name in ("gradient_sum", "product_sum"))
        apart, inverse = self.normalized(keys)
        return inverse * (_scaled(self, keys) - gradient - apart * inverse * product)


@operator
class LayerNormBackward(_OfOperands, StandardizedBackward, RowNormalization):
    """inverse * (g - sum(g)/c - n * sum(g*n)/c)

    The gradient of src of `layer_norm`: x is the gradient of its output, g = x * scale, inverse =
    1/sqrt(variance + epsilon) and n = (input - mean) * inverse, by the statistics of each row of input,
    which are computed again, or given with statistics `saved`. Sums are over the c elements of a row.

    input: the shape of src, layer_norm's src. scale: (c,), with `affine`. mean, inverse: src's shape without
    the last axis, with statistics `saved`.

    Results with `gradients`, sums over all rows, shaped like scale: scale_gradient = sum(x*n), shift_gradient
    = sum(x).

    Raises:
        PlanError: `gradients` without `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when="affine")
    mean = operand("row", when="is_saved")
    inverse = operand("row", when="is_saved")
    scale_gradient = result("channel", when="gradients")
    shift_gradient = result("channel", when="gradients")
    affine: bool = True
    gradients: bool = False
    statistics: str = word(STATISTICS, default="recomputed")
    epsilon: float = parameter(default=1e-5, when=lambda op: not op.is_saved)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (self.gradient_sums(keys),) if self.is_saved else super().reductions(keys, src)

    def normalized(self, keys: Keys, at: str = "input") -> tuple[Scalar, Scalar]:
        if not self.is_saved:
            return super().normalized(keys, at)
        return leaf(keys[at]) - leaf(keys["mean"]), leaf(keys["inverse"])

    def sums(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        apart, inverse = self.normalized(keys)
        made = {"scale_gradient": leaf("x") * (apart * inverse), "shift_gradient": leaf("x")}
        return made if self.gradients else {}


@operator
class GroupNormBackward(StandardizedBackward, OfGroups):
    """inverse * (g - sum(g)/count - n * sum(g*n)/count)

    The gradient of src of `group_norm` with the same fields: x is the gradient of its output, g = x * scale,
    inverse = 1/sqrt(variance + epsilon) and n = (input - mean) * inverse, by the statistics of each group of
    an image of input, which are computed again. Sums are over the `count` elements of a group.

    input: the shape of src, group_norm's src. scale: (c,), with `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when="affine")
    groups: int
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


@operator
class InstanceNormBackward(StandardizedBackward, OfChannels):
    """inverse * (g - sum(g)/count - n * sum(g*n)/count)

    The gradient of src of `instance_norm` with the same fields, as `group_norm_backward` with a group for
    each channel.

    input: the shape of src, instance_norm's src. scale: (c,), with `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when="affine")
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


@operator
class RmsNormBackward(_OfOperands, RowNormalization):
    """inverse * (g - n * sum(g*n)/c)

    The gradient of src of `rms_norm`: x is the gradient of its output, g = x * scale, inverse =
    1/sqrt(mean(input**2) + epsilon), computed again for each row of input or given with statistics `saved`,
    and n = input * inverse. The sum is over the c elements of a row.

    input: the shape of src, rms_norm's src. scale: (c,), with `affine`. inverse: src's shape without the last
    axis, with statistics `saved`.

    Result with `gradients`: scale_gradient = sum(x*n) over all rows, shaped like scale.

    Raises:
        PlanError: `gradients` without `affine`.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand("channel", when="affine")
    inverse = operand("row", when="is_saved")
    scale_gradient = result("channel", when="gradients")
    affine: bool = True
    gradients: bool = False
    statistics: str = word(STATISTICS, default="recomputed")
    epsilon: float = parameter(default=1e-5, when=lambda op: not op.is_saved)

    def sums(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        return (
            {"scale_gradient": leaf("x") * (leaf(keys["input"]) * self._inverse(keys, src))}
            if self.gradients
            else {}
        )

    def _inverse(self, keys: Keys, src: TensorSpec) -> Scalar:
        if self.is_saved:
            return leaf(keys["inverse"])
        return 1 / sqrt(leaf(keys["square_sum"]) / self.count(src) + leaf(keys["epsilon"]))

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """The sums of a row's squares, unless its statistics are given, and of input times the gradient."""
        at = leaf(keys["input"])
        product = _scaled(self, keys) * at
        if self.is_saved:
            return (Sums((keys["product_sum"],), (product,)),)
        return (Sums((keys["square_sum"], keys["product_sum"]), (at * at, product)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factors of a row are computed once."""
        inverse = self._inverse(keys, src)
        mean = leaf(keys["product_sum"]) / self.count(src) * (inverse * inverse)
        return inverse * (_scaled(self, keys) - leaf(keys["input"]) * mean)


@operator
class SoftmaxBackward(OverAxes):
    """result * (x - sum(x * result))

    The gradient of src of `softmax(axes)`: x is the gradient of its output. The sum is over `axes`, the last
    one unless told.

    result: the shape of src, softmax's output.
    """

    result: str | None = operand("element", default=None, kw_only=True)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Sums((keys["product_sum"],), (leaf("x") * leaf(keys["result"]),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        return leaf(keys["result"]) * (leaf("x") - leaf(keys["product_sum"]))


@operator
class LogSoftmaxBackward(OverAxes):
    """x - exp(result) * sum(x)

    The gradient of src of `log_softmax(axes)`: x is the gradient of its output. The sum is over `axes`, the
    last one unless told.

    result: the shape of src, log_softmax's output.
    """

    result: str | None = operand("element", default=None, kw_only=True)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Sums((keys["gradient_sum"],), (leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        return leaf("x") - exp(leaf(keys["result"])) * leaf(keys["gradient_sum"])


ROW_GRADIENTS = (
    LayerNormBackward,
    RmsNormBackward,
    GroupNormBackward,
    InstanceNormBackward,
    SoftmaxBackward,
    LogSoftmaxBackward,
)

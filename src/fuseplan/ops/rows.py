"""Normalization of rows: by the statistics of the last axis."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.language.reduction import Moments, Statistic, Sums
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op, operand, operator, parameter
from fuseplan.ops.normalization import Keys, Normalization
from fuseplan.scalar import Scalar, leaf, sqrt


class Standardized(Normalization):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift, the last two where it is affine."""

    affine: bool

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Moments((keys["row_mean"], keys["row_variance"]), (leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factor of a mean's elements is computed once."""
        apart, factor = self.normalized(keys)
        return apart * factor * leaf(keys["scale"]) + leaf(keys["shift"]) if self.affine else apart * factor

    def normalized(self, keys: Keys, at: str = "x") -> tuple[Scalar, Scalar]:
        """The distance of a leaf from the mean, and the factor that all elements of a mean share."""
        mean, variance, epsilon = (leaf(keys[name]) for name in ("row_mean", "row_variance", "epsilon"))
        return leaf(keys.get(at, at)) - mean, 1 / sqrt(variance + epsilon)


class RowNormalization(Normalization):
    """An operator whose statistics are of each row: of all elements along the last axis."""

    reads, per = "rows", "row"

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls()
        yield "f32[2x5x3x7]", cls()
        yield "f32[1x3x3x2x5]", cls(affine=False)  # type: ignore[call-arg]


@operator
class LayerNorm(Standardized, RowNormalization):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift

    Normalizes each row by its own statistics: mean and variance of all elements of the last axis, as
    torch.nn.functional.layer_norm does with normalized_shape=(c,). The variance is the mean of the squared
    deviations. Without `affine` there are no scale and shift.

    scale, shift: (c,), torch's weight and bias.
    """

    onnx = "LayerNormalization"
    torch = "layer_norm"

    scale = operand("channel", when="affine")
    shift = operand("channel", when="affine")
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


@operator
class RmsNorm(RowNormalization):
    """x / sqrt(mean(x**2) + epsilon) * scale

    Divides each row by the root of the mean of its squares, over the last axis, as
    torch.nn.functional.rms_norm does with normalized_shape=(c,) and eps=epsilon. Without `affine` there is no
    scale.

    scale: (c,), torch's weight.
    """

    onnx = "RMSNormalization"
    torch = "rms_norm"

    scale = operand("channel", when="affine")
    affine: bool = True
    epsilon: float = parameter(default=1e-5)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Sums((keys["square_sum"],), (leaf("x") * leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the factor of a row is computed once."""
        factor = 1 / sqrt(leaf(keys["square_sum"]) / self.count(src) + leaf(keys["epsilon"]))
        normalized = leaf("x") * factor
        return normalized * leaf(keys["scale"]) if self.affine else normalized


ROW_NORMALIZATIONS = (LayerNorm, RmsNorm)

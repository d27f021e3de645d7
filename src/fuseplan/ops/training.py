"""Training: batch normalization by the statistics of the batch, and the backward passes.

A backward pass multiplies by the derivative of the forward formula, which `derivative.py` makes: no operator
here has a gradient of an activation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from fuseplan.errors import PlanError
from fuseplan.language.declarations import (
    Along,
    Beside,
    OperandField,
    Shape,
    inner,
    operand,
    parameter,
    result,
    word,
)
from fuseplan.language.fields import one_of
from fuseplan.language.reduction import Moments, Statistic, Sums
from fuseplan.language.slopes import slopes
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op, operator
from fuseplan.ops.activation import Elu, Identity, LeakyRelu, Power, Relu
from fuseplan.ops.affine import MODES, BatchNorm, Prelu
from fuseplan.ops.normalization import Keys, Normalization
from fuseplan.scalar import Scalar, indices_of, leaf, leaves_of, replaced, sqrt

STATISTICS = ("saved", "recomputed")


def slope(activation: Elementwise, at: Scalar, leaves: dict[str, Scalar], by: str = "x") -> Scalar:
    """The derivative of an activation at `at`; `leaves` are its parameters and operands, by its own names."""
    return replaced(slopes.derivative(activation.formula(), by), {**leaves, "x": at})


def _of_inner(made: OperandField) -> OperandField:
    """The declaration of an operand of `of`, for the operator around it."""

    def per(op: ActivationBackward, src: TensorSpec) -> str | Along | Beside | Shape:
        return made.per(op.of, src) if callable(made.per) else made.per

    return replace(made, per=per, when=lambda op: True)


@operator
class ActivationBackward(Elementwise):
    """x * derivative(of)(input)

    The gradient of src of an activation: x is the gradient of its output, `input` is the activation's input.
    Its parameters are the activation's.

    `of` may be an elementwise operator with operands, such as prelu: the derivative's operands are then its
    own. `by` names the operand that the derivative is along, in the place of src: the sum over the axes that
    the operand lacks is its gradient. `input` is an operand if the derivative reads it, or `of` neither
    has another nor reads an index, as dropout does.

    input: the shape of src.

    MIOpen: miopenCreateOpActivationBackward. MIOpen's POWER forgets to multiply by the gradient; here,
    `activation_backward(power)` is x * gamma*beta*(alpha + beta*input)**(gamma - 1) above the threshold.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    of: Elementwise = inner(operands=True)
    by: str = "x"

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {name: made for name, made in self.of.operand_fields.items() if made.when(self.of)}
        one_of(self.name, "by", self.by, ("x", *own))
        read = leaves_of(slopes.derivative(self.of.formula(), self.by))  # which may be too large
        fields = {name: _of_inner(made) for name, made in own.items() if name in read}
        if "x" in read or not (own or indices_of(self.of.formula())):
            fields = {"input": self.operand_fields["input"], **fields}
        self._set("operand_fields", fields)

    @property
    def reads(self) -> str | None:
        return self.of.reads

    def apply(self, x: Scalar, input: Scalar | None = None, **leaves: Scalar) -> Scalar:
        at = leaf("x") if input is None else input
        return slopes.times(x, slope(self.of, at, leaves, self.by))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls(Relu())
        yield "f32[2x5x3x7, nhwc]", cls(LeakyRelu(0.1))
        yield "f32[2x3x7]", cls(Elu())
        yield "f32[1x3x3x2x5]", cls(Power(alpha=0.5, beta=0.25, gamma=1.75))
        yield "f32[2x5x3x7]", cls(Prelu())
        yield "f32[2x5x3x7, nhwc]", cls(BatchNorm(), by="scale")


def _per(op: Normalization, src: TensorSpec) -> str:
    return op.per


@operator
class BatchNormTraining(Normalization):
    """(x - mean) * (scale/sqrt(variance + epsilon)) + shift

    Normalizes by the statistics of the batch: mean and variance of all elements of a channel (`spatial`), or
    of the batch at each place (`per_activation`). The variance is the mean of the squared deviations.

    scale, shift: (c,) with mode `spatial`; (c, *spatial) with `per_activation`.

    Results, shaped like scale. With `saved`, the tensors for the backward pass: saved_mean = mean and
    saved_inverse_variance = 1/sqrt(variance + epsilon). With `running`, statistics for inference, given by
    the caller and updated: running_mean + momentum * (mean - running_mean), and running_variance likewise
    with variance * count/(count - 1), where count is the number of elements that share a mean.

    MIOpen: miopenCreateOpBatchNormForward, momentum is expAvgFactor.
    """

    torch: ClassVar[str | None] = "batch_norm"

    scale = operand(_per)
    shift = operand(_per)
    saved_mean = result(_per, when="saved")
    saved_inverse_variance = result(_per, when="saved")
    running_mean = result(_per, when="running", updated=True)
    running_variance = result(_per, when="running", updated=True)
    mode: str = word(MODES, default="spatial")
    running: bool = False
    saved: bool = True
    epsilon: float = parameter(default=1e-5)
    momentum: float = parameter(default=0.1, when="running")

    @property
    def per(self) -> str:
        return MODES[self.mode]

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src; a PlanError where the running variance is of one element, which has none."""
        if self.running and self.count(src) < 2:
            raise PlanError(
                f"{self.name}: the running variance needs more than one element a mean",
                field="running",
                got=str(src),
                want="a larger batch, or mode=spatial and more than one place",
            )
        return super().output(src)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Moments((keys["batch_mean"], keys["batch_variance"]), (leaf("x"),)),)

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        mean, variance = leaf(keys["batch_mean"]), leaf(keys["batch_variance"])
        found: dict[str, Scalar] = {}
        if self.saved:
            found["saved_mean"] = mean
            found["saved_inverse_variance"] = 1 / sqrt(variance + leaf(keys["epsilon"]))
        if self.running:
            count = self.count(src)
            unbiased = variance * (count / (count - 1))
            for name, new in (("running_mean", mean), ("running_variance", unbiased)):
                old = leaf(keys[name])
                found[name] = old + leaf(keys["momentum"]) * (new - old)
        return found

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; brackets hold the part that depends on the channel alone, to be computed once."""
        names = ("batch_mean", "batch_variance", "scale", "shift", "epsilon")
        mean, variance, scale, shift, epsilon = (leaf(keys[name]) for name in names)
        return (leaf("x") - mean) * (scale / sqrt(variance + epsilon)) + shift

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls(saved=False)
        yield "f32[2x5x3x7, nhwc]", cls(running=True, momentum=0.3)
        yield "f32[3x5x3x7]", cls("per_activation", running=True)
        yield "f32[2x3x3x2x5]", cls(epsilon=1e-3)


@operator
class BatchNormBackward(Normalization):
    """scale*inverse_variance * (g - sum(g)/count - n*sum(g*n)/count)

    The gradient of src of `batch_norm_training -> activation`: x is the gradient of its output; n =
    (input - mean) * inverse_variance is the normalized input, and g = x * derivative(activation)(n*scale +
    shift) the gradient behind the normalization. Sums are over the `count` elements that share a mean.

    input: the shape of src, the input of batch_norm_training. scale; shift where there is an
    activation; mean and inverse_variance with statistics `saved`: (c,) with mode `spatial`, (c, *spatial)
    with `per_activation`. With statistics `recomputed`, mean and inverse_variance are those of input.

    Results, shaped like scale: scale_gradient = sum(g*n), shift_gradient = sum(g).

    MIOpen: miopenCreateOpBatchNormBackward and miopenCreateOpActivationBackward after it.
    """

    input: str | None = operand("element", default=None, kw_only=True)
    scale = operand(_per)
    shift = operand(_per, when="has_activation")
    mean = operand(_per, when="is_saved")
    inverse_variance = operand(_per, when="is_saved")
    scale_gradient = result(_per)
    shift_gradient = result(_per)
    activation: Elementwise = inner(default=Identity())
    mode: str = word(MODES, default="spatial")
    statistics: str = word(STATISTICS, default="saved")
    epsilon: float = parameter(default=1e-5, when=lambda op: not op.is_saved)

    @property
    def is_saved(self) -> bool:
        """Whether the statistics are operands."""
        return self.statistics == "saved"

    @property
    def has_activation(self) -> bool:
        """Whether one comes behind the normalization."""
        return self.activation != Identity()

    def __post_init__(self) -> None:
        super().__post_init__()
        slopes.derivative(self.activation.formula())  # which may be too large

    @property
    def per(self) -> str:
        return MODES[self.mode]

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        normalized, gradient = self._parts(keys)
        names = keys["gradient_sum"], keys["product_sum"]
        sums = Sums(names, (gradient, gradient * normalized))
        if self.is_saved:
            return (sums,)
        names = keys["batch_mean"], keys["batch_variance"]
        return Moments(names, (leaf(keys["input"]),)), sums

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        return {"scale_gradient": leaf(keys["product_sum"]), "shift_gradient": leaf(keys["gradient_sum"])}

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; brackets hold the part that depends on the channel alone, to be computed once."""
        count = self.count(src)
        normalized, gradient = self._parts(keys)
        _, inverse = self._moments(keys)
        means = [leaf(keys[name]) / count for name in ("gradient_sum", "product_sum")]
        return leaf(keys["scale"]) * inverse * (gradient - means[0] - normalized * means[1])

    def _moments(self, keys: Keys) -> tuple[Scalar, Scalar]:
        """Mean and inverse variance of input."""
        if self.is_saved:
            return leaf(keys["mean"]), leaf(keys["inverse_variance"])
        return leaf(keys["batch_mean"]), 1 / sqrt(leaf(keys["batch_variance"]) + leaf(keys["epsilon"]))

    def _parts(self, keys: Keys) -> tuple[Scalar, Scalar]:
        """The normalized input, and the gradient behind the normalization."""
        mean, inverse = self._moments(keys)
        normalized = (leaf(keys["input"]) - mean) * inverse
        if not self.has_activation:
            return normalized, leaf("x")
        given = {each.name: leaf(keys[each.name]) for each in self.activation.parameters()}
        before = normalized * leaf(keys["scale"]) + leaf(keys["shift"])
        return normalized, slopes.times(leaf("x"), slope(self.activation, before, given))

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls(statistics="recomputed")
        yield "f32[2x5x3x7, nhwc]", cls(Relu())
        yield "f32[3x5x3x7]", cls(LeakyRelu(0.1), mode="per_activation")
        yield "f32[2x3x3x2x5]", cls(Elu(), statistics="recomputed", epsilon=1e-3)


TRAINING = (BatchNormTraining, BatchNormBackward, ActivationBackward)

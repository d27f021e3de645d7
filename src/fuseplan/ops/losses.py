"""Losses of logits: cross-entropy with the indices of classes, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from fuseplan.errors import PlanError
from fuseplan.language.declarations import PER, Beside, word
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import real, refused
from fuseplan.language.reduction import INDEX, Statistic, SumExp
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op, operand, operator, result
from fuseplan.ops.embedding import INDICES
from fuseplan.ops.normalization import Keys, Normalization
from fuseplan.scalar import Scalar, exp, leaf, log, scalar, where

IGNORED = -100


def _target(op: OfLogits, src: TensorSpec) -> Beside:
    axes = PER["row"](src)
    return Beside(Dense(tuple(src.shape[axis] for axis in axes), op.index_dtype), axes)


@operator
class OfLogits(Normalization):
    """An operator on logits along axis c and on the index of each place's class."""

    reads = None  # the classes are the axis c that the plan has; axis 1 unless the layout names another

    target = operand(_target)
    label_smoothing: float = 0.0
    ignore_index: int = IGNORED
    z_loss: float = 0.0
    index_dtype: str = word(INDICES, default="i32")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("label_smoothing", 1.0), ("z_loss", inf)):
            number = real(self.name, name, getattr(self, name))
            if not 0 <= number <= most or number == inf:
                raise refused(self.name, name, f"must be a finite number from 0 to {most:g}", got=number)
            self._set(name, number)
        if not is_integer(self.ignore_index) or abs(self.ignore_index) >= 2**24:
            got, want = shown(self.ignore_index), "a whole number between -2^24 and 2^24"
            raise refused(self.name, "ignore_index", "must be an index", got=got, want=want)
        self._set("ignore_index", int(self.ignore_index))

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        return (src.channel_axis,)

    def output(self, src: TensorSpec) -> TensorSpec:
        """As `removes` says.

        Raises:
            PlanError: src has no axis besides the classes, or more classes than f32 counts.
        """
        if src.rank < 2:
            raise PlanError(f"{self.name} reads classes and places", got=str(src), want="2 axes or more")
        if src.channels > 2**24:
            raise PlanError(f"{self.name}: at most 2^24 classes", got=str(src))
        return super().output(src)

    def kept(self, keys: Keys, src: TensorSpec, value: Scalar) -> Scalar:
        """The value where the target is a class, 0 where it is ignored, and NaN elsewhere."""
        target = leaf(keys["target"])
        known = where(target >= 0, where(target <= src.channels - 1, value, _NAN), _NAN)
        return where(_is(target, self.ignore_index), 0, known)

    def slope(self, keys: Keys, src: TensorSpec, share: Scalar, lse: Scalar) -> Scalar:
        """The derivative of a place's loss by a logit, of the logit's share of the sum of exponentials."""
        if self.z_loss:
            share = share * (1 + 2 * self.z_loss * lse)
        even = self.label_smoothing / src.channels
        return share - where(_is(leaf(INDEX), leaf(keys["target"])), 1 - self.label_smoothing + even, even)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls()
        yield "f32[2x3x7]", cls(label_smoothing=0.25, index_dtype="i64")
        yield "f32[2x5x3x7, nhwc]", cls(ignore_index=2)
        yield "f32[2x3x11, bsc]", cls(z_loss=0.01, label_smoothing=0.5)


_NAN = scalar(inf) - inf


def _is(index: Scalar, other: Scalar | float) -> Scalar:
    """The condition that two whole numbers are equal."""
    return abs(index - other) < 0.5


@operator
class CrossEntropy(OfLogits):
    """log(sum(exp(x))) - x[target]

    The loss of each place, as torch.nn.functional.cross_entropy with the indices of classes and
    reduction="none". The classes are the axis c, axis 1 unless the layout names another: f16[8192x32000] has
    a row of logits for each place, f16[8x512x32000, bsc] too. The output does not have that axis. No
    exponential overflows; a row with NaN or +inf gives NaN.

    `label_smoothing` s: (1 - s) times the loss, and s times log(sum(exp(x))) - mean(x). `z_loss` z adds z
    times the square of log(sum(exp(x))). Where target is `ignore_index`, the loss is 0; where it is no class
    otherwise, the loss is NaN.

    target: src's shape without the classes, of `index_dtype`: i32 or i64.
    Result lse, of that shape in the compute dtype: log(sum(exp(x))), which the gradient reads.
    """

    torch = "cross_entropy"
    onnx = "SoftmaxCrossEntropyLoss"

    lse = result("row")

    def removes(self, src: TensorSpec) -> tuple[int, ...]:
        return self.over(src)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """In one pass: maximum, sum of exponentials, the target's logit and, for smoothing, the sum."""
        picked = where(_is(leaf(INDEX), leaf(keys["target"])), leaf("x"), 0)
        smooth = self.label_smoothing > 0
        names = ("largest", "exp_sum", "picked", *(["total"] if smooth else []))
        others = (picked, *([leaf("x")] if smooth else []))
        return (SumExp(tuple(keys[name] for name in names), (leaf("x"), *others)),)

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        """The logarithm of the sum of exponentials; the maximum where that is infinite or NaN."""
        most = leaf(keys["largest"])
        return {"lse": where(most < inf, most + log(leaf(keys["exp_sum"])), most)}

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        most, logarithm = leaf(keys["largest"]), log(leaf(keys["exp_sum"]))
        loss = most - leaf(keys["picked"]) + logarithm  # in this order, as the maximum may be large
        if self.label_smoothing:
            smooth = most - leaf(keys["total"]) / src.channels + logarithm
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * smooth
        if self.z_loss:
            loss = loss + self.z_loss * ((most + logarithm) * (most + logarithm))
        return self.kept(keys, src, loss)


@operator
class CrossEntropyGradient(CrossEntropy):
    """softmax(x) - (1 if target else 0)

    The gradient of each place's loss by its logits x, and the loss: as `cross_entropy` and
    `cross_entropy_backward` of a gradient of 1 with the same options, in one pass. `out` may be the memory of
    the logits.

    target: src's shape without the classes, of `index_dtype`: i32 or i64.
    Results lse and loss, of that shape in the compute dtype.
    """

    torch = onnx = None  # type: ignore[assignment]
    overwrites = True

    loss = result("row")

    def removes(self, src: TensorSpec) -> tuple[int, ...]:
        """None."""
        return ()

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        """Those of the loss, and the loss."""
        return {**super().result_formulas(keys, src), "loss": super().formula(keys, src)}

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The gradient."""
        most, total = leaf(keys["largest"]), leaf(keys["exp_sum"])
        share = exp(leaf("x") - most) * (1 / total)
        return self.kept(keys, src, self.slope(keys, src, share, most + log(total)))


@operator
class CrossEntropyBackward(OfLogits):
    """(exp(x - lse) - (1 if target else 0)) * gradient

    The gradient of the logits x of `cross_entropy` with the same options: target and lse are its own, and
    gradient is that of the loss of each place. With `label_smoothing` s of c classes, 1 - s and s/c more
    stand in the place of 1; `z_loss` z multiplies the exponential by 1 + 2*z*lse. Places whose target is
    ignored give 0. `out` may be the memory of the logits.

    target: src's shape without the classes, of `index_dtype`: i32 or i64. lse, gradient: the same shape.
    """

    overwrites = True

    lse = operand("row")
    gradient = operand("row")

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return ()

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        lse, gradient = leaf(keys["lse"]), leaf(keys["gradient"])
        return self.kept(keys, src, self.slope(keys, src, exp(leaf("x") - lse), lse) * gradient)


LOSSES = (CrossEntropy, CrossEntropyBackward, CrossEntropyGradient)

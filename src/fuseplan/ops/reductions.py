"""Softmax, and sums, means, extremes and their kin, over any axes: by numbers, by names, or over all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar

from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.reduction import INDEX, ArgMax, Max, Min, Moments, Product, Statistic, SumExp, Sums
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Op, operator
from fuseplan.ops.normalization import Keys, Normalization
from fuseplan.scalar import Scalar, exp, leaf, log, where

Axes = int | tuple[int, ...] | str
ALL = "all"
MOST_INDICES = 2**31
WANT = "a number such as -1, numbers such as (2, 3), names such as hw, or all"


@dataclass(frozen=True)
class OverAxes(Normalization):
    """An operator with statistics over axes that its field `axes` tells.

    Numbers are places in the logical order, from the end where they are negative; letters are names.
    """

    axes: Axes = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("axes", _checked(self.name, self.axes))

    @property
    def reads(self) -> str | None:
        """The last axis, for the number -1 and for names that axes of rows alone have."""
        is_row = self.axes == -1 or (
            isinstance(self.axes, str) and self.axes != ALL and set(self.axes) & set("abs")
        )
        return "rows" if is_row else None

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes in the logical order of src.

        Raises:
            PlanError: src has no such axis, or one of them is named twice.
        """
        if self.axes == ALL:
            found = list(range(src.rank))
        elif isinstance(self.axes, str):
            found = [src.names.find(name) for name in self.axes]
        else:
            numbers = (self.axes,) if isinstance(self.axes, int) else self.axes
            found = [each + src.rank * (each < 0) for each in numbers]
        if not found or not all(0 <= axis < src.rank for axis in found) or len(set(found)) < len(found):
            told = (
                f"{src}: axes 0 to {src.rank - 1}, named {', '.join(src.names)}" if src.rank else "a number"
            )
            raise refused(self.name, "axes", f"of {shown(self.axes)} are not axes of src", got=told)
        return tuple(sorted(found))

    def output(self, src: TensorSpec) -> TensorSpec:
        self.over(src)
        return super().output(src)

    def numbered(self, axes: tuple[int, ...]) -> Normalization:
        fields: dict[str, Any] = {**self.attributes(), "axes": axes}
        return type(self)(**fields)

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "f32[3x5]", cls(axes=-1)
        yield "f32[2x3x7]", cls(axes=-1)
        yield "f32[2x3x7, nwc]", cls(axes=1)
        yield "f32[2x5x3x7, nhwc]", cls(axes="hw")
        yield "f32[3x5x3x7]", cls(axes=(0, -1))
        yield "f32[1x3x3x2x5]", cls(axes=ALL)


def _checked(operator: str, value: object) -> Axes:
    """The field's value in its canonical form: one number stands alone.

    Raises:
        PlanError: it is no number, no tuple of different numbers and no word of different letters.
    """
    if isinstance(value, str):
        if value == ALL or (value.isalpha() and value.islower() and len(set(value)) == len(value)):
            return value
    elif is_integer(value):
        return int(value)  # type: ignore[call-overload,no-any-return]
    elif isinstance(value, tuple | list) and value and all(map(is_integer, value)):
        numbers = tuple(int(each) for each in value)
        return numbers if len(numbers) > 1 else numbers[0]
    raise refused(operator, "axes", "must tell axes", got=shown(value), want=WANT)


class Exponentials(OverAxes):
    """An operator with the maximum over axes, and the sum of exponentials less it."""

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[SumExp]:
        return (SumExp((keys["largest"], keys["exp_sum"]), (leaf("x"),)),)


@operator
class Softmax(Exponentials):
    """exp(x - max(x)) / sum(exp(x - max(x)))

    Maximum and sum are over `axes`, the last one unless told, as in torch.softmax; over several axes at once,
    the output sums to 1 over all of them. No exponential overflows. As in PyTorch, a group of elements that
    holds NaN or +inf, or nothing but -inf, becomes NaN.
    """

    onnx = "Softmax"
    torch = "softmax"

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the reciprocal of the sum is computed once."""
        return exp(leaf("x") - leaf(keys["largest"])) * (1 / leaf(keys["exp_sum"]))


@operator
class LogSoftmax(Exponentials):
    """x - max(x) - log(sum(exp(x - max(x))))

    Maximum and sum are over `axes`, the last one unless told, as in torch.log_softmax. A group of elements
    that holds NaN or +inf, or nothing but -inf, becomes NaN.
    """

    onnx = "LogSoftmax"
    torch = "log_softmax"

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the logarithm is computed once."""
        return leaf("x") - leaf(keys["largest"]) - log(leaf(keys["exp_sum"]))


@dataclass(frozen=True)
class Removing(OverAxes):
    """An operator whose output has one element for each place along the other axes.

    Attributes:
        statistic: a statistic of x; the output is its number unless the class says otherwise.
        number: the operator's name of that.
    """

    statistic: ClassVar[type[Statistic]]
    number: ClassVar[str]

    axes: Axes = ALL
    keepdim: bool = False

    def removes(self, src: TensorSpec) -> tuple[int, ...]:
        """The reduced axes, unless `keepdim` leaves them with extent 1."""
        return () if self.keepdim else self.over(src)

    def output(self, src: TensorSpec) -> TensorSpec:
        """The other axes in the same order in memory; the reduced ones with extent 1 if `keepdim`.

        Raises:
            PlanError: src has no such axes.
        """
        return src.with_shape(self.spread_shape(src)) if self.keepdim else super().output(src)

    def spread_shape(self, src: TensorSpec) -> tuple[int, ...]:
        over = self.over(src)
        return tuple(1 if axis in over else extent for axis, extent in enumerate(src.shape))

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (self.statistic((keys[self.number],), (leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        return leaf(keys[self.number])


@operator
class Sum(Removing):
    """sum(x)

    The sum over `axes`, over all unless told. The output does not have these axes; with `keepdim` they have
    extent 1.
    """

    onnx = "ReduceSum"
    torch = "sum"
    statistic, number = Sums, "total"


@operator
class Mean(Removing):
    """sum(x) / count

    The mean over `axes`, over all unless told. The output does not have these axes; with `keepdim` they have
    extent 1.
    """

    onnx = "ReduceMean"
    torch = "mean"
    statistic, number = Sums, "total"

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        return leaf(keys["total"]) / self.count(src)


@operator
class Amax(Removing):
    """max(x)

    The largest element over `axes`, over all unless told; NaN where there is one. The output does not have
    these axes; with `keepdim` they have extent 1.
    """

    onnx = "ReduceMax"
    torch = "amax"
    statistic, number = Max, "largest"


@operator
class Amin(Removing):
    """min(x)

    The smallest element over `axes`, over all unless told; NaN where there is one. The output does not have
    these axes; with `keepdim` they have extent 1.
    """

    onnx = "ReduceMin"
    torch = "amin"
    statistic, number = Min, "smallest"


@operator
class Prod(Removing):
    """product(x)

    The product over `axes`, over all unless told. The output does not have these axes; with `keepdim` they
    have extent 1. A product that is too large or too small on the way becomes infinite or 0.
    """

    onnx = "ReduceProd"
    torch = "prod"
    statistic, number = Product, "total"


@operator
class Logsumexp(Removing, Exponentials):
    """max(x) + log(sum(exp(x - max(x))))

    The logarithm of the sum of exponentials over `axes`, over all unless told. No exponential overflows; it
    is infinite where the maximum is. The output does not have these axes; with `keepdim` they have extent 1.
    """

    onnx = "ReduceLogSumExp"
    torch = "logsumexp"

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[SumExp]:
        return (replace(Exponentials.reductions(self, keys, src)[0], has_numbers=False),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; the maximum itself where it is +inf or NaN."""
        most = leaf(keys["largest"])
        return where(most < inf, most + log(leaf(keys["exp_sum"])), most)


@operator
class Var(Removing):
    """sum((x - mean(x))**2) / (count - correction)

    The variance over `axes`, over all unless told, of deviations from the mean: it keeps its digits at any
    mean. `correction=0` divides by the number of elements. The output does not have these axes; with
    `keepdim` they have extent 1.
    """

    torch = "var"

    correction: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.correction) or self.correction < 0:
            raise refused(self.name, "correction", "must be a number of elements", got=shown(self.correction))

    def output(self, src: TensorSpec) -> TensorSpec:
        """The other axes in the same order in memory; the reduced ones with extent 1 if `keepdim`.

        Raises:
            PlanError: src has no such axes, or too few elements along them.
        """
        if self.count(src) <= self.correction:
            problem = "leaves nothing to divide by"
            raise refused(self.name, "correction", problem, got=f"{self.count(src)} elements along the axes")
        return super().output(src)

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (Moments((keys["mean"], keys["variance"]), (leaf("x"),)),)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        count = self.count(src)
        return leaf(keys["variance"]) * (count / (count - self.correction))


@operator
class Argmax(Removing):
    """the first index at which x is max(x)

    The index of the largest element over `axes`, over all unless told, as in torch.argmax: the first of equal
    ones, or of NaN where there is one. Over several axes it counts their elements in src's logical order,
    the last axis fastest. The output has the dtype i32; torch's has i64. It does not have these axes; with
    `keepdim` they have extent 1.
    """

    torch = "argmax"
    number = "place"

    def output(self, src: TensorSpec) -> TensorSpec:
        """i32, the other axes in the same order in memory; the reduced ones with extent 1 if `keepdim`.

        Raises:
            PlanError: src has no such axes, or an index does not fit in i32.
        """
        if self.count(src) > MOST_INDICES:
            raise refused(self.name, "axes", "have more elements than i32 counts", got=self.count(src))
        return super().output(src).with_dtype("i32")

    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        return (ArgMax((keys["largest"], keys["place"]), (leaf("x"), leaf(INDEX))),)


REDUCTIONS = (Softmax, LogSoftmax, Sum, Mean, Amax, Amin, Prod, Logsumexp, Var, Argmax)

"""Operators with statistics: numbers of many elements, then a formula of one. Norms of rows and of images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar

from fuseplan.errors import PlanError
from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import Array, operand, parameter
from fuseplan.language.extents import is_integer
from fuseplan.language.fields import refused
from fuseplan.language.layouts import behind_runs, dense, in_runs
from fuseplan.language.reduction import INDEX, Moments, Statistic, Sums, indices, reduce
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.op import Given, Op, operator
from fuseplan.scalar import Scalar, fold, leaf, leaves_of, sqrt

Keys = Mapping[str, str]  # what the plan calls each operand, parameter, result and statistic, by its own name


def reduced_axes(per: str, rank: int) -> tuple[int, ...]:
    """The axes n, c, spatial over which is summed: all but c (`channel`), or n (`activation`)."""
    return (0, *range(2, rank)) if per == "channel" else (0,)


class Names(dict[str, str]):
    """Every name as itself."""

    def __missing__(self, name: str) -> str:
        return name


class Normalization(Op):
    """An operator that needs sums over many elements before it can write the first.

    A class has the methods `reductions`, `result_formulas` and `formula`, over the leaf `x`, which is src,
    and what `keys` calls its operands, parameters, results and statistics.
    """

    kind = "normalization"
    overwrites: ClassVar[bool] = False  # whether a plan of it alone may write its output in src's memory

    @property
    def reads(self) -> str | None:
        return "channels"

    @property
    def per(self) -> str:
        """The meaning of one number of a statistic: of a `channel`, an `activation`, a `row`, or a `cell`.

        A cell is a place along the axes that are not reduced, whichever these are.
        """
        return "cell"

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes of src that are reduced; a PlanError where src does not have them."""
        return (src.channel_axis,) if self.per == "row" else reduced_axes(self.per, src.rank)

    def split(self, src: TensorSpec) -> tuple[int, int] | None:
        """A reduced axis of which a statistic sees one run at a time, and the number of equal runs; or None.

        Raises:
            PlanError: its runs would differ.
        """
        return None

    def numbered(self, axes: tuple[int, ...]) -> Normalization:
        """The operator with these axes, where a field tells them."""
        return self

    @abstractmethod
    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Statistic, ...]:
        """The statistics, in order: each may use those before."""

    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        """The formula of one element of each result, by the result's own name."""
        return {}

    def sums(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        """The term of one element of each result that is a sum over the axes that stay, by its own name."""
        return {}

    @abstractmethod
    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula of one element of the output."""

    def spread_shape(self, src: TensorSpec) -> tuple[int, ...]:
        """The shape of the output with the axes of src: extent 1 along those that it does not have."""
        removed = self.removes(src)
        return tuple(1 if axis in removed else extent for axis, extent in enumerate(src.shape))

    def reduced_names(self, src: TensorSpec) -> tuple[str, ...]:
        """The operator's own names of the numbers that its reductions make."""
        return tuple(name for each in self.reductions(Names(), src) for name in each.names)

    def count(self, src: TensorSpec) -> int:
        """Elements that one number of a reduction is made of."""
        _, runs = self.split(src) or (0, 1)
        return prod(src.shape[axis] for axis in self.over(src)) // runs

    def places(self, src: TensorSpec) -> dict[str, Array]:
        """Each element's place among the reduced ones, as a leaf, where the formula reads it."""
        if INDEX not in leaves_of(self.formula(Names(), src)):
            return {}
        return {INDEX: indices(src.shape, dense(src.shape, self.over(src)))}

    def reduced(
        self, statistic: Statistic, leaves: Mapping[str, Any], src: TensorSpec, by: Arithmetic = ARRAYS
    ) -> dict[str, Any]:
        """The numbers of a statistic by name, as `language.reduction.reduce` makes them.

        Reduced axes have extent 1, but for one in runs, where each element has its run's number.
        """
        split, axes = self.split(src), self.over(src)
        if split is None:
            return reduce(statistic, leaves, src.shape, axes, by)
        axis, shape = split[0], in_runs(src.shape, split)
        seen = {name: each.reshape(in_runs(each.shape, split)) for name, each in leaves.items() if each.ndim}
        made = reduce(statistic, {**leaves, **seen}, shape, behind_runs(axes, axis), by)

        def spread(number: Any) -> Any:
            around, inside = number.shape[: axis + 1], number.shape[axis + 2 :]
            runs = by.broadcast(number, (*around, shape[axis + 1], *inside))
            return runs.reshape((*around[:-1], src.shape[axis], *inside))

        return {name: spread(number) for name, number in made.items()}

    def summed(self, leaves: Mapping[str, Any], src: TensorSpec, by: Arithmetic) -> dict[str, Any]:
        """`sums` by the results' own names."""
        stay = tuple(axis for axis in range(src.rank) if axis not in self.over(src))
        terms = self.sums(Names(), src).items()
        return {
            name: reduce(Sums((name,), (term,)), leaves, src.shape, stay, by)[name] for name, term in terms
        }

    def output(self, src: TensorSpec) -> TensorSpec:
        """The same shape, in src's layout, or in the named one nearest to its strides; or fewer axes."""
        removed = self.removes(src)
        return src.without(removed) if removed else super().output(src)

    def each_run(self, numbers: Any, src: TensorSpec) -> Any:
        """Numbers of elements as those of runs, where an axis is in runs."""
        split = self.split(src)
        if split is None:
            return numbers
        axis, runs = split
        return numbers[(slice(None),) * axis + (slice(None, None, src.shape[axis] // runs),)]

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The formulas in float64, each reduction over all elements at once."""
        spec, leaves, by = given.spec, self.leaf_values(given), given.by
        leaves |= {name: by.table["const"](places) for name, places in self.places(spec).items()}
        for each in self.reductions(Names(), spec):
            made_of = self.reduced(each, leaves, spec, by)
            leaves |= {name: (1 + given.slip) * number for name, number in made_of.items()}
        formulas = self.result_formulas(Names(), spec)
        made = {name: fold(each, leaves, by.table) for name, each in formulas.items()}
        made |= self.summed(leaves, spec, by)
        out = by.broadcast(fold(self.formula(Names(), spec), leaves, by.table), self.spread_shape(spec))
        shapes = {each.name: each.shape for each in self.results(spec)}
        results = {name: self.each_run(made[name], spec).reshape(shape) for name, shape in shapes.items()}
        return by.own(out.reshape(self.output(spec).shape)), results


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


class PerImage(Standardized):
    """An operator whose statistics are of each image: of all places of a channel, or of several channels."""

    least: int

    def over(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes behind n, or behind n and c; a PlanError where src has too few axes."""
        if src.rank < self.least:
            want = "n, c" + " and places" * (self.least > 2)
            raise PlanError(f"{self.name} has no statistics of this tensor", got=str(src), want=want)
        return tuple(sorted(src.canonical_order[self.least - 1 :]))

    def output(self, src: TensorSpec) -> TensorSpec:
        """The shape of src; a PlanError where src has too few axes, or groups would differ."""
        self.over(src)
        self.split(src)
        return super().output(src)

    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula; a channel's two factors are one, which spares each element a rounding."""
        apart, factor = self.normalized(keys)
        return apart * (factor * leaf(keys["scale"])) + leaf(keys["shift"]) if self.affine else apart * factor


class OfGroups(PerImage):
    """An operator with the statistics of groups of channels."""

    least = 2
    groups: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_integer(self.groups) or self.groups < 1:
            raise refused(self.name, "groups", "must be a number of groups", got=shown(self.groups))
        self._set("groups", int(self.groups))

    def split(self, src: TensorSpec) -> tuple[int, int]:
        """The channels' axis, and the groups; a PlanError where the groups would differ in size."""
        if src.channels % self.groups:
            got = f"{self.groups}, of {src.channels} channels"
            raise refused(self.name, "groups", "must divide the channels", got=got)
        return src.channel_axis, self.groups

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        make: Any = cls  # one with the fields
        yield "f32[3x6]", make(2)
        yield "f32[2x6x7]", make(3, affine=False)
        yield "f32[2x6x3x7, nhwc]", make(2)
        yield "f32[2x9x5x7]", make(3)
        yield "f32[1x4x3x2x5]", make(1)


class OfChannels(PerImage):
    """An operator with the statistics of each channel."""

    least = 3

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        make: Any = cls  # one with the fields
        yield "f32[2x6x7]", make()
        yield "f32[2x5x3x7, nhwc]", make(affine=False)
        yield "f32[3x5x9x7]", make()
        yield "f32[1x3x3x2x5]", make()


@operator
class GroupNorm(OfGroups):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift

    Normalizes each group of an image's channels by its own statistics, as torch.nn.functional.group_norm:
    c / groups neighbouring channels, at all places, have one mean and one variance. The variance is the mean
    of the squared deviations. Without `affine` there are no scale and shift.

    scale, shift: (c,), torch's weight and bias.
    """

    onnx = "GroupNormalization"
    torch = "group_norm"

    scale = operand("channel", when="affine")
    shift = operand("channel", when="affine")
    groups: int
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


@operator
class InstanceNorm(OfChannels):
    """(x - mean) / sqrt(variance + epsilon) * scale + shift

    Normalizes each channel of each image by its own statistics: mean and variance of all its places, as
    torch.nn.functional.instance_norm without running statistics. The variance is the mean of the squared
    deviations. Without `affine` there are no scale and shift.

    scale, shift: (c,), torch's weight and bias.
    """

    onnx = "InstanceNormalization"
    torch = "instance_norm"

    scale = operand("channel", when="affine")
    shift = operand("channel", when="affine")
    affine: bool = True
    epsilon: float = parameter(default=1e-5)


GROUP_NORMALIZATIONS = (GroupNorm, InstanceNorm)

"""What operators with statistics share: numbers of many elements, then a formula of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.declarations import Array
from fuseplan.language.layouts import behind_runs, dense, in_runs
from fuseplan.language.reduction import INDEX, Statistic, Sums, indices, reduce
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Given, Op
from fuseplan.scalar import Scalar, fold, leaves_of

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

"""What operators with statistics share: numbers of many elements, then a formula of one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from fuseplan.declarations import Array
from fuseplan.op import Op
from fuseplan.reduction import Reduction, reduce
from fuseplan.scalar import NUMPY, Scalar, fold
from fuseplan.tensor import TensorSpec

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

    @property
    def reads(self) -> str:
        """Axis 1."""
        return "channels"

    @property
    @abstractmethod
    def per(self) -> str:
        """What one number of a reduction is for: a `channel`, an `activation` or a `row`."""

    def axes(self, src: TensorSpec) -> tuple[int, ...]:
        """The axes of src over which is summed."""
        return (src.channel_axis,) if self.per == "row" else reduced_axes(self.per, src.rank)

    @abstractmethod
    def reductions(self, keys: Keys, src: TensorSpec) -> tuple[Reduction, ...]:
        """The statistics, in order: each may use those before."""

    @abstractmethod
    def result_formulas(self, keys: Keys, src: TensorSpec) -> dict[str, Scalar]:
        """The formula of one element of each result, by the result's own name."""

    @abstractmethod
    def formula(self, keys: Keys, src: TensorSpec) -> Scalar:
        """The formula of one element of the output."""

    def reduced_names(self, src: TensorSpec) -> tuple[str, ...]:
        """The operator's own names of the numbers that its reductions make."""
        return tuple(name for each in self.reductions(Names(), src) for name in each.names)

    def count(self, src: TensorSpec) -> int:
        """Elements that one number of a reduction is made of."""
        return prod(src.shape[axis] for axis in self.axes(src))

    def output(self, src: TensorSpec) -> TensorSpec:
        """The same shape, in src's layout, or in the named one nearest to its strides."""
        return src if src.layout is not None else src.with_shape(src.shape)

    def reference(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        names: str | None = None,
    ) -> Array:
        """The formula in float64."""
        return self.evaluate(src, operands, parameters, names=names)[0]

    def evaluate(
        self,
        src: Array,
        operands: Mapping[str, Array],
        parameters: Mapping[str, float],
        slip: float = 0.0,
        names: str | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """The formulas in float64, each reduction over all elements at once."""
        spec = TensorSpec(np.shape(src), "f64", names)
        leaves: dict[str, Any] = {"x": np.asarray(src, np.float64)}
        leaves |= {each.name: np.float64(parameters.get(each.name, each.value)) for each in self.parameters()}
        leaves |= self.spread(src, operands, names)
        with np.errstate(all="ignore"):  # infinities and NaN are results like any other
            for each in self.reductions(Names(), spec):
                made_of = reduce(each, leaves, spec.shape, self.axes(spec))
                leaves |= {name: (1 + slip) * number for name, number in made_of.items()}
            made = {
                name: fold(each, leaves, NUMPY) for name, each in self.result_formulas(Names(), spec).items()
            }
            out = np.broadcast_to(fold(self.formula(Names(), spec), leaves, NUMPY), spec.shape).copy()
        shapes = {each.name: each.shape for each in self.results(spec)}
        return out, {name: made[name].reshape(shape) for name, shape in shapes.items()}

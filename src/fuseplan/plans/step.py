"""An operator at its place in a plan, with the plan's names for its operands, parameters and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuseplan.language.arithmetic import ARRAYS, Arithmetic
from fuseplan.language.bounds import bounds_behind, is_long, largest_sum
from fuseplan.language.declarations import Operand, Parameter, Result
from fuseplan.language.indices import steps_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.conv import INTEGERS, Conv
from fuseplan.ops.matmul import Product
from fuseplan.ops.normalization import Normalization
from fuseplan.scalar import Scalar, indices_of, leaf, replaced
from fuseplan.system.locks import cached_property


@dataclass(frozen=True)
class Step:
    """An operator at its place in a plan: the handle that arguments are set by.

    `statistics` are the numbers that it makes of many elements: the operator's own names and the plan's keys.
    """

    index: int
    op: Op
    src: TensorSpec
    dst: TensorSpec
    operands: tuple[Operand, ...]
    parameters: tuple[Parameter, ...]
    results: tuple[Result, ...] = ()
    statistics: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """The step as messages speak of it: `operator 2 (relu)`."""
        return f"operator {self.index} ({self.op.name})"

    @property
    def keys(self) -> dict[str, str]:
        """What the plan calls each operand, parameter and result, by the operator's own name of it."""
        given: tuple[Operand | Parameter | Result, ...] = (*self.operands, *self.parameters, *self.results)
        return {each.name: each.key for each in given}

    @property
    def leaves(self) -> dict[str, str]:
        """`keys`, and the plan's names of statistics and of earlier values."""
        return self.keys | dict(self.statistics) | self.op.again

    def evaluate(
        self,
        x: Any,
        tensors: Mapping[str, Any],
        values: Mapping[str, float],
        slip: float = 0.0,
        by: Arithmetic = ARRAYS,
    ) -> tuple[Any, dict[str, Any]]:
        """The output, and the results by key, as `Op.evaluate` gives them.

        Args:
            x: the input.
            tensors: operands, earlier values and old values of updated results by key.
            values: parameters by key, in the place of the plan's own.
            slip: as for `Op.evaluate`.
            by: likewise.
        """
        keys = self.keys
        given = {name: tensors[key] for name, key in (keys | self.op.again).items() if key in tensors}
        numbers = {each.name: values.get(each.key, each.value) for each in self.parameters}
        out, made = self.op.evaluate(x, given, numbers, slip, self.src.names, by)
        return out, {keys[name]: tensor for name, tensor in made.items()}

    @cached_property
    def formulas(self) -> tuple[Scalar, ...]:
        """The formula of one element over `x` and the plan's keys; of each part where dst is made in parts.

        The leaf of an index has the operator's number behind it, `index(c)@2`: each counts in its own src.

        Raises:
            TypeError: the operator is a contraction.
        """
        if isinstance(self.op, Normalization):
            return (self.op.formula(self.leaves, self.src),)
        if self.op.looks_up:
            return (leaf("x"),)  # the kernel reads src as the rows
        if not isinstance(self.op, Elementwise):
            raise TypeError(f"{self.op.name} has no formula of one element")
        made = self.op.formulas(self.src, self.leaves)
        own = {name: leaf(f"{name}@{self.index}") for name in frozenset().union(*map(indices_of, made))}
        return tuple(replaced(each, own) for each in made) if own else made

    @cached_property
    def indices(self) -> dict[str, tuple[int, ...]]:
        """The indices that the formula reads: what a step along each axis of src adds, by its leaf's name."""
        if not isinstance(self.op, Elementwise):
            return {}
        names = frozenset().union(*map(indices_of, self.formulas))
        return {name: steps_of(name.partition("@")[0], self.src) for name in sorted(names)}


def has_long_sums(src: TensorSpec, steps: Sequence[Step]) -> bool:
    """Whether f32 does not do for a sum of products of integers, in a plan of these steps."""
    for place, step in enumerate(steps):
        if isinstance(step.op, Conv | Product) and step.src.dtype in INTEGERS:
            before = steps[:place]
            dtypes = {each.key: each.dtype for made in before for each in made.operands}
            numbers = bounds_behind((made.formulas[0] for made in before), src.dtype, dtypes)
            largest = largest_sum(numbers, step.operands[0].dtype, step.op.depth(step.src))
            return is_long(largest, steps[-1].dst.dtype)
    return False

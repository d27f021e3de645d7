"""An operator at its place in a plan, with the plan's names for its operands, parameters and results."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.declarations import Operand, Parameter, Result
from fuseplan.op import Elementwise, Op
from fuseplan.ops.normalization import Normalization
from fuseplan.scalar import Scalar
from fuseplan.tensor import Dense, TensorSpec


@dataclass(frozen=True)
class PlanOperand:
    """An operand in its plan: `key` is its own name where it is the first of that name, else `name_2`, ..."""

    key: str
    step: int
    operand: Operand

    def __str__(self) -> str:
        return f"operand `{self.key}`"

    @property
    def name(self) -> str:
        """What its operator calls it."""
        return self.operand.name


@dataclass(frozen=True)
class PlanParameter:
    """A parameter in its plan; keys are made as operands' are, and no operand has the same."""

    key: str
    step: int
    parameter: Parameter


@dataclass(frozen=True)
class PlanResult:
    """A result in its plan; keys are made as operands' are, and nothing else has the same.

    `spec` is how its tensor lies.
    """

    key: str
    step: int
    result: Result
    spec: TensorSpec | Dense

    def __str__(self) -> str:
        return f"result `{self.key}`"

    @property
    def name(self) -> str:
        """What its operator calls it."""
        return self.result.name


@dataclass(frozen=True)
class Step:
    """An operator at its place in a plan: the handle that arguments are set by.

    `statistics` are the numbers that it makes of many elements: the operator's own names and the plan's keys.
    """

    index: int
    op: Op
    src: TensorSpec
    dst: TensorSpec
    operands: tuple[PlanOperand, ...]
    parameters: tuple[PlanParameter, ...]
    results: tuple[PlanResult, ...] = ()
    statistics: tuple[tuple[str, str], ...] = ()

    @property
    def title(self) -> str:
        """The step as messages speak of it: `operator 2 (relu)`."""
        return f"operator {self.index} ({self.op.name})"

    @property
    def keys(self) -> dict[str, str]:
        """What the plan calls each operand, parameter and result, by the operator's own name of it."""
        named = {each.operand.name: each.key for each in self.operands}
        named |= {each.parameter.name: each.key for each in self.parameters}
        return named | {each.result.name: each.key for each in self.results}

    @property
    def leaves(self) -> dict[str, str]:
        """`keys`, and the plan's names of statistics and of earlier values."""
        return self.keys | dict(self.statistics) | self.op.again

    @property
    def formula(self) -> Scalar:
        """The formula of one element over `x` and the plan's keys.

        Raises:
            TypeError: the operator is a contraction.
        """
        if isinstance(self.op, Normalization):
            return self.op.formula(self.leaves, self.src)
        if not isinstance(self.op, Elementwise):
            raise TypeError(f"{self.op.name} has no formula of one element")
        return self.op.formula(self.leaves)

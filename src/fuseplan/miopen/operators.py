"""Operators of a plan: the kinds there are, and what a list of them is as a fusion plan of this library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.op import Op
from fuseplan.ops.expression import Expression
from fuseplan.plan import FusionPlan
from fuseplan.tensor import TensorSpec

ALPHA = "alpha of the result"  # the name by which an operator's factor is given; no operand's


@dataclass(frozen=True)
class Kind:
    """A kind of operator.

    Attributes:
        name: what messages call it.
        set_args: the function that sets its arguments.
        refuses_alpha: why a factor other than 1 has no meaning; empty where it multiplies the result.
    """

    name: str
    set_args: str
    refuses_alpha: str = ""


CONVOLUTION = Kind("convolution forward", "miopenSetOpArgsConvForward")
BIAS = Kind(
    "bias forward",
    "miopenSetOpArgsBiasForward",
    "MIOpen does not say whether it would multiply the bias or the sum: scale the bias itself",
)
ACTIVATION = Kind("activation forward", "miopenSetOpArgsActivForward")
INFERENCE = Kind("batch normalization inference", "miopenSetOpArgsBatchNormInference")
RESIDUAL = Kind("tensor scale add", "miopenConvolutionBiasActivationForward")


@dataclass(frozen=True)
class Operator:
    """An operator of a plan: its kind, what it is in this library, and its numbers in MIOpen's order."""

    kind: Kind
    op: Op
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lowered:
    """Operators as a fusion plan.

    Attributes:
        plan: the fusion plan.
        keys: for each operator, the plan's keys by the names of what it is given.
    """

    plan: FusionPlan
    keys: tuple[dict[str, str], ...]


def lowered(src: TensorSpec, operators: Sequence[Operator], scaled: frozenset[int] = frozenset()) -> Lowered:
    """The fusion plan of operators; the results of the `scaled`, by index, are multiplied by a number.

    Raises:
        PlanError: an operator cannot take what comes before it.
    """
    plan = FusionPlan(src)
    keys: list[dict[str, str]] = []
    for index, operator in enumerate(operators):
        keys.append(plan.add(operator.op).keys)
        if index in scaled:
            factor = plan.add(Expression("alpha * x", alpha=1.0))
            keys[-1] |= {ALPHA: factor.keys["alpha"]}
    return Lowered(plan, tuple(keys))

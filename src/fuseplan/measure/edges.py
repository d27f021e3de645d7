"""Elements at which rounding decides what a gradient is: on either side of an activation's edge.

Batch norm's backward pass computes again what the activation was applied to. Where that is within rounding of
relu's zero, the gradient is all or nothing, and says nothing of how well it is computed. Random gradients are
0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fuseplan.ops.training import BatchNormBackward
from fuseplan.plan import FusionPlan, Step
from fuseplan.reduction import Reduction
from fuseplan.scalar import fold

NEAR = 1e-3  # of an edge: far beyond what rounding moves
JUMP = 0.05  # of a slope from one side to the other: a smooth activation's is a tenth of it

Leaves = dict[str, Any]


def edged(plan: FusionPlan) -> Step | None:
    """The step whose gradient may have edges, where it takes src as it is; None where there is none."""
    first = plan.steps[0] if plan.steps else None
    if first is not None and isinstance(first.op, BatchNormBackward) and "shift" in first.keys:
        return first
    return None


def at_edges(
    step: Step,
    leaves: Leaves,
    meanings: Mapping[str, Callable[..., Any]],
    reduced: Callable[[Reduction, Leaves], Mapping[str, Any]],
) -> Any:
    """Which elements are at an edge: a mask that broadcasts over src.

    Args:
        step: what `edged` gave.
        leaves: the step's operands and parameters by key, float64, each to be broadcast over src.
        meanings: of the scalar functions, for such arrays.
        reduced: the numbers of a reduction by name.
    """
    assert isinstance(step.op, BatchNormBackward)
    *moments, sums = step.op.reductions(step.leaves, step.src)
    for each in moments:
        leaves = {**leaves, **reduced(each, leaves)}
    gradient, shift = sums.expressions[0], step.keys["shift"]
    low, high = (fold(gradient, {**leaves, shift: leaves[shift] + side}, meanings) for side in (-NEAR, NEAR))
    return abs(high - low) > JUMP

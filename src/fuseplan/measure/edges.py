"""Elements at which rounding decides what a gradient is: on either side of an activation's edge.

Batch norm's backward pass computes again the value that the activation was applied to. Where that value is
within rounding of relu's zero, the gradient is all or nothing, and says nothing of how well it is computed.
Random gradients are 0 there.
"""

from __future__ import annotations

import numpy as np

from fuseplan.measure.spaces import Tensor, Tensors, arithmetic_of, exact
from fuseplan.op import Given
from fuseplan.ops.normalization import Names
from fuseplan.ops.training import BatchNormBackward
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import fold

NEAR = 1e-3  # of an edge: far beyond what rounding moves
JUMP = 0.05  # of a slope from one side to the other: a smooth activation's is a tenth of it


def settle(plan: FusionPlan, tensors: Tensors) -> None:
    """Makes gradients 0 where rounding decides what becomes of them."""
    step = plan.steps[0] if plan.steps else None
    if step is None or not isinstance(step.op, BatchNormBackward) or "shift" not in step.keys:
        return
    src, op = tensors["src"], step.op
    x = exact(src)
    by, operands = arithmetic_of(x), {each.name: exact(tensors[each.key]) for each in step.operands}
    leaves = {**op.leaf_values(Given(x, step.src, operands, {}, by=by)), "x": by.table["const"](1.0)}
    *moments, sums = op.reductions(Names(), step.src)
    with np.errstate(all="ignore"):
        for each in moments:
            leaves |= op.reduced(each, leaves, step.src, by)

        def gradient(side: float) -> Tensor:
            return fold(sums.expressions[0], {**leaves, "shift": leaves["shift"] + side}, by.table)

        mask = abs(gradient(NEAR) - gradient(-NEAR)) > JUMP
    src[by.broadcast(mask, step.src.shape)] = 0

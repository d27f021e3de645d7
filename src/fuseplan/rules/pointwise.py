"""The rule of plans of elementwise operators alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason, claim


class PointwiseRule:
    """Elementwise operators, one after another, are one kernel.

    before: elementwise+, each reading and writing memory
    after:  one pass: an element is read, taken through all of them in a register, and written
    saves:  writing and reading again, once each, the result of every operator but the last
    """

    name: ClassVar[str] = "pointwise"

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """All operators are elementwise, and one at most reads an axis in parts."""
        yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
        yield _none("contraction", plan, Reason.CONTRACTION_IN_POINTWISE)
        yield _none("normalization", plan, Reason.NORMALIZATION_IN_POINTWISE)
        parted = [step for step in plan if step.op.has_parts][1:]
        yield claim(not parted, Reason.SEVERAL_PARTS, operator=parted[0].index if parted else None)


def _none(kind: str, plan: FusionPlan, reason: Reason) -> Claim:
    """That no operator is of the kind."""
    first = next((step for step in plan.steps if step.op.kind == kind), None)
    if first is None:
        return claim(True, reason)
    return claim(False, reason, got=f"{first.title} is a {kind}", operator=first.index)

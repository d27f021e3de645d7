"""The rule of plans without a contraction."""

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
        """No operator is a contraction."""
        found = [step.index for step in plan.steps if step.op.kind != "elementwise"]
        yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
        first = found[0] if found else None
        met = None if first is None else plan[first].op.name
        yield claim(first is None, Reason.CONTRACTION_IN_POINTWISE, got=met, operator=first)

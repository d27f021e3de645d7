"""The rule around one operator with statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason, claim


class NormalizationRule:
    """One normalization and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> normalization -> elementwise*, each reading and writing memory, the normalization
    once more for each of its reductions
    after:  prologue -> reductions, as often as there are; then prologue -> element formula -> epilogue
    saves:  writing and reading again, once each, the result of every operator but the last
    """

    name: ClassVar[str] = "normalization"

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """Exactly one operator is a normalization, and none a contraction."""
        found = [step.index for step in plan.steps if step.op.kind == "normalization"]
        yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
        yield claim(bool(found), Reason.NO_NORMALIZATION)
        second = found[1] if len(found) > 1 else None
        met = " and ".join(f"{plan[index].op.name} at {index}" for index in found[:2])
        yield claim(second is None, Reason.SEVERAL_NORMALIZATIONS, got=met, operator=second)
        yield without_contraction(plan)


def without_contraction(plan: FusionPlan) -> Claim:
    """That a plan with a normalization has no contraction, or the other way round."""
    kinds = [step.op.kind for step in plan.steps]
    if not {"contraction", "normalization"} <= set(kinds):
        return claim(True, Reason.CONTRACTION_AND_NORMALIZATION)
    both = [plan[kinds.index(kind)] for kind in ("contraction", "normalization")]
    met = " and ".join(f"{step.op.name} at {step.index}" for step in both)
    return claim(False, Reason.CONTRACTION_AND_NORMALIZATION, got=met, operator=both[1].index)

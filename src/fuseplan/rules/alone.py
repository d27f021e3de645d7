"""What a rule around one operator asks of a plan: that the operator is there, and alone."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.plan import FusionPlan, Step
from fuseplan.reasons import Claim, Reason, claim


def alone(plan: FusionPlan, kind: str, none: Reason, several: Reason) -> Iterator[Claim]:
    """Exactly one operator is of the kind, and the plan has no contraction beside a normalization.

    Args:
        plan: the plan.
        kind: the operator's: `contraction` or `normalization`.
        none: the reason where there is none.
        several: the reason where there are more; the second is to blame.
    """
    found = [step for step in plan.steps if step.op.kind == kind]
    yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
    yield claim(bool(found), none)
    yield _none_after_the_first(found, several)
    first = {step.op.kind: step for step in reversed(plan.steps)}
    both = [first[each] for each in ("contraction", "normalization") if each in first]
    yield _none_after_the_first(both, Reason.CONTRACTION_AND_NORMALIZATION)


def _none_after_the_first(steps: list[Step], reason: Reason) -> Claim:
    met = " and ".join(f"{step.op.name} at {step.index}" for step in steps[:2])
    second = steps[1].index if len(steps) > 1 else None
    return claim(second is None, reason, got=met, operator=second)

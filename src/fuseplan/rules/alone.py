"""The conditions of a rule around one operator: the plan has that operator, and no second one."""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason, claim

SEVERAL = {
    frozenset({"contraction"}): Reason.SEVERAL_CONTRACTIONS,
    frozenset({"normalization"}): Reason.SEVERAL_NORMALIZATIONS,
    frozenset({"contraction", "normalization"}): Reason.CONTRACTION_AND_NORMALIZATION,
}


def alone(plan: FusionPlan, kind: str, none: Reason) -> Iterator[Claim]:
    """The plan has one operator of the kind, and no other contraction or normalization.

    The second of several is to blame: the operators in front of it are one kernel.

    Args:
        plan: the plan.
        kind: the operator's: `contraction` or `normalization`.
        none: the reason where there is none.
    """
    found = [step for step in plan.steps if step.op.kind in ("contraction", "normalization")]
    yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
    yield claim(any(step.op.kind == kind for step in found), none)
    first_two = found[:2]
    kinds = frozenset(step.op.kind for step in first_two)
    met = " comes after ".join(step.title for step in reversed(first_two))
    second = first_two[1].index if len(first_two) > 1 else None
    for several, reason in SEVERAL.items():
        yield claim(second is None or kinds != several, reason, got=met, operator=second)
    parted = next((step for step in plan if step.op.has_parts), None)
    behind = max((each.index for each in (parted, *first_two) if each), default=None)
    title = parted.title if parted else None
    yield claim(parted is None, Reason.PARTS_BESIDE, got=title, operator=behind)

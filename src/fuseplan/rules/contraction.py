"""The rule around one convolution or matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.rules.normalization import without_contraction


class ContractionRule:
    """One contraction and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> contraction -> elementwise*, each reading and writing memory
    after:  prologue -> contraction -> epilogue; the prologue is applied as src is read, the epilogue in
    registers
    saves:  writing and reading again, once each, the result of every operator but the last
    """

    name: ClassVar[str] = "contraction"

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """Exactly one operator is a contraction, and none a normalization."""
        found = [step.index for step in plan.steps if step.op.kind == "contraction"]
        yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
        yield claim(bool(found), Reason.NO_CONTRACTION)
        second = found[1] if len(found) > 1 else None
        met = " and ".join(f"{plan[index].op.name} at {index}" for index in found[:2])
        yield claim(second is None, Reason.SEVERAL_CONTRACTIONS, got=met, operator=second)
        yield without_contraction(plan)

"""The rule around one convolution or matrix product."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason
from fuseplan.rules.alone import alone


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
        return alone(plan, "contraction", Reason.NO_CONTRACTION)

"""The rule around one operator with statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason
from fuseplan.rules.alone import alone


class NormalizationRule:
    """One normalization and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> normalization -> elementwise*, each reading and writing memory, the normalization
    once more for each of its reductions
    after:  prologue -> reductions, as often as there are; then prologue -> element formula -> epilogue
    saves:  writing and reading again, once each, the result of every operator but the last
    """

    name: ClassVar[str] = "normalization"

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """Exactly one operator has statistics, and none is a contraction."""
        return alone(plan, "normalization", Reason.NO_NORMALIZATION)

"""What a fusion rule declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim


class Rule(Protocol):
    """Which plans are one kernel; the docstring gives what is before and after, and what that saves."""

    name: ClassVar[str]

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """What must hold for the rule to apply; the first claim that fails is its refusal."""

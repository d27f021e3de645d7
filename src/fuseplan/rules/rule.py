"""The protocol of fusion rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Protocol

from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim


class Rule(Protocol):
    """A rule that makes one kernel of a plan; its docstring has lines `before:`, `after:` and `saves:`."""

    name: ClassVar[str]

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """The claims under which the rule applies; the first that fails becomes its refusal."""

"""Plans to measure or to tune, with the names that tables give them."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.plans.plan import FusionPlan

PLANS = "plans"  # the suite of a plan that is given by its text


@dataclass(frozen=True)
class Case:
    """A plan.

    Attributes:
        group: the cases that it is averaged with.
        model: the network that it comes from.
        gradients: `src` and operands, with spaces between them, whose gradients are measured in the place of
            the plan's results; "" for none.
    """

    name: str
    plan: str
    group: str = "all"
    model: str = ""
    gradients: str = ""


@dataclass(frozen=True)
class Cases:
    """A named list of cases."""

    name: str
    title: str
    cases: tuple[Case, ...]

    @property
    def file(self) -> str:
        """The name of the file that takes its results."""
        return self.name


def of_plan(text: str) -> Cases:
    """One plan by its text; a PlanError where the text is no plan."""
    plan = str(FusionPlan.parse(text))
    return Cases(PLANS, plan, (Case(text, plan, PLANS, PLANS),))

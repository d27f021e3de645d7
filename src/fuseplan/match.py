"""The first stage: the rule that makes one kernel of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from fuseplan.errors import Unsupported
from fuseplan.op import Op
from fuseplan.plan import FusionPlan, as_plan
from fuseplan.reasons import Refusal, first_refusal
from fuseplan.rules import RULES
from fuseplan.step import Step


@dataclass(frozen=True)
class Match:
    """A plan's steps and the rule that fuses them.

    Attributes:
        rule: its name.
        steps: all of the plan's.
        refusals: one of each rule that was tried before it.
    """

    rule: str
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {' -> '.join(step.op.name for step in self.steps)}"

    def to_json(self) -> dict[str, object]:
        """The match as JSON values."""
        return {
            "rule": self.rule,
            "steps": [step.op.name for step in self.steps],
            "passed_over": [refusal.to_json() for refusal in self.refusals],
        }

    def to_dot(self) -> str:
        """The plan in Graphviz's language, with a frame around the operators of the kernel."""
        from fuseplan.dot import dot_text

        return dot_text(self.steps[0].src, self.steps, f"one kernel: {self.rule}")


def match(plan: FusionPlan) -> Match:
    """The first rule of RULES whose conditions hold for the plan.

    Raises:
        Unsupported: no rule applies; the error carries the refusal of each.
    """
    refusals: list[Refusal] = []
    for rule in RULES:
        refusal = first_refusal(rule.conditions(plan), rule.name)
        if refusal is None:
            return Match(rule.name, plan.steps, tuple(refusals))
        refusals.append(refusal)
    refusals.sort(key=lambda refusal: -refusal.held)  # the rule that got furthest comes first
    raise Unsupported("no rule makes this plan one kernel", text=str(plan), refusals=refusals)


def unfuse(plan: FusionPlan | str) -> tuple[FusionPlan, ...]:
    """The same operators one at a time: a plan of each, on the result of the operator before.

    Args:
        plan: the plan, or its text.

    Raises:
        PlanError: the text is no plan.
        ArgumentError: `plan` is neither a plan nor a text.
    """
    return tuple(FusionPlan(step.src, alone(step.op)) for step in as_plan(plan))


def alone(op: Op) -> Op:
    """The operator with tensors as operands, where it reads earlier values of its plan."""
    return replace(cast(Any, op), **dict.fromkeys(op.again)) if op.again else op

"""All plans that were tried for one operator of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fuseplan.errors import ArgumentError, counted, near_miss
from fuseplan.graph.cut import Attempt, Cut
from fuseplan.reports.books import named, origins
from fuseplan.reports.report import Printed


@dataclass(frozen=True)
class AttemptRow:
    """A plan that was tried.

    Attributes:
        operators: names of the framework's operators that it would compute.
        plan: its text; empty where no run of operators says what they compute.
        is_site: whether the plan is one of the model's.
        code: why it is none; of a site, why it goes no further.
        sentence: the cause.
        got: the value, operator or plan to blame.
        refusals: of the rules and templates, the nearest miss first: the code and the text of each.
    """

    operators: tuple[str, ...]
    plan: str
    is_site: bool
    code: str
    sentence: str
    got: str
    refusals: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tried(Printed):
    """The attempts at an operator of the framework, in order.

    Attributes:
        name: of the operator.
        kind: of the operator: `Conv`.
        values: the graph's lines for it.
        attempts: the plans.
        left: why it is in none; empty where it is in one, or where it is a view.
    """

    name: str
    kind: str
    values: tuple[str, ...]
    attempts: tuple[AttemptRow, ...]
    left: str

    def lines(self) -> Iterator[str]:
        yield f"{self.name} ({self.kind}): {counted(len(self.attempts), 'attempt')}"
        yield from (f"  {line}" for line in self.values)
        for number, attempt in enumerate(self.attempts, 1):
            yield ""
            yield f"{number}. {attempt.plan or 'no plan'}"
            yield f"    of {', '.join(attempt.operators)}"
            if attempt.is_site:
                yield f"    a site, which ends here: {attempt.sentence}: {attempt.got}  [{attempt.code}]"
            elif not attempt.refusals:
                yield f"    {attempt.sentence}: {attempt.got}  [{attempt.code}]"
            yield from (f"    {text}  [{code}]" for code, text in attempt.refusals)
        if self.left:
            yield ""
            yield f"left: {self.left}"


def tried(cut: Cut, name: str) -> Tried:
    """The attempts at an operator.

    Args:
        name: of the framework's operator, as the report has it.

    Raises:
        ArgumentError: the graph has no operator of this name, or it folds.
    """
    known = {origin.name: (origin, nodes) for origin, nodes in origins(cut.graph).items()}
    if name not in known:
        if any(origin.name == name for origin in cut.graph.folded):
            raise ArgumentError(f"{name} is computed before the model runs, or taken away: no plan is tried")
        hint = near_miss(name, list(known)) or "The report lists all"
        raise ArgumentError(f"the model has no operator named {name!r}. {hint}")
    origin, nodes = known[name]
    attempts = (each for each in cut.tried if any(named(node) == origin for node in each.nodes))
    reasons = dict.fromkeys(
        f"{reason}  [{reason.code}]" for node in nodes if (reason := cut.reason(node)) is not None
    )
    lines = (f"{', '.join(node.outputs)} = {node.op.text}({', '.join(node.inputs)})" for node in nodes)
    return Tried(name, origin.kind, tuple(lines), tuple(_rows(attempts)), "; ".join(reasons))


def _rows(attempts: Iterable[Attempt]) -> Iterator[AttemptRow]:
    for each in attempts:
        names = dict.fromkeys(named(node).name for node in each.nodes)
        reason = each.reason
        refusals = tuple((refusal.code, f"{refusal.tried}: {refusal}") for refusal in reason.refusals)
        told = reason.code, reason.sentence, reason.got
        yield AttemptRow(tuple(names), each.plan, each.is_site, *told, refusals)

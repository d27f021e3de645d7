"""The report on a cut graph: a row for each operator of the framework, its plans, and what runs in all."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fuseplan.errors import counted
from fuseplan.graph.find import Cut
from fuseplan.graph.node import Node, Origin, told
from fuseplan.graph.ops import VIEWS
from fuseplan.graph.place import Call, Compute, Copy, Launch, Placement
from fuseplan.graph.why import Reason

SCHEMA = "fuseplan.report/1"
SHOWN = 6  # names in a line; the others are counted


@dataclass(frozen=True)
class Row:
    """What became of an operator of the framework.

    Attributes:
        origin: its name and kind there.
        state: `fused` (a plan's kernel computes it), `folded` (computed before the model runs, or taken
            away), `view` (the same elements), or `left`.
        sites: numbers of the plans that compute it; several where it is several operators of ours.
        reason: why it is left.
    """

    origin: Origin
    state: str
    sites: tuple[int, ...] = ()
    reason: Reason | None = None

    def to_json(self) -> dict[str, object]:
        """The row as JSON values."""
        reason = {"code": self.reason.code, "got": self.reason.got} if self.reason else None
        return {**self.origin._asdict(), "state": self.state, "sites": self.sites, "reason": reason}


@dataclass(frozen=True)
class Report:
    """The closed books of a model: each of its operators in one row, and each launch counted.

    Attributes:
        cut: the graph and its plans.
        rows: one for each operator of the framework.
        before: how many operators the framework runs: all that are no views and do not fold.
        kernels: launches of our kernels.
        by_numpy: operators that NumPy runs.
        copies: values that are copied because their reader takes them in another layout, or in our memory.
        by_library: operators that other libraries run, by what runs them.
    """

    cut: Cut
    rows: tuple[Row, ...]
    kernels: int
    by_numpy: int
    copies: int
    by_library: Mapping[str, int]

    @property
    def before(self) -> int:
        """How many operators the framework runs: those that are no views and do not fold."""
        return sum(row.state in ("fused", "left") for row in self.rows)

    @property
    def after(self) -> int:
        """How many things run: kernels, operators, copies."""
        return self.kernels + self.by_numpy + self.copies + sum(self.by_library.values())

    def left(self) -> dict[str, list[Row]]:
        """The operators in no plan, by the code of their reason, the most frequent first."""
        found: dict[str, list[Row]] = collections.defaultdict(list)
        for row in self.rows:
            if row.reason is not None:
                found[row.reason.code].append(row)
        return dict(sorted(found.items(), key=lambda each: -len(each[1])))

    def to_json(self) -> dict[str, object]:
        """The report as JSON values; `schema` names their meaning."""
        sites = [
            {
                "plan": str(site.plan),
                "template": str(site.records.choice),
                "operators": list(dict.fromkeys(_name(node) for node in site.nodes)),
                "ended": {"code": site.ended.code, "got": site.ended.got},
            }
            for site in self.cut.sites
        ]
        after = {"kernels": self.kernels, "numpy": self.by_numpy, "copies": self.copies}
        return {
            "schema": SCHEMA,
            "launches": {"before": self.before, "after": {**after, "libraries": dict(self.by_library)}},
            "sites": sites,
            "operators": [row.to_json() for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        states = collections.Counter(row.state for row in self.rows)
        told_states = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"{counted(len(self.rows), 'operator')}: {told_states}"
        libraries = "".join(f", {count} by {name}" for name, count in self.by_library.items())
        yield (
            f"launches: {self.before} before; {self.after} after: {counted(self.kernels, 'kernel')}, "
            f"{self.by_numpy} by NumPy{libraries}, {self.copies} by copies"
        )
        yield ""
        yield "plans"
        for text, names in self._plans().items():
            yield f"  {len(names)} x {text}"
            yield f"      {_listed(names)}"
        if self.left():
            yield ""
            yield "in no plan"
        for code, rows in self.left().items():
            yield from _reason_lines(code, rows)
        yield ""
        yield "plans end"
        for code, ends in self._ends().items():
            yield f"  {len(ends)} x {code}: {ends[0].why.sentence}"
            yield f"      {_listed([each.got for each in ends])}"

    def _plans(self) -> dict[str, list[str]]:
        """The first operators of equal plans, by the plan's text."""
        found: dict[str, list[str]] = {}
        for site in self.cut.sites:
            found.setdefault(str(site.plan), []).append(_name(site.nodes[0]))
        return found

    def _ends(self) -> dict[str, list[Reason]]:
        found: dict[str, list[Reason]] = collections.defaultdict(list)
        for site in self.cut.sites:
            found[site.ended.code].append(site.ended)
        return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def _reason_lines(code: str, rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0].reason
    assert first is not None  # by the caller
    yield f"  {len(rows)} x {code}: {first.why.sentence}"
    yield f"      {_listed([f'{row.origin.name} ({row.origin.kind})' for row in rows])}"
    yield f"      {first.why.remedy}"


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _name(node: Node) -> str:
    return node.origin.name or told(node)


def report(placement: Placement, ran: Mapping[int, str] | None = None) -> Report:
    """The report on the steps of a run.

    Args:
        placement: the steps.
        ran: what runs the operators of another library, by the identity of the first of each run; without it,
            the library's word stands for it.
    """
    libraries: collections.Counter[str] = collections.Counter()
    for step in placement.steps:
        if isinstance(step, Call):
            nodes = step.unit.nodes
            libraries[(ran or {}).get(id(nodes[0]), step.unit.library)] += len(nodes)
    kinds = collections.Counter(type(step) for step in placement.steps)
    rows = tuple(_rows(placement.cut))
    return Report(placement.cut, rows, kinds[Launch], kinds[Compute], kinds[Copy], dict(libraries))


def _rows(cut: Cut) -> Iterator[Row]:
    """A row for each origin: of its nodes, or folded."""
    yield from (Row(origin, "folded") for origin in cut.graph.folded)
    numbers = {id(node): number for number, site in enumerate(cut.sites, 1) for node in site.nodes}
    nodes: dict[Origin, list[Node]] = {}
    for node in cut.graph.nodes:
        origin = node.origin if node.origin.kind else Origin(next(filter(None, node.outputs)), node.op.word)
        nodes.setdefault(origin, []).append(node)
    for origin, listed in nodes.items():
        left = [node for node in listed if id(node) in cut.left]
        sites = tuple(dict.fromkeys(numbers[id(node)] for node in listed if id(node) in numbers))
        if left:
            yield Row(origin, "left", sites, cut.left[id(left[0])])
        elif all(isinstance(node.op, VIEWS) for node in listed):
            yield Row(origin, "view")
        else:
            yield Row(origin, "fused", sites)

"""The books of a cut graph: each operator of the framework in one row, each launch and each byte counted."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fuseplan.execution.stages import Records
from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.memory import Buffer
from fuseplan.graph.node import Node, Origin, told
from fuseplan.graph.ops import VIEWS
from fuseplan.graph.place import Call, Compute, Copy, Launch, Placed, Placement, Step, inputs_of
from fuseplan.graph.schedule import unit_of
from fuseplan.graph.why import Reason
from fuseplan.kernels.target import Target
from fuseplan.reports.report import (
    CopyRow,
    Launches,
    MeasuredRow,
    OperatorRow,
    ReasonRow,
    Report,
    RevertedRow,
    SiteRow,
)
from fuseplan.system.gathering import gathered


def books(
    cut: Cut,
    target: Target | str,
    *,
    libraries: Mapping[str, int],
    numpy: int = 0,
    copies: Sequence[CopyRow] = (),
    views: Collection[str] = (),
    kept: Collection[str] = (),
) -> Report:
    """The report on a cut graph, each of whose sites is one launch.

    Args:
        libraries: how many operators other libraries run, by what runs them.
        numpy: how many operators NumPy runs.
        copies: values that are copied between steps.
        views: names of other libraries' operators that give the same elements, in no launch.
        kept: names of those whose results are kept from one call to the next.
    """
    whole = origins(cut.graph)
    numbers = _numbers(cut)
    rows = [OperatorRow(*origin, "folded", (), (), 0, 0) for origin in cut.graph.folded]
    rows += [_row(cut, numbers, origin, nodes) for origin, nodes in whole.items()]
    rows = [_still(row) if row.state == "left" and row.name in views else row for row in rows]
    running = [row for row in rows if row.state in ("fused", "left")]
    rows = [_still(row, "folded") if row.state == "left" and row.name in kept else row for row in rows]
    if len({row.name for row in rows}) != len(rows):
        raise AssertionError("an operator is in two rows of the report")
    moved = {row.name: row.moved for row in rows}
    sites = tuple(_site(cut, number, site, moved) for number, site in enumerate(cut.sites, 1))
    left = [row for row in rows if row.state == "left"]
    blamed = {origin.name: reason for origin, nodes in whole.items() if (reason := _reason(cut, nodes))}
    launches = Launches(len(running), len(sites), numpy, len(copies), dict(libraries))
    moved_after = sum(row.moved for row in left) + sum(each.moved for each in copies)
    return Report(
        str(target),
        launches,
        sum(row.moved for row in running),
        moved_after + sum(site.after for site in sites),
        tuple(rows),
        sites,
        _reasons((blamed[row.name], row.between, row.kind, row.name) for row in left),
        _reasons(
            (site.ended, row.between, row.got, row.operators[-1])
            for site, row in zip(cut.sites, sites, strict=True)
        ),
        tuple(copies),
        tuple(_reverted(site, {row.name: row for row in rows}) for site in cut.reverted),
    )


def origins(graph: Graph) -> dict[Origin, list[Node]]:
    """The nodes of each operator of the framework; a node without one stands for itself."""
    return gathered((named(node), node) for node in graph.nodes)


def moved_by(graph: Graph, nodes: Sequence[Node]) -> tuple[int, int]:
    """Bytes that nodes read and write together, and those of values that other nodes make or read."""
    unit = unit_of(graph, tuple(nodes))
    between = [name for name in unit.reads if name in graph.made_by]
    between += [name for name in unit.writes if name not in graph.outputs]
    return _bytes(graph, [*unit.reads, *unit.writes]), _bytes(graph, between)


def _bytes(graph: Graph, names: Iterable[str]) -> int:
    """Bytes of values; of unknown shapes, none."""
    types = (graph.types[name] for name in names)
    return sum(made.nbytes for made in types if made.shape is not None)


def named(node: Node) -> Origin:
    """The operator of the framework that a node stands for; itself where it stands for none."""
    return node.origin if node.origin.kind else Origin(next(filter(None, node.outputs)), node.op.word)


def _numbers(cut: Cut) -> dict[int, tuple[int, ...]]:
    """The sites that compute each node, by its identity: of a join in place, those that write its parts."""
    found: dict[int, tuple[int, ...]] = {}
    for number, site in enumerate(cut.sites, 1):
        joins = [cut.graph.made_by[site.into.value]] if site.into else []
        for node in (*site.nodes, *joins):
            found[id(node)] = (*found.get(id(node), ()), number)
    return found


def _row(
    cut: Cut, numbers: Mapping[int, tuple[int, ...]], origin: Origin, nodes: Sequence[Node]
) -> OperatorRow:
    """The row of an operator: left where any of its nodes is."""
    sites = tuple(dict.fromkeys(number for node in nodes for number in numbers.get(id(node), ())))
    row = OperatorRow(*origin, "fused", sites, _read(cut.graph, origin, nodes), *moved_by(cut.graph, nodes))
    reason = _reason(cut, nodes)
    if reason is not None:
        return replace(row, state="left", code=reason.code, got=reason.got)
    rest = [node for node in nodes if id(node) not in numbers]
    if not all(isinstance(node.op, VIEWS) for node in rest):
        raise AssertionError(f"{told(rest[0])} is in no row of the report")
    return _still(row) if all(isinstance(node.op, VIEWS) for node in nodes) else row


def _read(graph: Graph, origin: Origin, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The names of other operators that make what an operator reads."""
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    makers = dict.fromkeys(named(graph.made_by[name]).name for name in read if name in graph.made_by)
    return tuple(name for name in makers if name != origin.name)


def _still(row: OperatorRow, state: str = "view") -> OperatorRow:
    return replace(row, state=state, moved=0, between=0, code="", got="")


def _site(cut: Cut, number: int, site: Site, moved: Mapping[str, int]) -> SiteRow:
    graph, target = cut.graph, site.records.target
    template = site.built.choice.template
    whose = list(dict.fromkeys(named(node) for node in site.nodes))
    waiting = 2 * _bytes(graph, [name for name in site.results if name not in graph.outputs])
    return SiteRow(
        number,
        str(site.plan),
        template.text,
        tuple(each.name for each in whose),
        tuple(dict.fromkeys(each.line for each in whose if each.line)),
        sum(moved[each.name] for each in whose),
        template.traffic(site.kernel, target).total,
        template.seconds(site.kernel, target),
        site.ended.code,
        site.ended.got,
        waiting,
        _measured(site),
        site.rules,
        str(site.opened.plan) if isinstance(site.opened, Records) else "",
        f"{site.opened.code}: {site.opened}" if isinstance(site.opened, Reason) else "",
        f"{site.apart.code}: {site.apart}" if site.apart else "",
    )


def _reverted(site: Site, rows: Mapping[str, OperatorRow]) -> RevertedRow:
    whose = tuple(dict.fromkeys(named(node).name for node in site.nodes))
    told = next(((row.code, row.got) for name in whose if (row := rows[name]).code), ("", ""))
    return RevertedRow(str(site.plan), whose, *told, _measured(site))


def _measured(site: Site) -> MeasuredRow | None:
    found = site.measured
    if found is None:
        return None
    ours, own = found.seconds.get(found.plan), found.seconds.get(found.peer)
    errors = found.error, found.peer_error, found.allowed
    said = "" if found.code else found.said  # else the reason's
    return MeasuredRow(found.peer, ours, own, *errors, found.disturbance or "", said)


def _reason(cut: Cut, nodes: Sequence[Node]) -> Reason | None:
    return next((reason for node in nodes if (reason := cut.reason(node)) is not None), None)


def _reasons(cases: Iterable[tuple[Reason, int, str, str]]) -> tuple[ReasonRow, ...]:
    """Each distinct reason once, with its cases by what they blame; those of the most bytes first."""
    found: dict[str, ReasonRow] = {}
    for reason, between, blamed, name in cases:
        row = found.get(reason.code) or ReasonRow(reason.code, reason.sentence, reason.remedy, 0, {})
        cases_of = {**row.cases, blamed: (*row.cases.get(blamed, ()), name)}
        found[reason.code] = replace(row, between=row.between + between, cases=cases_of)
    return tuple(sorted(found.values(), key=lambda row: (-row.between, -row.count)))


def report_of(placement: Placement, target: Target | str, ran: Mapping[int, str] | None = None) -> Report:
    """The report on the steps of a run.

    Args:
        ran: what runs the operators of another library, by the identity of the node; without it,
            the library's word stands for it.
    """
    libraries: collections.Counter[str] = collections.Counter()
    for step in placement.steps:
        if isinstance(step, Call):
            libraries.update((ran or {}).get(id(node), step.unit.library) for node in step.unit.nodes)
    by_numpy = sum(isinstance(step, Compute) and not _is_copy(step) for step in placement.steps)
    copies = tuple(_copies(placement))
    return books(placement.cut, target, numpy=by_numpy, libraries=libraries, copies=copies)


def _copies(placement: Placement) -> Iterator[CopyRow]:
    """Copies between steps, and views of elements that do not lie so."""
    for index, step in enumerate(placement.steps):
        if not _is_copy(step) or not isinstance(step, Copy | Compute) or step.dst is None:
            continue
        buffer = step.dst.buffer
        value = step.value if isinstance(step, Copy) else step.node.outputs[0]
        readers = (each for each in placement.steps[index + 1 :] if _reads(each, buffer))
        nbytes = 2 * math.prod(buffer.shape) * buffer.dtype.itemsize
        yield CopyRow(value, nbytes, next(map(_told, readers), "the outputs"))


def _is_copy(step: Step) -> bool:
    """Whether a step gives the same elements: a copy, or a view whose elements do not lie so."""
    is_view = isinstance(step, Compute) and isinstance(step.node.op, VIEWS) and step.dst is not None
    return isinstance(step, Copy) or is_view


def _reads(step: Step, buffer: Buffer) -> bool:
    return any(isinstance(each, Placed) and each.buffer is buffer for each in inputs_of(step))


def _told(step: Step) -> str:
    if isinstance(step, Launch):
        return str(step.site.plan)
    if isinstance(step, Copy):
        return f"a copy of {step.value}"
    return told(step.node if isinstance(step, Compute) else step.unit.nodes[0])

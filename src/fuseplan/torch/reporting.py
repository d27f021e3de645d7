"""The report on a graph of torch's with plans in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import fx

from fuseplan.graph.ops import VIEWS
from fuseplan.graph.why import Reason, Why
from fuseplan.reports.books import books
from fuseplan.reports.report import CopyRow, Report
from fuseplan.torch.cutting import Fusion
from fuseplan.torch.kernels import target_of
from fuseplan.torch.lying import first, is_copied, joined, laid_out
from fuseplan.torch.operator import launched


def report_of(fusion: Fusion, device: torch.device, kept: Collection[str] = ()) -> Report:
    """The report on a graph that runs on a device; `kept` names operators whose results calls keep."""
    called = [node for node in fusion.module.graph.nodes if node.op == "call_function"]
    own = {node.name for node in called if not is_view(node)} - {*kept}
    views = {node.name for node in fusion.given.nodes if is_view(node)}
    copies = tuple(_copies(fusion.module.graph))
    target, _ = target_of(device)
    inside = {id(node) for site in fusion.cut.sites for node in site.nodes}
    copying = {  # what is a view of plans, such as `repeat_interleave`, where torch runs it
        id(node): Reason(Why.NO_PLAN, node.origin.kind)
        for node in fusion.cut.graph.nodes
        if isinstance(node.op, VIEWS) and node.origin.name in own and id(node) not in inside
    }
    cut = replace(fusion.cut, left={**copying, **fusion.cut.left})
    return books(
        cut, target, libraries={"torch": len(own)} if own else {}, copies=copies, views=views, kept=kept
    )


def is_view(node: fx.Node) -> bool:
    """Whether torch's operator gives the same elements, in no launch."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.target, torch._ops.OpOverload) or isinstance(node.meta.get("val"), torch.SymInt):
        return True  # of Python, such as getitem, or of ours; or it reads an extent
    return any(each.alias_info is not None for each in node.target._schema.returns)


def _copies(graph: fx.Graph) -> Iterator[CopyRow]:
    """Values that are laid out in another order before a plan reads them, or behind one, or are joined."""
    for node in graph.nodes:
        if node.target is joined:
            others = (part for part in node.args[0] if part.target is not first)
            yield from (CopyRow(part.name, 2 * part.meta["val"].nbytes, node.name) for part in others)
        if node.target is laid_out and is_copied(node):
            value, reader = node.args[0], next(iter(node.users))
            told = reader.args[0] if reader.target is launched else reader.name
            yield CopyRow(value.name, 2 * value.meta["val"].nbytes, str(told))


def trace(report: Callable[[], Report]) -> None:
    """Gives a report to torch's structured trace, where that is turned on (`TORCH_TRACE`)."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fuseplan_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(report().to_json()),
        expect_trace_id=False,  # outside of torch.compile, torch would import Inductor to tell where from
    )

"""Values that lie in one: the results of plans as ranges of the value that joins them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from fuseplan.errors import PlanError, Unsupported
from fuseplan.execution.stages import Records
from fuseplan.graph.cut import Range, Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.layouts import strides_of
from fuseplan.graph.ops import Concat
from fuseplan.graph.why import Reason
from fuseplan.language.layouts import same_strides
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.ranges import Within
from fuseplan.plans.plan import FusionPlan

_LARGE = 1 << 14  # elements of an image whose copy takes longer than a launch
_COPIED = 0.9e-9  # seconds: NumPy lays an element of an image in another order
Decide = Callable[[FusionPlan], Records | Unsupported]


def as_given(graph: Graph, site: Site, decided: Decide, last: Collection[str]) -> Site:
    """The site, or that whose plan reads an input of the graph channels first and writes channels last.

    A copy of an image of 3 channels took 120 to 250 us of a run; kernels that copy src do both at once.

    Args:
        last: values that lie channels last already.
    """
    src, out = site.plan.src, site.plan.output
    is_first = site.src in graph.inputs and site.src not in last and len(graph.readers[site.src]) == 1
    if not is_first or out.layout is None or src.layout is None or not src.has_channel_names:
        return site
    if src.rank < 3 or src.size // src.batch < _LARGE or site.beside or src.open_axes:
        return site
    try:
        plan = FusionPlan(TensorSpec(src.shape, src.dtype), *site.plan.ops, Within(out.channels, out.layout))
    except PlanError:
        return site
    records = decided(plan)
    if isinstance(records, Unsupported) or plan.output != out:
        return site
    if records.choice.seconds > site.records.choice.seconds + _COPIED * src.size:
        return site
    return replace(site, plan=plan, records=records)


def in_place(graph: Graph, site: Site, decided: Decide) -> Site:
    """The site, or that whose plan writes its result into the value that joins it with others.

    Nothing else reads the result then, and the plan writes ranges of a tensor that lies so.
    """
    readers = graph.readers[site.dst]
    joins = [each for each in readers if isinstance(each.op, Concat)]
    if len(readers) != 1 or not joins or site.dst in graph.outputs:
        return site
    (node,) = joins
    made, op = graph.types[node.outputs[0]], node.op
    assert isinstance(op, Concat)  # by the choice
    output, shape = site.plan.output, made.shape or ()
    is_whole = (
        (made.is_spec or made.is_quantized) and output.rank == made.rank and node.inputs.count(site.dst) == 1
    )
    if not is_whole or output.channel_axis != op.axis:
        return site
    try:
        plan = FusionPlan(site.plan.src, *site.plan.ops, Within(shape[op.axis]))
    except PlanError:
        return site
    records = decided(plan)
    if isinstance(records, Unsupported) or not same_strides(
        output.shape, plan.output.element_strides, strides_of(made)
    ):
        return site
    before = node.inputs[: node.inputs.index(site.dst)]
    first = sum((graph.types[name].shape or ())[op.axis] for name in before)
    return replace(
        site,
        plan=plan,
        records=records,
        into=Range(node.outputs[0], op.axis, first, first + output.channels),
        others=tuple(partial(_form, graph, form, decided) for form in site.others),
    )


def _form(graph: Graph, form: Callable[[], Site | Reason], decided: Decide) -> Site | Reason:
    """The other form of a site, in place likewise."""
    found = form()
    return in_place(graph, found, decided) if isinstance(found, Site) else found

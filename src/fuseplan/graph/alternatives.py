"""Other plans for the same operators: on tensors as the framework has them, with exact factors, or apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from fuseplan.errors import Unsupported
from fuseplan.execution.stages import Records
from fuseplan.graph.cut import Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Slice
from fuseplan.graph.type import FLOATS
from fuseplan.graph.why import Reason
from fuseplan.graph.write import Stage
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.activation import Identity
from fuseplan.plans.plan import FusionPlan

OnSrc = Callable[[TensorSpec], Site | Reason]
AS_FAST = 1.05  # of a plan's estimated time: another is as fast


def as_it_lies(
    graph: Graph,
    last: Collection[str],
    is_apart: Callable[[Node], bool],
    claimed: set[int],
    decided: Callable[[FusionPlan], Records | Unsupported],
    site: Site,
    on: OnSrc | None,
) -> Site:
    """The site, or that on tensors with channels first, where this takes less time than copies of them.

    Between plans tensors lie channels last. A plan that stands alone may read and write them as the
    framework has them.

    Args:
        last: values that lie so in the framework.
        is_apart: whether the framework computes a node that is in no plan.
        claimed: the nodes that are in plans, by their numbers.
        decided: what the stages make of a plan.
        site: its tensors lie channels last.
        on: the site for another src; None where there is no other.
    """
    src, dst = site.plan.src, site.plan.output
    if on is None or site.into or not {src.dtype, dst.dtype} <= {*FLOATS} or not src.is_channels_last:
        return site  # indices and integers lie as they do
    if src.rank < 3 or not src.has_channel_names:
        return site  # its last axis has the channels: they lie last in the framework too
    around = [*_readers(graph, site.dst), *(maker for name in site.reads for maker in _makers(graph, name))]
    if not all(is_apart(node) and id(node) not in claimed for node in around):
        return site
    moved = [src] if site.src not in last else []
    moved += [dst] if site.dst in graph.outputs and site.dst not in last else []
    copies = [decided(FusionPlan(each, Identity())) for each in moved]
    own = {id(node) for node in site.nodes}
    claimed -= own  # the same nodes are to be found once more
    other = on(TensorSpec(src.shape, src.dtype))
    claimed |= own
    known = [each for each in copies if not isinstance(each, Unsupported)]
    if isinstance(other, Reason) or other.nodes != site.nodes or not known:
        return site
    copied = sum(each.choice.seconds for each in known)
    return other if other.records.choice.seconds < site.records.choice.seconds + copied else site


def exact(layer: Layer, on: Callable[[Layer, TensorSpec], Site | Reason], src: TensorSpec) -> Site | Reason:
    """The site of a layer and its region, or that whose factors are not rounded to TF32, if as fast.

    Where it takes longer, it is one of the site's others, for a framework that does not round.

    Args:
        layer: the layer.
        on: the site for a layer and src.
        src: its tensor.
    """
    site = on(layer, src)
    if isinstance(site, Reason) or getattr(layer.op, "precision", "full") == "full":
        return site
    other = on(Layer(replace(cast(Any, layer.op), precision="full")), src)
    if isinstance(other, Reason):
        return site
    if other.records.choice.seconds <= AS_FAST * site.records.choice.seconds:
        return other
    return replace(site, others=(*site.others, lambda: other))


def faster(one: Site | Reason, other: Site | Reason) -> Site | Reason:
    """The site that is estimated to take less time: the first, if as much; a reason where neither is one."""
    if isinstance(one, Reason) or isinstance(other, Reason):
        return other if isinstance(one, Reason) else one
    return one if one.records.choice.seconds <= other.records.choice.seconds else other


def _readers(graph: Graph, name: str) -> Iterator[Node]:
    """What reads a value, or a range of it."""
    for node in graph.readers[name]:
        yield from _readers(graph, node.outputs[0]) if isinstance(node.op, Slice) else (node,)


def _makers(graph: Graph, name: str) -> Iterator[Node]:
    """What makes a value, or that of which it is a range; nothing makes an input."""
    maker = graph.made_by.get(name)
    if maker is not None:
        yield from _makers(graph, maker.inputs[0]) if isinstance(maker.op, Slice) else (maker,)


def seconds_of(
    src: TensorSpec, plans: Sequence[Sequence[Stage]], decided: Callable[[FusionPlan], Records | Unsupported]
) -> float:
    """The time of plans, of which those without a product read what the one before makes."""
    seconds, made = 0.0, src
    for stages in plans:
        plan = FusionPlan(made if stages[0].op.kind == "elementwise" else src, *(each.op for each in stages))
        records, made = decided(plan), plan.output
        seconds += math.inf if isinstance(records, Unsupported) else records.choice.seconds
    return seconds

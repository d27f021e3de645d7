"""How tensors of plans lie in a graph."""

from __future__ import annotations

from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Permute
from fuseplan.graph.type import Type
from fuseplan.language.layouts import LAYOUTS, channel_names, dense, order_of


def layout_for(graph: Graph, node: Node, layer: Layer, src: Type) -> str | None:
    """How src of a contraction, of statistics or of attention lies: see `layout_of`.

    Heads lie as the projection in front of them left them, inside of the queries, where there is one.
    """
    if layer.op.kind == "attention":
        maker = graph.made_by.get(node.inputs[0])
        is_turned = maker is not None and maker.op == Permute((0, 2, 1, 3))
        return "bshc of bhsc" if is_turned else "bhsc"
    return LAYOUTS[src.rank][-1] if layer.op.reads == "channels" else layout_of(src)


def layout_of(made: Type) -> str | None:
    """How a value lies: channels last where the operator that made it names channels, else in its order."""
    is_image = made.shape is not None and made.rank in LAYOUTS and made.names == channel_names(made.rank)
    return LAYOUTS[made.rank][-1] if is_image else None


def strides_of(made: Type) -> tuple[int, ...]:
    """The strides of a value of a graph that lies dense, as `layout_of` says."""
    layout = layout_of(made)
    return dense(made.shape or (), order_of(layout, made.names) if layout else range(made.rank))

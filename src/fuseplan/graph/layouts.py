"""How tensors of plans lie in a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.memory import Buffer
from fuseplan.graph.node import Node
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import VIEWS, Foreign, Permute, Slice
from fuseplan.graph.type import Type, bits_of
from fuseplan.language.layouts import LAYOUTS, ROWS, channel_names, dense, order_of
from fuseplan.language.tensor import TensorSpec


def layout_for(graph: Graph, name: str, layer: Layer, src: Type) -> str | None:
    """How src of a contraction, of statistics or of attention lies, if it is like a value: see `layout_of`.

    Heads lie as the projection in front of them left them, inside of the queries, where there is one.
    """
    if layer.op.kind == "attention":
        maker = graph.made_by.get(name)
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


def strides_in(graph: Graph, name: str) -> tuple[int, ...] | None:
    """The strides of a range of a value that the graph makes, or of a view of one; else None."""
    views: list[GraphOp] = []
    maker = graph.made_by.get(name)
    while maker is not None and isinstance(maker.op, VIEWS):
        views.insert(0, maker.op)
        name = maker.inputs[0]
        maker = graph.made_by.get(name)
    is_range = any(isinstance(op, Slice) for op in views)
    if maker is None or isinstance(maker.op, Foreign) or not is_range or 0 in (graph.types[name].shape or ()):
        return None
    made = graph.types[name]
    memory = Buffer(made.shape or (), strides_of(made), bits_of(made.dtype), 0, 0).alone()
    array = memory
    for op in views:
        (array,) = op.evaluate([array])
    is_view = np.may_share_memory(array, memory) and 0 not in (*array.shape, *array.strides)
    return tuple(step // array.itemsize for step in array.strides) if is_view else None


def readings(graph: Graph, name: str, nodes: Sequence[Node]) -> Iterator[TensorSpec]:
    """What nodes read, with each axis that may be its channels, named as what they read beside it."""
    made = graph.types[name]
    shape, types = made.shape or (), [graph.types[each] for node in nodes for each in node.inputs]
    named = (each for each in types if each.names and each.shape == shape and not made.names)
    made = next(named, made)
    if made.names == channel_names(len(shape)) and len(shape) > 2:
        yield TensorSpec(shape, made.dtype, LAYOUTS[len(shape)][-1])
        return
    yield TensorSpec(shape, made.dtype, made.names or ROWS[len(shape)])
    if not made.names and len(shape) > 2:
        yield TensorSpec(shape, made.dtype, channel_names(len(shape)))

"""Padding in front of a window, as the window's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Pad
from fuseplan.language.reduction import JOINS
from fuseplan.ops.conv import Conv
from fuseplan.ops.pool import AvgPool, Pool

Anchor = tuple[Node, Layer, tuple[Node, ...]]  # a layer, its operator, and the nodes that it stands for


def anchors(graph: Graph, node: Node) -> Iterator[Anchor]:
    """A layer with the padding in front of it as its own, if that can be; then the layer as it is."""
    assert isinstance(node.op, Layer)  # by the caller
    inner = _unpadded(graph, node, node.op)
    if inner is not None:
        yield inner
    yield node, node.op, (node,)


def _unpadded(graph: Graph, node: Node, layer: Layer) -> Anchor | None:
    """A convolution or pool of the tensor without its padding, and the nodes that it stands for.

    None where nothing is padded before it, other operators read the padded tensor too, or its elements are
    others than the window takes for padding.
    """
    maker = graph.made_by.get(node.inputs[0])
    op = layer.op
    if maker is None or not isinstance(maker.op, Pad) or not isinstance(op, Conv | Pool):
        return None
    (name,) = maker.outputs
    is_own = name not in graph.outputs and len(graph.readers[name]) == 1
    if not is_own or maker.op.value != _fill_of(op) or any(map(any, maker.op.padding[:2])):
        return None
    inner = op.window(layer.src([graph.types[each] for each in node.inputs])).padding
    outer = maker.op.padding[2:]
    sides = tuple((low + more, high + most) for (low, high), (more, most) in zip(inner, outer, strict=True))
    made = Layer(replace(op, padding=sides))
    return Node(made, (maker.inputs[0], *node.inputs[1:]), node.outputs, node.origin), made, (maker, node)


def _fill_of(op: Conv | Pool) -> float | None:
    """The elements that the operator's own padding stands for; None for a window that no padding serves."""
    if isinstance(op, Conv):
        return 0.0
    if op.ceil_mode or (isinstance(op, AvgPool) and not op.count_include_pad):
        return None
    return JOINS[op.join]

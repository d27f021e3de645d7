"""Products of rows: what a framework writes with its first axes as one, between two views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Reshape
from fuseplan.graph.type import Type
from fuseplan.ops.affine import Bias
from fuseplan.ops.matmul import Product


def with_axes(graph: Graph) -> Graph:
    """The graph whose products have the axes of the tensors around such views: plans go on behind them.

    The views count as taken away; one that others read too stays. A view in front that joins more than rows,
    such as heads, gives the product's axes in their place.
    """
    made, gone = dict[int, Node](), dict[int, Node]()
    for nodes, before, after in _between_views(graph):
        src, rows, dst = (
            graph.types[each].shape or () for each in (before.inputs[0], nodes[0].inputs[0], after.outputs[0])
        )
        is_rows = src[:-1] == dst[:-1] and src[-1:] == rows[-1:]
        whole = before.inputs[0] if is_rows else before.outputs[0]
        if not is_rows and _reader(graph, before) is not nodes[0]:
            continue
        names = [whole, *(node.outputs[0] for node in nodes[:-1]), after.outputs[0]]
        for node, read, written in zip(nodes, names, names[1:], strict=False):
            made[id(node)] = replace(node, inputs=(read, *node.inputs[1:]), outputs=(written,))
        gone[id(after)] = after
        if not is_rows:
            made[id(before)] = replace(before, op=Reshape((*dst[:-1], *rows[-1:])))
            continue
        readers = [each for each in graph.readers[before.outputs[0]] if id(each) not in made]
        if not readers and before.outputs[0] not in graph.outputs:
            gone[id(before)] = before
    if not made:
        return graph
    nodes = [made.get(id(node), node) for node in graph.nodes if id(node) not in gone]
    folded = [*graph.folded, *(node.origin for node in gone.values() if node.origin.kind)]
    return Graph(graph.inputs, nodes, graph.outputs, graph.constants, folded, graph.stored)


def _between_views(graph: Graph) -> Iterator[tuple[list[Node], Node, Node]]:
    """Products, each with its bias, and the views before and behind."""
    for node in graph.nodes:
        op, before = node.op, graph.made_by.get(node.inputs[0]) if node.inputs else None
        is_product = isinstance(op, Layer) and isinstance(op.op, Product) and not op.op.batched
        if not is_product or before is None or not isinstance(before.op, Reshape):
            continue
        nodes, after = [node], _reader(graph, node)
        if after is not None and isinstance(after.op, Layer) and isinstance(after.op.op, Bias):
            nodes, after = [node, after], _reader(graph, after)
        if after is None or not isinstance(after.op, Reshape):
            continue
        if _is_between(*(graph.types[each] for each in (node.inputs[0], node.outputs[0], after.outputs[0]))):
            yield nodes, before, after


def _is_between(rows: Type, made: Type, dst: Type) -> bool:
    """Whether a product of rows has the elements of a tensor of more axes, the features its last."""
    is_like = (dst.shape or ())[-1:] == (made.shape or ())[-1:]
    return rows.rank == 2 and dst.rank > 2 and dst.is_spec and is_like


def _reader(graph: Graph, node: Node) -> Node | None:
    """The only reader of a node's value."""
    name = node.outputs[0]
    readers = graph.readers[name] if name not in graph.outputs else []
    return readers[0] if len(readers) == 1 and readers[0].inputs[0] == name else None

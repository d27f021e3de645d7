"""The formulas of a graph's nodes: what an element of the result is, of which elements of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fuseplan.errors import PlanError
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import LEAVES, Map
from fuseplan.op import Elementwise
from fuseplan.scalar import REBUILD, Scalar, const, fold, indices_of, leaf

Axes = tuple[int, ...]


@dataclass(frozen=True)
class Formula:
    """An element of a node's result.

    Attributes:
        expression: over leaves named as the values; constants of one element are numbers in it.
        axes: for each leaf, the axes of the result along which the value has more than one element.
        op: the operator of plans that says it, and None for a formula of the graph.
    """

    expression: Scalar
    axes: Mapping[str, Axes]
    op: Elementwise | None = None


def formula_of(graph: Graph, node: Node) -> Formula | None:
    """The formula of a node; None where it has none."""
    if isinstance(node.op, Map):
        return _of_map(graph, node, node.op)
    if isinstance(node.op, Layer) and isinstance(node.op.op, Elementwise):
        return _of_layer(graph, node, node.op, node.op.op)
    return None


def _of_map(graph: Graph, node: Node, op: Map) -> Formula | None:
    shape = graph.types[node.outputs[0]].shape or ()
    axes = {name: trailing(graph.types[name].shape or (), shape) for name in node.inputs}
    try:
        meanings = {letter: _leaf(graph, name) for letter, name in zip(LEAVES, node.inputs, strict=False)}
        return Formula(fold(op.expression, meanings, REBUILD), axes)
    except PlanError:
        return None  # a constant is NaN, or the formula too large for a kernel


def _of_layer(graph: Graph, node: Node, layer: Layer, op: Elementwise) -> Formula | None:
    if indices_of(op.formula()):
        return None  # a formula is of any shape, an index of the operator's
    given = [graph.types[name] for name in node.inputs]
    src = layer.src(given)
    axes = {node.inputs[0]: spread(src.shape, range(src.rank))}
    operands = {each.name: each for each in op.operands(src)}
    meanings = {"x": _leaf(graph, node.inputs[0])}
    for key, name in zip(layer.keys, node.inputs[1:], strict=True):
        found = spread(src.shape, operands[key].axes)
        if axes.setdefault(name, found) != found:
            return None  # one value stands for two operands of different axes
        meanings[key] = leaf(name)
    meanings |= {each.name: const(each.value) for each in op.parameters()}
    return Formula(fold(op.formula(), meanings, REBUILD), axes, op)


def _leaf(graph: Graph, name: str) -> Scalar:
    """A value as a leaf; a constant of one element as a number."""
    array = graph.constants.get(name)
    return leaf(name) if array is None or array.size != 1 else const(float(array.reshape(())))


def trailing(shape: tuple[int, ...], whole: tuple[int, ...]) -> Axes:
    """The axes of `whole` along which a tensor that lines up at the last axis has more than one element."""
    skipped = len(whole) - len(shape)
    return tuple(skipped + axis for axis, extent in enumerate(shape) if extent > 1)


def spread(shape: tuple[int, ...], axes: tuple[int, ...] | range) -> Axes:
    """Those of the axes along which a tensor of the shape has more than one element."""
    return tuple(axis for axis in axes if shape[axis] > 1)

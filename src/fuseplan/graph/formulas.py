"""The formulas of a graph's nodes: what an element of the result is, of which elements of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import LEAVES, Convert, Map
from fuseplan.graph.type import Type
from fuseplan.op import Elementwise
from fuseplan.scalar import REBUILD, Scalar, call, const, fold, indices_of, leaf

Axes = tuple[int, ...]
# The second argument with which a function gives the first, each bit of it: x + 0 makes +0 of -0.
NEUTRAL = {"add": const(-0.0), "sub": const(0.0), "mul": const(1.0), "div": const(1.0), "pow": const(1.0)}


def _exact(fn: str, x: Scalar, y: Scalar) -> Scalar:
    """A function of two expressions; one of them, where the other changes nothing."""
    if y == NEUTRAL[fn]:
        return x
    return y if fn in ("add", "mul") and x == NEUTRAL[fn] else call(fn, x, y)


def _chosen(condition: Scalar, true: Scalar, false: Scalar) -> Scalar:
    """A choice; where it asks whether a choice between 1 and 0 is 1, one by the comparison of that choice."""
    inner = condition.args[0] if condition.fn == "gt" and condition.args[1] == const(0.0) else condition
    if inner.fn == "where" and inner.args[1:] == (const(1.0), const(0.0)):
        condition = inner.args[0]
    return call("where", condition, true, false)


# Formulas in the place of others' leaves; and where besides a leaf may be a number that changes nothing.
JOINED: dict[str, Callable[..., Scalar]] = {**REBUILD, "where": _chosen}
EXACT: dict[str, Callable[..., Scalar]] = {**REBUILD, **{fn: partial(_exact, fn) for fn in NEUTRAL}}


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
    """The formula of a node of the graph; None where it has none."""
    known: dict[int, Formula | None] = graph.formulas
    if id(node) not in known:
        known[id(node)] = _formula(graph, node)
    return known[id(node)]


def _formula(graph: Graph, node: Node) -> Formula | None:
    if isinstance(node.op, Map):
        return _of_map(graph, node, node.op)
    if isinstance(node.op, Convert):
        (name,), rank = node.inputs, graph.types[node.inputs[0]].rank
        return Formula(leaf(name), {name: spread(graph.types[name].shape or (), range(rank))})
    if isinstance(node.op, Layer) and isinstance(node.op.op, Elementwise):
        return _of_layer(graph, node, node.op, node.op.op)
    return None


def _of_map(graph: Graph, node: Node, op: Map) -> Formula | None:
    shape = graph.types[node.outputs[0]].shape or ()
    axes = {name: trailing(graph.types[name].shape or (), shape) for name in node.inputs}
    try:
        meanings = {
            letter: _leaf(graph.constants, name) for letter, name in zip(LEAVES, node.inputs, strict=False)
        }
        return Formula(fold(op.expression, meanings, EXACT), axes)
    except PlanError:
        return None


def unchanged(
    op: Map, inputs: Sequence[str], types: Sequence[Type], constants: Mapping[str, Any]
) -> str | None:
    """The input that a formula gives as it is, each bit of it; None where it gives another value.

    Args:
        constants: arrays by name; those of one element are numbers in the formula.
    """
    try:
        expression = _read(op, inputs, constants)
    except PlanError:
        return None
    name = str(expression.args[0]) if expression.fn == "leaf" else None
    (made,) = op.infer(types)
    is_same = name in inputs and types[inputs.index(name)].shape == made.shape
    return name if is_same else None


def _read(op: Map, inputs: Sequence[str], constants: Mapping[str, Any]) -> Scalar:
    """The formula over leaves named as the inputs.

    Raises:
        PlanError: a constant is NaN, or the formula too large for a kernel.
    """
    meanings = {letter: _leaf(constants, name) for letter, name in zip(LEAVES, inputs, strict=False)}
    return fold(op.expression, meanings, EXACT)


def _of_layer(graph: Graph, node: Node, layer: Layer, op: Elementwise) -> Formula | None:
    if indices_of(op.formula()):
        return None  # a formula is of any shape, an index of the operator's
    given = [graph.types[name] for name in node.inputs]
    src = layer.src(given)
    axes = {node.inputs[0]: spread(src.shape, range(src.rank))}
    operands = {each.name: each for each in op.operands(src)}
    meanings = {"x": _leaf(graph.constants, node.inputs[0])}
    for key, name in zip(layer.keys, node.inputs[1:], strict=True):
        found = spread(src.shape, operands[key].axes)
        if axes.setdefault(name, found) != found:
            return None  # one value stands for two operands of different axes
        meanings[key] = leaf(name)
    meanings |= {each.name: const(each.value) for each in op.parameters()}
    return Formula(fold(op.formula(), meanings, REBUILD), axes, op)


def _leaf(constants: Mapping[str, Any], name: str) -> Scalar:
    """A value as a leaf; a constant of one element as a number."""
    array = constants.get(name)
    return leaf(name) if array is None or array.size != 1 else const(float(array.reshape(())))


def trailing(shape: tuple[int, ...], whole: tuple[int, ...]) -> Axes:
    """The axes of `whole` along which a tensor that lines up at the last axis has more than one element."""
    skipped = len(whole) - len(shape)
    return tuple(skipped + axis for axis, extent in enumerate(shape) if extent > 1)


def spread(shape: tuple[int, ...], axes: tuple[int, ...] | range) -> Axes:
    """Those of the axes along which a tensor of the shape has more than one element."""
    return tuple(axis for axis in axes if shape[axis] > 1)

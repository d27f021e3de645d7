"""Normalizations of rows that a model spells in pieces: means, differences, squares, roots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.graph.formulas import formula_of
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Reduce, Reshape
from fuseplan.op import Op
from fuseplan.ops.normalization import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from fuseplan.ops.reductions import Mean
from fuseplan.scalar import REBUILD, Scalar, const, fold, leaf, leaves_of

V = leaf("variance")  # the mean of squares, while the factor of a row is composed


@dataclass(frozen=True)
class Spelled:
    """A normalization in pieces.

    Attributes:
        op: the operator of plans, without operands.
        nodes: the pieces, in order.
        src, dst: what they normalize, and their result.
    """

    op: Op
    nodes: tuple[Node, ...]
    src: str
    dst: str


def spelled(graph: Graph, node: Node) -> Spelled | None:
    """The normalization whose mean of squares is a node's; of groups, which a model spells by reshaping.

    None where the node is neither.
    """
    found = _spelled(graph, node)
    if found is not None:
        return _in_groups(graph, found) or found
    is_whole = isinstance(node.op, Layer) and isinstance(node.op.op, InstanceNorm | LayerNorm)
    if not is_whole or len(node.inputs) > 1:
        return None
    assert isinstance(node.op, Layer)  # as above
    return _in_groups(graph, Spelled(node.op.op, (node,), node.inputs[0], node.outputs[0]))


def _in_groups(graph: Graph, found: Spelled) -> Spelled | None:
    """The group norm that a norm of (n, groups, rest) is, between reshapes from and to (n, c, places)."""
    before, readers = graph.made_by.get(found.src), graph.readers[found.dst]
    if before is None or len(readers) != 1 or not isinstance(found.op, InstanceNorm | LayerNorm):
        return None
    (back,) = readers
    nodes = (before, *found.nodes, back)
    src, groups, dst = (graph.types[name] for name in (before.inputs[0], found.src, back.outputs[0]))
    is_between = isinstance(before.op, Reshape) and isinstance(back.op, Reshape) and src.shape == dst.shape
    inside = [name for name in (found.src, found.dst) if graph.leaves(name, nodes)]
    if not is_between or inside or not src.is_spec or src.shape is None or groups.shape is None:
        return None
    is_group = src.rank > 1 and groups.rank == 3 and groups.shape[0] == src.shape[0]
    if not is_group or src.shape[1] % groups.shape[1]:
        return None
    op = GroupNorm(groups.shape[1], affine=False, epsilon=found.op.epsilon)
    return Spelled(op, nodes, before.inputs[0], back.outputs[0])


def _spelled(graph: Graph, node: Node) -> Spelled | None:
    """The normalization whose mean of squares is a node's; None where the node is no such mean.

    It is (x - mean(x)) times or x times 1/sqrt(mean(squares) + epsilon), the factor in any of its spellings.
    No piece is read elsewhere.
    """
    squares = _mean_of(graph, node)
    square = graph.made_by.get(squares or "")
    base = _squared(graph, square)
    if square is None or base is None:
        return None
    centring = _centring(graph, base)
    before = (*centring, square, node)
    after, factor = _factor(graph, node.outputs[0])
    found = _applied(graph, after[-1], base) if after else None
    epsilon = _epsilon(factor, is_divisor=found == "div") if found else None
    if epsilon is None:
        return None
    nodes = in_order(graph, (*before, *after))
    dst = after[-1].outputs[0]
    if any(graph.leaves(name, nodes) for each in nodes for name in each.outputs if name != dst):
        return None
    src = centring[0].inputs[0] if centring else base
    make = LayerNorm if centring else RmsNorm
    return Spelled(make(affine=False, epsilon=epsilon), nodes, src, dst)


def _mean_of(graph: Graph, node: Node | None) -> str | None:
    """The value of which a node is the mean of each row, with an axis of extent 1 left."""
    if node is None or not isinstance(node.op, Layer | Reduce):
        return None
    made = graph.types[node.inputs[0]]
    if isinstance(node.op, Reduce):
        is_mean = node.op == Reduce("mean", (made.rank - 1,))
    else:
        op = node.op.op
        is_mean = isinstance(op, Mean) and op.keepdim and op.over(made.spec()) == (made.rank - 1,)
    return node.inputs[0] if is_mean and made.is_spec else None


def expression_of(graph: Graph, node: Node | None) -> Scalar | None:
    """The expression of a node over the names of values; None where it has none."""
    formula = None if node is None else formula_of(graph, node)
    return None if formula is None else formula.expression


def _squared(graph: Graph, node: Node | None) -> str | None:
    """The value whose square a node is."""
    found = expression_of(graph, node)
    if node is None or found is None:
        return None
    base = leaf(node.inputs[0])
    return node.inputs[0] if found in (base * base, base**2) else None


def _centring(graph: Graph, name: str) -> tuple[Node, ...]:
    """The mean of rows and the difference from it that a value is; nothing where it is another value."""
    node = graph.made_by.get(name)
    found = expression_of(graph, node)
    if node is None or found is None or found.fn != "sub" or len(node.inputs) != 2:
        return ()
    src, mean = node.inputs
    maker = graph.made_by.get(mean)
    is_mean = maker is not None and found == leaf(src) - leaf(mean) and _mean_of(graph, maker) == src
    return (maker, node) if is_mean and maker is not None else ()


def _factor(graph: Graph, name: str) -> tuple[tuple[Node, ...], Scalar]:
    """The formulas of a row's number behind a mean of squares, with the first of whole rows; the number."""
    row, nodes, made = graph.types[name].shape, list[Node](), V
    while len(graph.readers[name]) == 1:
        (reader,) = graph.readers[name]
        found = expression_of(graph, reader)
        if found is None:
            break
        nodes.append(reader)
        if graph.types[reader.outputs[0]].shape != row:
            return tuple(nodes), made
        if leaves_of(found) != {name}:
            break
        made, name = fold(found, {name: made}, REBUILD), reader.outputs[0]
    return (), made


def _applied(graph: Graph, node: Node, base: str) -> str | None:
    """Whether a node multiplies the value by a row's number, or divides it: `mul` or `div`."""
    found = expression_of(graph, node)
    others = [name for name in node.inputs if name != base]
    if found is None or len(node.inputs) != 2 or len(others) != 1 or found.fn not in ("mul", "div"):
        return None
    is_in_order = found == Scalar(found.fn, (leaf(base), leaf(others[0])))
    is_turned = found == leaf(others[0]) * leaf(base)
    return found.fn if is_in_order or is_turned else None


def _epsilon(factor: Scalar, *, is_divisor: bool) -> float | None:
    """The summand of a row's number that is 1/sqrt(V + epsilon), or as a divisor sqrt(V + epsilon)."""
    root = factor if is_divisor else _inverted(factor)
    if root is None:
        return None
    inner = root.args[0] if root.fn == "sqrt" or root == root.args[0] ** 0.5 else None
    if inner is None or inner.fn != "add" or V not in inner.args:
        return None
    (summand,) = [each for each in inner.args if each != V] or [V]
    return float(summand.args[0]) if summand.fn == "const" and summand.args[0] >= 0 else None


def _inverted(factor: Scalar) -> Scalar | None:
    """The expression whose inverse a factor is."""
    if factor.fn == "div" and factor.args[0] == const(1):
        found: Scalar = factor.args[1]
        return found
    if factor.fn == "pow" and factor.args[1].fn == "const":
        power = {-0.5: 0.5, -1.0: 1.0}.get(factor.args[1].args[0])
        return None if power is None else factor.args[0] if power == 1 else factor.args[0] ** power
    return None


def in_order(graph: Graph, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """Some nodes in the order of the graph, each once."""
    inside = {graph.places[id(node)] for node in nodes if id(node) in graph.places}
    return tuple(graph.nodes[place] for place in sorted(inside))

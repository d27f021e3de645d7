"""Rotary position embedding as models spell it: x times cos, and its exchanged halves times sin."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fuseplan.graph.formulas import Axes, formula_of, trailing
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.layouts import strides_in
from fuseplan.graph.node import Node
from fuseplan.graph.norms import expression_of, in_order, spelled
from fuseplan.graph.ops import Concat, Permute, Slice
from fuseplan.graph.pads import Anchor
from fuseplan.graph.region import Region, regions
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.parts import Rotary
from fuseplan.scalar import REBUILD, Scalar, const, fold, leaf, leaves_of

TURN = Permute((0, 2, 1, 3))  # heads and positions
NONE = Node(Slice(0, 0, 0), ("",), ())  # stands for the maker of an input


@dataclass(frozen=True)
class Rotation:
    """A rotation in pieces.

    Attributes:
        op: the operator of plans.
        nodes: the pieces, in order.
        src, dst: the value that is turned, and the result.
        names: of src's axes.
        cos, sin: the operands.
    """

    op: Rotary
    nodes: tuple[Node, ...]
    src: str
    dst: str
    names: str
    cos: str
    sin: str


def rotation(graph: Graph, node: Node) -> Rotation | None:
    """The rotation whose exchanged halves a node joins, one of them negated; None where it is none.

    It is x * cos + halves * sin in any order, where cos and sin have a number for each position and element,
    and perhaps for each image. No piece is read elsewhere.
    """
    if not isinstance(node.op, Concat) or len(node.inputs) != 2:
        return None
    name = node.outputs[0]
    made, ends = graph.types[name], [_half(graph, each) for each in node.inputs]
    half = (made.shape or (0,))[-1] // 2
    ranges = [Slice(made.rank - 1, half, 2 * half), Slice(made.rank - 1, 0, half)]
    if made.rank != 4 or not made.is_spec or [each.op for each, *_ in ends] != ranges:
        return None
    (first, *before), (second, *after) = ends
    src = first.inputs[0]
    if second.inputs[0] != src or graph.types[src].shape != made.shape or len(before) == len(after):
        return None
    inner, total = _summed(graph, name, src)
    terms = _terms(total)
    (cos, cosine), (sin, sine) = (_factor(terms, each) for each in (src, name))
    if len(terms) != 2 or cosine != 1 or not sine or cos == sin:
        return None
    axes = [trailing(graph.types[each].shape or (), made.shape or ()) for each in (cos, sin)]
    order = _order(axes, made.shape or ())
    if order is None:
        return None
    nodes = (first, second, *before, *after, node, *inner)
    dst = inner[-1].outputs[0]
    if any(graph.leaves(each, nodes) for piece in nodes for each in piece.outputs if each != dst):
        return None
    op = Rotary(inverse=(len(before) == 0) != (sine < 0), batched=0 in axes[0], whole=True)
    return Rotation(op, in_order(graph, nodes), src, dst, order, cos, sin)


def readings(graph: Graph, found: Rotation) -> Iterator[TensorSpec]:
    """How a plan may read the value: as a range of another one, else as a projection left it."""
    made, strides = graph.types[found.src], strides_in(graph, found.src)
    if strides:
        yield TensorSpec(made.shape or (), made.dtype, strides=strides, names=found.names)
    is_turned = found.names == "bhsd" and graph.made_by.get(found.src, NONE).op == TURN
    yield TensorSpec(made.shape or (), made.dtype, "bshd of bhsd" if is_turned else found.names)


def normed(graph: Graph, found: Rotation) -> str | None:
    """The value, positions before heads, whose heads the rotation alone reads; None where there is none."""
    maker = graph.made_by.get(found.src, NONE)
    if found.names != "bhsd" or maker.op != TURN:
        return None
    (inner,) = maker.inputs
    is_read = graph.leaves(inner, (maker,)) or graph.leaves(found.src, found.nodes)
    return None if is_read else inner


def ended_norms(graph: Graph, claimed: Collection[int]) -> dict[str, tuple[Anchor, Region]]:
    """Norms in pieces, each with the formulas behind it, by the values that these end with."""
    anchors = (
        (Node(Layer(found.op), (found.src,), (found.dst,)), Layer(found.op), found.nodes)
        for found in filter(None, (spelled(graph, node) for node in graph.nodes))
    )
    return {
        region.head: (anchor, region)
        for anchor in anchors
        for region in regions(graph, anchor[0].outputs[0], claimed, is_inside=True)
    }


def _half(graph: Graph, name: str) -> tuple[Node, ...]:
    """The range of a value that a value is, and the node that negates it, where one does."""
    maker = graph.made_by.get(name, NONE)
    found = expression_of(graph, maker)
    if found is not None and found in (-leaf(maker.inputs[0]), leaf(maker.inputs[0]) * const(-1)):
        return graph.made_by.get(maker.inputs[0], NONE), maker
    return (maker,)


def _summed(graph: Graph, halves: str, src: str) -> tuple[list[Node], Scalar]:
    """The formulas of the halves and src up to the first sum, and it over values."""
    nodes, name = list[Node](), halves
    while len(graph.readers[name]) == 1 and len(nodes) < 2:
        (reader,) = graph.readers[name]
        formula = formula_of(graph, reader)
        if formula is None:
            break
        made, inner = formula.expression, list[Node]()
        for each in reader.inputs:
            maker = graph.made_by.get(each, NONE)
            found = expression_of(graph, maker)
            if found is not None and {src, halves} & {*maker.inputs} and each not in (src, halves):
                made = fold(made, {**{other: leaf(other) for other in leaves_of(made)}, each: found}, REBUILD)
                inner.append(maker)
        name = reader.outputs[0]
        if made.fn in ("add", "sub"):
            return [*inner, reader], made
        nodes.append(reader)
    return [], leaf(src)


def _terms(total: Scalar) -> list[tuple[int, list[str]]]:
    """The sign and the factors of each summand; none where a summand is no product of two values."""
    if total.fn in ("add", "sub"):
        left, right = map(_terms, total.args)
        sign = -1 if total.fn == "sub" else 1
        return [*left, *((sign * each, names) for each, names in right)] if left and right else []
    is_product = total.fn == "mul" and all(each.fn == "leaf" for each in total.args)
    return [(1, [str(each.args[0]) for each in total.args])] if is_product else []


def _factor(terms: list[tuple[int, list[str]]], name: str) -> tuple[str, int]:
    """What a value is multiplied with in the only summand that has it, and the summand's sign."""
    found = [(sign, names) for sign, names in terms if name in names]
    if len(found) != 1 or found[0][1].count(name) != 1:
        return "", 0
    ((sign, names),) = found
    return names[1 - names.index(name)], sign


def _order(axes: list[Axes], shape: tuple[int, ...]) -> str | None:
    """The names of the axes where cos and sin have positions and elements, and perhaps images."""
    for position, names in ((2, "bhsd"), (1, "bshd")):
        wanted = tuple(axis for axis in (position, 3) if shape[axis] > 1)
        images = (0, *wanted) if shape[0] > 1 else wanted
        if all(each == axes[0] for each in axes) and axes[0] in (wanted, images):
            return names
    return None

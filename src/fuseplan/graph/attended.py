"""Attention that a model spells in pieces: product, scale, mask, softmax, product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isclose, sqrt

from fuseplan.graph.attention import axes_of, own_views, placed, repeated
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.norms import expression_of, in_order, leaves
from fuseplan.graph.ops import Foreign, Permute, Reshape
from fuseplan.graph.pads import Anchor
from fuseplan.graph.type import Type
from fuseplan.ops.attention import AXES, Attention
from fuseplan.ops.reductions import Softmax
from fuseplan.scalar import Scalar, leaf

PRODUCTS = ("onnx.MatMul", "aten.matmul.default", "aten.bmm.default")
SWAPPED = ((0, 1, 3, 2), (0, 2, 1))  # orders of axes that turn keys around
Shape = tuple[int, ...]
ROUNDED = 1e-6  # relative: a scale that a model multiplies by its root twice


def spelled(graph: Graph, node: Node) -> Anchor | None:
    """The attention whose softmax is a node, and the nodes that it stands for; None where it is of none.

    It is softmax(scale * q @ k.T + mask) @ v, heads first. The scale may stand before the product, in parts.
    Heads of keys that views repeat are read once, and a constant mask that places tell is none. Rows that see
    no key are zeros, as the operator has them, where the model puts zeros in the place of NaN; without those,
    a mask has to be a constant that leaves each row a key.
    """
    if not isinstance(node.op, Layer) or not isinstance(node.op.op, Softmax):
        return None
    made = graph.types[node.inputs[0]]
    if made.rank != len(AXES) or not made.is_spec or node.op.op.over(made.spec()) != (len(AXES) - 1,):
        return None
    weighed, after = _without_nan(graph, node)
    product = _only_reader(graph, weighed)
    if product is None or not _is_product(graph, product, weighed):
        return None
    mask, scores, between = _masked(graph, node.inputs[0])
    scores, scale, scaling = _scaled(graph, scores)
    first = graph.made_by.get(scores)
    if first is None or not _is_product(graph, first, first.inputs[0]):
        return None
    query, before, scaling_query = _scaled(graph, first.inputs[0])
    turned, beside, scaling_key = _scaled(graph, first.inputs[1])
    key, turning = _turned(graph, turned)
    if key is None:
        return None
    pieces = [*scaling_query, *scaling_key, *turning, first, *scaling, *between, node, *after, product]
    names = query, key, product.inputs[1]
    whole = scale * before * beside
    return _anchor(graph, names, mask, whole, in_order(graph, pieces), has_zeros=bool(after))


def _anchor(
    graph: Graph,
    names: tuple[str, str, str],
    mask: str | None,
    scale: float,
    pieces: tuple[Node, ...],
    *,
    has_zeros: bool,
) -> Anchor | None:
    """The operator of plans that the pieces are, where its tensors are those of one attention."""
    *before, last = pieces
    inside = [each.outputs[0] for each in before if not _is_view(each)]
    if any(leaves(graph, name, pieces) for name in inside):
        return None
    query = names[0]
    key, value = (repeated(graph, name) or name for name in names[1:])
    scores = graph.types[inside[-1]]
    shapes = [graph.types[name].shape or () for name in (query, key, value)]
    op = _operator(shapes[0], shapes[1], shapes[2], scores.shape or (), scale)
    found = op and _with_mask(graph, op, mask, scores, has_zeros=has_zeros)
    if not found:
        return None
    op, masks = found
    read = ((graph.readers[name][0], name) for name in names[1:] if name not in (key, value))
    views = [view for reader, name in read for view in own_views(graph, reader, [name])]
    kept = [each for each in pieces if not _is_view(each) or not leaves(graph, each.outputs[0], pieces)]
    layer = Layer(op)
    made = Node(layer, (query, key, value, *masks), last.outputs, last.origin)
    return made, layer, in_order(graph, [*kept, *views])


def _operator(query: Shape, key: Shape, value: Shape, scores: Shape, scale: float) -> Attention | None:
    """The operator of factors and scores of these shapes; None where they are not those of one attention."""
    if not len(query) == len(key) == len(value) == len(AXES) or scale <= 0:
        return None
    batch, heads, queries, size = query
    is_one = key == (batch, key[1], scores[3], size) and value[:3] == key[:3]
    if not is_one or scores[:3] != (batch, heads, queries) or heads % key[1]:
        return None
    found = ("keys", key[2], queries), ("key_heads", key[1], heads), ("features", value[3], size)
    usual = isclose(scale * sqrt(size), 1, rel_tol=ROUNDED)
    op = Attention(scale=0.0 if usual else scale)
    return replace(op, **{name: extent for name, extent, other in found if extent != other})  # type: ignore[arg-type]


def _with_mask(
    graph: Graph, op: Attention, mask: str | None, scores: Type, *, has_zeros: bool
) -> tuple[Attention, tuple[str, ...]] | None:
    """The operator with what is added to its scores, as its places or its bias; None where it cannot be."""
    if mask is None:
        return op, ()
    made, extents = graph.types[mask], dict(zip(AXES, scores.shape or (), strict=True))
    axes = axes_of(made.shape or (), extents)
    if axes is None or made.dtype != scores.dtype:
        return None
    op = replace(op, bias_axes=axes)
    fields = placed(graph, op, mask, "bias")
    if fields is not None:
        return replace(op, bias_axes="", **fields), ()
    is_taken = has_zeros and made.shape == tuple(extents[axis] for axis in axes)
    return (op, (mask,)) if is_taken else None


def _is_view(node: Node) -> bool:
    return isinstance(node.op, Permute | Reshape)


def _only_reader(graph: Graph, name: str) -> Node | None:
    readers = graph.readers[name] if name not in graph.outputs else []
    return readers[0] if len(readers) == 1 else None


def _is_product(graph: Graph, node: Node, left: str) -> bool:
    """Whether a node is the product of two values, `left` the first."""
    is_named = isinstance(node.op, Foreign) and node.op.operator in PRODUCTS
    return is_named and node.inputs[0] == left and len(node.inputs) == 2


def _without_nan(graph: Graph, node: Node) -> tuple[str, tuple[Node, ...]]:
    """The softmax with zeros in the place of NaN, which rows have that see no key, and the nodes for that."""
    (name,) = node.outputs
    found = {each.op.operator: each for each in graph.readers[name] if isinstance(each.op, Foreign)}
    test, choice = found.get("onnx.IsNaN"), found.get("onnx.Where")
    if test is None or choice is None or len(graph.readers[name]) != 2:
        return name, ()
    zero = graph.constants.get(choice.inputs[1])
    is_zero = zero is not None and zero.size == 1 and not zero.any()
    if not is_zero or choice.inputs != (test.outputs[0], choice.inputs[1], name):
        return name, ()
    return choice.outputs[0], (test, choice)


def _masked(graph: Graph, name: str) -> tuple[str | None, str, tuple[Node, ...]]:
    """What is added to the scores, if anything; the scores, and the node that adds it."""
    node = graph.made_by.get(name)
    found = expression_of(graph, node)
    if node is None or found is None or len(node.inputs) != 2:
        return None, name, ()
    scores, mask = node.inputs
    is_sum = found in (leaf(scores) + leaf(mask), leaf(mask) + leaf(scores))
    if not is_sum:
        return None, name, ()
    maker = graph.made_by.get(scores)
    is_first = (maker is not None and mask not in graph.made_by) or scores not in graph.constants
    return (mask, scores, (node,)) if is_first else (scores, mask, (node,))


def _scaled(graph: Graph, name: str) -> tuple[str, float, tuple[Node, ...]]:
    """The value that a constant multiplies or divides, the factor, and the node that does."""
    node = graph.made_by.get(name)
    found = expression_of(graph, node)
    if node is None or found is None or found.fn not in ("mul", "div"):
        return name, 1.0, ()
    left, right = found.args
    for value, number in ((left, right), (right, left)):
        factor, is_divided = _number(graph, number), found.fn == "div"
        is_read = value.fn == "leaf" and value.args[0] in node.inputs and not (is_divided and value is right)
        if factor and is_read:
            return str(value.args[0]), 1 / factor if is_divided else factor, (node,)
    return name, 1.0, ()


def _number(graph: Graph, found: Scalar) -> float | None:
    """A number of a formula, or a constant of one element."""
    if found.fn == "const":
        return float(str(found.args[0]))
    held = graph.constants.get(str(found.args[0])) if found.fn == "leaf" else None
    return float(held.reshape(())) if held is not None and held.size == 1 else None


def _turned(graph: Graph, name: str) -> tuple[str | None, tuple[Node, ...]]:
    """The keys (b, h, t, d) or, of repeated heads, (b, h, n, t, d), that are turned into (b, h, d, t)."""
    nodes = list(_chain(graph, name))
    order = [each for each in nodes if isinstance(each.op, Permute)]
    if len(order) != 1 or order[0].op.order not in SWAPPED:  # type: ignore[attr-defined]
        return None, ()
    src = nodes[-1].inputs[0]
    whole, turned = graph.types[src].shape or (), graph.types[name].shape or ()
    is_turned = whole[-2:] == turned[:1:-1] and (whole[:2] == turned[:2] or len(whole) == len(AXES) + 1)
    return (src, tuple(nodes)) if is_turned else (None, ())


def _chain(graph: Graph, name: str) -> Iterator[Node]:
    """The views of a value, from the last on: a permutation, and a reshape on either side."""
    node = graph.made_by.get(name)
    if node is not None and isinstance(node.op, Reshape):
        yield node
        node = graph.made_by.get(node.inputs[0])
    if node is None or not isinstance(node.op, Permute):
        return
    yield node
    before = graph.made_by.get(node.inputs[0])
    if len(node.op.order) == len(AXES) - 1 and before is not None and isinstance(before.op, Reshape):
        yield before

"""Attention that a model writes out: a product of query and key, a softmax, and a product with value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph import attention
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, told
from fuseplan.graph.norms import expression_of, in_order
from fuseplan.graph.op import GraphOp, Tensor
from fuseplan.graph.ops import HIDDEN, PRODUCTS, SAFE_SOFTMAX, VIEWS, Convert, Foreign, Map, Permute, Reshape
from fuseplan.graph.pads import Anchor
from fuseplan.graph.type import Type
from fuseplan.graph.why import Reason, Why
from fuseplan.op import Op
from fuseplan.ops.attention import Attention
from fuseplan.ops.reductions import Softmax
from fuseplan.scalar import Scalar

DEPTH = 8  # formulas and views between a product and its softmax
LARGEST = 2**26  # elements of keys whose places are compared
EXACT = 2**-22  # a factor this close to 1 / sqrt(d) is it: two roots that were rounded to f32


@dataclass(frozen=True)
class _Scores:
    """Scores as a softmax reads them; nodes from the product on.

    `scale * query @ key + mask`, or with a softcap `softcap * tanh(scale * query @ key) + mask`.
    """

    product: Node
    nodes: tuple[Node, ...]
    scale: float = 1.0
    mask: str = ""
    softcap: float = 0.0

    def times(self, factor: float) -> _Scores:
        """The scores, which have no mask yet, times a factor."""
        if self.softcap:
            return replace(self, softcap=self.softcap * factor)
        return replace(self, scale=self.scale * factor)


@dataclass(frozen=True)
class _Factor:
    """A value of four axes whose elements, times a number, views and formulas make a product's factor."""

    name: str
    scale: float
    nodes: tuple[Node, ...]


@dataclass
class _Reading:
    """What `attention` adds to a graph, kept as one node: plans read a mask without its axes of extent 1."""

    graph: Graph
    made: list[Node] = field(default_factory=list)

    def type_of(self, name: str) -> Type:
        return self.graph.types[name]

    def add(self, op: Any, *inputs: str) -> str:
        return inputs[0]

    def layer(self, op: Op, *inputs: str) -> str:
        self.made.append(Node(Layer(op), inputs, ()))
        return ""


def heads_apart(nodes: Sequence[Node]) -> Iterator[Node]:
    """The nodes, with two views for one that makes turned keys (b, h, d, t) of (b, t, h, d).

    Exporters join the two: attention reads the value between them.
    """
    keys = {node.inputs[1] for node in nodes if _is_product(node)}
    for node in reversed(nodes):
        if isinstance(node.op, Map) and node.outputs[0] in keys:
            keys.update(node.inputs)
    for node in nodes:
        if isinstance(node.op, Permute) and node.op.order == (0, 2, 3, 1) and node.outputs[0] in keys:
            heads = f"{node.outputs[0]}.heads"
            yield replace(node, op=Permute((0, 2, 1, 3)), outputs=(heads,))
            yield replace(node, op=Permute((0, 1, 3, 2)), inputs=(heads,))
        else:
            yield node


def anchors(graph: Graph, node: Node) -> Iterator[Anchor] | Reason:
    """The attention that ends with a node: without a mask that places tell where it can be, then with it.

    The scores may be scaled, as a product or in its factors, and have a softcap. A mask may be added, or be
    true where a score is not replaced by minus infinity. A softmax that is NaN may be replaced by zeros, or
    be torch's safe one: NaN is that of a query that sees no key, for which attention gives zeros, or NaN as
    well. Key and value may be views of heads in any order, each of which several queries read.

    Nothing where the node is no product of a softmax; why there is none where it is.
    """
    found = _softmax(graph, node.inputs[0]) if _is_product(node) else None
    scores = None if found is None else _scores(graph, found[-1].inputs[0])
    if found is None or scores is None:
        return iter(())
    result = _result(graph, node)
    pieces = (*scores.nodes, *found, *result)
    dst = result[-1].outputs[0]
    is_guarded = any(isinstance(piece.op, Foreign) for piece in found)
    nan_unseen = bool(scores.mask) and not is_guarded and not _is_seeing(graph, scores.mask)
    outer = [name for piece in pieces for name in piece.outputs if name != dst and graph.leaves(name, pieces)]
    if outer:
        return Reason(Why.EXTERNAL_CONSUMER, f"{outer[0]} is read outside of the attention")
    query, key = scores.product.inputs
    factors = _factors(graph, query, key, node.inputs[1])
    if factors is None:
        return Reason(Why.SHAPE, f"heads of {graph.types[query]}, {graph.types[key]}")
    scale = scores.scale * math.prod(each.scale for each in factors[:2])
    dtypes = {graph.types[each].dtype for each in (*(factor.name for factor in factors), dst)}
    if len(dtypes) > 1:
        return Reason(Why.DTYPE, f"heads of {', '.join(sorted(dtypes))}")
    if factors[2].scale != 1:
        return Reason(Why.FORMULA, f"{told(node)} multiplies a value by {factors[2].scale}")
    try:
        cap = abs(scores.softcap)
        scale *= scores.softcap or 1
        op = Attention(scale=scale, softcap=cap, nan_unseen=nan_unseen)
        made = _attention(graph, [each.name for each in factors], scores.mask, op, dst)
    except PlanError as error:
        return Reason(Why.REFUSED, error.what)
    first, _, last = (graph.types[each.name].shape or () for each in factors)
    if graph.types[dst].shape != (*first[:3], last[3]):
        return Reason(Why.SHAPE, f"{dst}: {graph.types[dst]}")
    read = _own(graph, pieces, [each for factor in factors for each in factor.nodes])
    whole = in_order(graph, (*pieces, *read))
    return ((each, layer, whole) for each, layer, _ in attention.anchors(graph, made))


def _attention(graph: Graph, names: Sequence[str], mask: str, op: Attention, dst: str) -> Node:
    """The node of the operator of plans, whose scale is 0 where it is usual.

    Raises:
        PlanError: the tensors are not those of one attention, or the scale is not finite.
    """
    size = (graph.types[names[0]].shape or ())[3]
    usual = math.isclose(op.scale, 1 / math.sqrt(size), rel_tol=EXACT)
    reading = _Reading(graph)
    query, key, value = names
    attention.attention(reading, (query, key, value), mask or None, replace(op, scale=0.0) if usual else op)
    return replace(reading.made[0], outputs=(dst,))


def _is_product(node: Node | None) -> bool:
    return (
        node is not None
        and isinstance(node.op, Foreign)
        and node.op.operator in PRODUCTS
        and len(node.inputs) == 2
        and node.op.results[0].is_float
        and node.op.results[0].rank in (3, 4, 5)
    )


def _maker(graph: Graph, name: str) -> tuple[Node | None, tuple[Node, ...]]:
    """What makes a value, and the reshapes and conversions of floats between the two.

    A kernel keeps scores and their softmax in the compute dtype, whatever they are converted to.
    """
    maker, views = graph.made_by.get(name), list[Node]()
    while maker is not None and isinstance(maker.op, Reshape | Convert):
        views.insert(0, maker)
        maker = graph.made_by.get(maker.inputs[0])
    return maker, tuple(views)


def _softmax(graph: Graph, name: str) -> tuple[Node, ...] | None:
    """The softmax of keys that a value is, last; before it the nodes that put zeros in the place of NaN."""
    maker, views = _maker(graph, name)
    if maker is not None and isinstance(maker.op, Foreign) and maker.op.operator == "onnx.Where":
        condition, zero, name = maker.inputs
        nan, zeros = graph.made_by.get(condition), graph.constants.get(zero)
        is_nan = nan is not None and isinstance(nan.op, Foreign) and nan.op.operator == "onnx.IsNaN"
        if nan is None or not is_nan or nan.inputs != (name,) or zeros is None or zeros.any():
            return None
        softmax, inner = _maker(graph, name)
        views = (*views, maker, nan, *inner)
        maker = softmax
    if maker is not None and isinstance(maker.op, Foreign) and maker.op.operator == SAFE_SOFTMAX:
        return (*views, maker)
    if maker is None or not isinstance(maker.op, Layer) or not isinstance(maker.op.op, Softmax):
        return None
    spec = maker.op.src([graph.types[each] for each in maker.inputs])
    return (*views, maker) if maker.op.op.over(spec) == (spec.rank - 1,) else None


def _scores(graph: Graph, name: str, depth: int = DEPTH) -> _Scores | None:
    """The product of which a value is scores, scaled and with a mask; None where it is another value."""
    maker, views = _maker(graph, name)
    if maker is None or not depth:
        return None
    if _is_product(maker):
        return _Scores(maker, (maker, *views))
    if isinstance(maker.op, Foreign) and maker.op.operator == HIDDEN:
        found = _scores(graph, maker.inputs[0], depth - 1)
        if found is None or found.mask:
            return None
        return replace(found, nodes=(*found.nodes, maker, *views), mask=maker.inputs[1])
    expression = expression_of(graph, maker)
    for inner, factor, mask in () if expression is None else _summed(expression):
        found = _scores(graph, inner, depth - 1)
        if found is not None and not (found.mask and (mask or factor != 1)):
            made = found.times(factor)
            return replace(made, nodes=(*found.nodes, maker, *views), mask=found.mask or mask)
    inner, cap, factor = ("", 0.0, 0.0) if expression is None else _capped(expression)
    found = _scores(graph, inner, depth - 1) if inner else None
    if found is None or found.mask or found.softcap:
        return None
    return replace(found.times(factor), nodes=(*found.nodes, maker, *views), softcap=cap)


def _summed(expression: Scalar) -> Iterator[tuple[str, float, str]]:
    """A value, its factor and a summand, in each way in which an expression is such a sum."""
    name, factor = _scaled(expression)
    if name:
        yield name, factor, ""
    if expression.fn == "add":
        for first, second in (expression.args, expression.args[::-1]):
            name, factor = _scaled(first)
            if name and second.fn == "leaf":
                yield name, factor, str(second.args[0])


def _scaled(expression: Scalar) -> tuple[str, float]:
    """The value and the factor of an expression that is their product; no name where it is none."""
    inner, factor = _factored(expression)
    return (str(inner.args[0]), factor) if inner.fn == "leaf" else ("", 1.0)


def _capped(expression: Scalar) -> tuple[str, float, float]:
    """Of `cap * tanh(factor * value)` the value, the cap and the factor; no name where it is none."""
    inner, cap = _factored(expression)
    name, factor = _scaled(inner.args[0]) if inner.fn == "tanh" else ("", 1.0)
    return name, cap, factor


def _factored(expression: Scalar) -> tuple[Scalar, float]:
    """An expression without the constant that it is multiplied or divided by, and the factor."""
    if expression.fn not in ("mul", "div"):
        return expression, 1.0
    first, second = expression.args
    if expression.fn == "mul" and first.fn == "const":
        first, second = second, first
    factor = float(second.args[0]) if second.fn == "const" else 0.0
    if not factor:
        return expression, 1.0
    return first, factor if expression.fn == "mul" else 1 / factor


def _is_seeing(graph: Graph, mask: str) -> bool:
    """Whether each query is known to see a key: a softmax of nothing but minus infinity is NaN."""
    array = graph.constants.get(mask)
    if graph.types[mask].dtype == "bool":
        return array is not None and bool(array.any(-1).all())
    seen = (
        _is_above(graph, mask) if array is None else (np.asarray(array, np.float64) > -np.inf).any(-1).all()
    )
    return bool(seen)


def _is_above(graph: Graph, name: str) -> bool:
    """Whether no element can be minus infinity: of constants, views, and choices between such values."""
    array, maker = graph.constants.get(name), graph.made_by.get(name)
    if array is not None:
        return bool((np.asarray(array, np.float64) > -np.inf).all())
    if maker is not None and isinstance(maker.op, VIEWS):
        return _is_above(graph, maker.inputs[0])
    is_choice = maker is not None and isinstance(maker.op, Foreign) and maker.op.operator == "onnx.Where"
    return maker is not None and is_choice and all(_is_above(graph, each) for each in maker.inputs[1:])


def _result(graph: Graph, node: Node) -> tuple[Node, ...]:
    """The product, and behind one of three or five axes the reshape to those of images and heads."""
    readers = graph.readers[node.outputs[0]]
    is_parted = len(readers) == 1 and isinstance(readers[0].op, Reshape)
    return (node, readers[0]) if graph.types[node.outputs[0]].rank != 4 and is_parted else (node,)


def _factors(graph: Graph, query: str, key: str, value: str) -> tuple[_Factor, _Factor, _Factor] | None:
    """Query, key and value as values of (b, h, s, d), the heads of keys as few as there are."""
    first = _factor(graph, query)
    if first is None:
        return None
    batch, heads = (graph.types[first.name].shape or ())[:2]
    second = _factor(graph, key, (batch, heads), is_turned=True)
    third = _factor(graph, value, (batch, heads))
    return None if second is None or third is None else (first, second, third)


def _factor(
    graph: Graph, name: str, count: tuple[int, ...] = (), *, is_turned: bool = False
) -> _Factor | None:
    """The first value of four axes of which a product's factor is views and multiples; None without one.

    Args:
        count: images and heads of the query, of which several may read one head here; of the query, none.
        is_turned: the factor has the elements of a head in front of the keys.
    """
    *front, rows, size = graph.types[name].shape or ()
    whole, ends = (*front, rows, size), (size, rows) if is_turned else (rows, size)
    views, nodes, scale, found = list[GraphOp](), list[Node](), 1.0, None
    while True:
        shape = graph.types[name].shape or ()
        is_like = len(shape) == 4 and shape[2:] == ends and _is_like(shape, whole, count)
        if is_like and _is_same(shape, views, whole, count, is_turned):
            found = _Factor(name, scale, tuple(nodes))
        maker = graph.made_by.get(name)
        if maker is None:
            return found
        expression = expression_of(graph, maker)
        base, factor = _scaled(expression) if expression is not None else ("", 1.0)
        if isinstance(maker.op, VIEWS):
            views.insert(0, maker.op)
        elif base and graph.types[base].shape == shape:
            scale *= factor
        else:
            return found
        nodes.append(maker)
        name = base or maker.inputs[0]


def _is_like(shape: tuple[int, ...], whole: tuple[int, ...], count: tuple[int, ...]) -> bool:
    """Whether a value may have the images and heads of a factor of the shape `whole`."""
    if count:
        return shape[0] == count[0] and count[1] % shape[1] == 0
    return shape[:2] == whole[:2] if len(whole) == 4 else shape[0] * shape[1] == math.prod(whole[:-2])


def _is_same(
    shape: tuple[int, ...],
    views: Sequence[GraphOp],
    whole: tuple[int, ...],
    count: tuple[int, ...],
    is_turned: bool,
) -> bool:
    """Whether views make a factor of a value as attention reads it: the places of all elements tell."""
    size = math.prod(whole)
    if size > LARGEST or (count and math.prod(count) * math.prod(shape[2:]) != size):
        return False
    places = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    made: Tensor = places
    for op in views:
        (made,) = op.evaluate([made])
    if count:
        places = np.repeat(places, count[1] // shape[1], axis=1)
    wanted = places.swapaxes(2, 3) if is_turned else places
    return np.array_equal(made, wanted.reshape(whole))


def _own(graph: Graph, pieces: Sequence[Node], read: Sequence[Node]) -> list[Node]:
    """The nodes in front of the pieces that nothing else needs."""
    found = list(pieces)
    for node in reversed(in_order(graph, read)):
        if not any(graph.leaves(name, tuple(found)) for name in node.outputs):
            found.append(node)
    return found[len(pieces) :]

"""Attention of models as the operator of plans: what the tables of torch and ONNX share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.norms import in_order
from fuseplan.graph.ops import Expand, Reshape
from fuseplan.graph.pads import Anchor
from fuseplan.graph.type import Type
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.ops.attention import AXES, Attention

Shape = tuple[int, ...]
FEW = 4  # queries that read the same keys


class Adds(Protocol):
    """A node of a framework whose operators are being added to a graph."""

    def type_of(self, name: str) -> Type:
        """The type of a value."""

    def add(self, op: Any, *inputs: str) -> str:
        """Adds an operator."""

    def layer(self, op: Op, *inputs: str) -> str:
        """Adds an operator of plans."""


def attention(given: Adds, names: tuple[str, str, str], mask: str | None, op: Attention) -> str:
    """Adds attention of query, key and value, each (b, h, s, d), and gives its result's name.

    Args:
        mask: added to the scores, or true where a query sees a key; of axes that broadcast to (b, h, s, t).
        op: the attributes besides the extents.

    Raises:
        PlanError: the tensors are not those of one attention.
    """
    query, key, value = (given.type_of(name).shape or () for name in names)
    if not len(query) == len(key) == len(value) == 4:
        raise PlanError("attention reads query, key and value of four axes", got=f"{query}, {key}, {value}")
    wanted = (query[0], key[1], key[2])
    if key[3] != query[3] or key[0] != query[0] or value[:3] != wanted:
        raise PlanError("key and value are no factors of the query", got=f"{query}, {key}, {value}")
    found = ("keys", key[2], query[2]), ("key_heads", key[1], query[1]), ("features", value[3], query[3])
    op = replace(op, **{name: extent for name, extent, usual in found if extent != usual})  # type: ignore[arg-type]
    if mask is None:
        return given.layer(op, *names)
    made = given.type_of(mask)
    extents = dict(zip(AXES, (*query[:3], key[2]), strict=True))
    axes = _axes(made.shape or (), extents)
    if axes is None or made.dtype not in ("bool", given.type_of(names[0]).dtype):
        raise PlanError("the mask is none of these scores", got=str(made), want=str(tuple(extents.values())))
    shape = tuple(extents[axis] for axis in axes)
    held = mask if made.shape == shape else given.add(Reshape(shape), mask)
    kind = "mask_axes" if made.dtype == "bool" else "bias_axes"
    return given.layer(replace(op, **{kind: axes}), *names, held)  # type: ignore[arg-type]


def anchors(graph: Graph, node: Node) -> Iterator[Anchor]:
    """Attention that reads heads of keys once, and needs no mask for places, where it can; then as it is."""
    assert isinstance(node.op, Layer)  # by the caller
    op, names, read = node.op.op, dict(zip(("", *node.op.keys), node.inputs, strict=True)), list[str]()
    assert isinstance(op, Attention)  # by the caller
    for key in ("mask", "bias"):
        fields = _places(graph, op, names[key], key) if key in names else None
        if fields is not None:
            op = replace(op, **{f"{key}_axes": "", **fields})
            read.append(names.pop(key))
    bases = [_repeated(graph, names[key]) for key in ("key", "value")]
    heads = {(graph.types[base].shape or ())[1] for base in bases if base}
    if None not in bases and len(heads) == 1:
        op = replace(op, key_heads=heads.pop())
        read += [names["key"], names["value"]]
        names |= dict(zip(("key", "value"), map(str, bases), strict=True))
    if read:
        layer = Layer(op)
        made = Node(layer, (names[""], *(names[key] for key in layer.keys)), node.outputs, node.origin)
        yield made, layer, in_order(graph, (node, *_views(graph, node, read)))
    yield node, node.op, (node,)


def _places(graph: Graph, op: Attention, name: str, key: str) -> dict[str, Any] | None:
    """The attributes in the place of a constant mask: none where it hides nothing; None where there are none.

    A mask that is added hides what it makes the lowest number or less.
    """
    maker = graph.made_by.get(name)
    mask = graph.constants.get(
        maker.inputs[0] if maker is not None and isinstance(maker.op, Reshape) else name
    )
    if mask is None or mask.dtype.kind not in "bf":  # NumPy knows no limits of bf16
        return None
    mask = mask.reshape(graph.types[name].shape or ())
    seen = mask if mask.dtype == bool else mask == 0
    if mask.dtype != bool and not (seen | (mask <= np.finfo(mask.dtype).min)).all():
        return None
    if seen.all():
        return {}
    is_placed = op.is_causal or op.window or not getattr(op, f"{key}_axes").endswith("st")
    if is_placed or not seen.any(-1).all():
        return None
    queries, keys = seen.shape[-2:]
    rows = seen.reshape(-1, keys)
    offset, last = keys - 1 - int(rows[0, ::-1].argmax()), int(rows[queries - 1].sum())
    causal = np.tri(queries, keys, offset, dtype=bool)
    for window in (0, last):
        behind = np.tri(queries, keys, offset - window, dtype=bool) if window else np.False_
        if (seen == causal & ~behind).all():
            return {"is_causal": True, "offset": offset, "window": window}
    return None


def _repeated(graph: Graph, name: str) -> str | None:
    """The value (b, h, t, d) of which each head is repeated n times in a value (b, h * n, t, d)."""
    shapes, value = [graph.types[name].shape or ()], name
    for kind in (Reshape, Expand, Reshape):
        maker = graph.made_by.get(value)
        if maker is None or not isinstance(maker.op, kind):
            return None
        (value,) = maker.inputs
        shapes.append(graph.types[value].shape or ())
    return value if are_repeated(*shapes) else None


def are_repeated(whole: Shape, wide: Shape, one: Shape, base: Shape) -> bool:
    """Whether views of these shapes, the last one first, repeat each head of a value (b, h, t, d)."""
    if len(base) != 4 or one != (*base[:2], 1, *base[2:]) or len(wide) != len(one):
        return False
    return wide == (*one[:2], wide[2], *one[3:]) and whole == (base[0], base[1] * wide[2], *base[2:])


def _views(graph: Graph, reader: Node, names: list[str]) -> Iterator[Node]:
    """The views behind which values lie that nothing else reads."""
    for name in names:
        maker = graph.made_by.get(name)
        is_own = graph.readers[name] == [reader] and name not in graph.outputs
        if maker is not None and isinstance(maker.op, Reshape | Expand) and is_own:
            yield maker
            yield from _views(graph, maker, [maker.inputs[0]])


def has_few_queries(op: Op, src: TensorSpec, target: str) -> bool:
    """Whether an operator is attention for which a CPU's kernel would have few queries for its lanes.

    Measured on AVX-512, one thread, 2048 keys: 0.3 of torch's speed with one query, 1.4 times it with four.
    """
    if not isinstance(op, Attention) or not target.startswith("cpu"):
        return False
    made = op.attend(src)
    return made.queries * made.group < FEW


def _axes(shape: tuple[int, ...], extents: Mapping[str, int]) -> str | None:
    """The axes of the scores that a tensor has which broadcasts to them; None where it does not."""
    if not 1 <= len(shape) <= len(AXES):
        return None
    whole = dict(zip(AXES, (1,) * (len(AXES) - len(shape)) + shape, strict=True))
    if whole["t"] != extents["t"] or any(whole[axis] not in (1, extents[axis]) for axis in AXES):
        return None
    return "".join(axis for axis in AXES if whole[axis] > 1 or axis == "t")

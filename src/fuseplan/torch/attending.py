"""Rows of the table for attention: torch's operator, the softmax that its pieces have, and repeated heads."""

from __future__ import annotations

from math import inf

from fuseplan.graph.attention import attention as graph_attention
from fuseplan.graph.ops import HIDDEN, SAFE_SOFTMAX, Expand, Foreign, Reshape
from fuseplan.graph.why import LeftError, Why
from fuseplan.ops.attention import Attention
from fuseplan.torch.given import Given


def attention(given: Given) -> str:
    """Attention of query, key and value of four axes, without dropout."""
    if given.number("dropout_p"):
        raise LeftError(Why.FORMULA, "attention with dropout")
    query, key, value = (given.tensor(name) for name in ("query", "key", "value"))
    alike = given.shape(query)[1:2], (1,)  # torch takes one head of keys for all queries
    if not given.argument("enable_gqa") and given.shape(key)[1:2] not in alike:
        raise LeftError(Why.SHAPE, f"{given.type_of(query)} and {given.type_of(key)}")
    mask = given.maker("attn_mask")
    scale = given.number("scale") if given.has("scale") else 0.0
    op = Attention(is_causal=given.argument("is_causal"), scale=scale)
    return graph_attention(given, (query, key, value), None if mask is None else given.value(mask), op)


def hidden(given: Given) -> str:
    """Scores where a mask is true, and minus infinity elsewhere: what attention is found by."""
    mask = given.maker("condition")
    if given.number("other") != -inf or mask is None or not given.is_read(mask):
        raise LeftError(Why.FORMULA, f"other={given.argument('other')}")
    return given.add(Foreign(HIDDEN, (), (given.result,)), given.tensor("self"), given.value(mask))


def safe_softmax(given: Given) -> str:
    """Torch's own operator, which attention is found by: it makes zeros of a row that sees nothing.

    On a GPU it stays in pieces. Kernels there have scores in units of log2: a mask of f32's lowest number is
    minus infinity then, and a query that it hides from all keys would get zeros, not the mean of the values.
    """
    if given.node.meta["val"].device.type != "cpu":
        raise LeftError(Why.NOT_IN_TABLE, "a safe softmax on a GPU, whose mask may be the lowest number")
    src = given.tensor("self")
    if given.result.dtype != given.type_of(src).dtype:
        raise LeftError(Why.DTYPE, given.result)
    if int(given.number("dim")) % len(given.shape(src)) != len(given.shape(src)) - 1:
        raise LeftError(Why.NOT_IN_TABLE, "a safe softmax over another axis than the last")
    return given.add(Foreign(SAFE_SOFTMAX, (), (given.result,)), src)


def repeated(given: Given) -> str:
    """Each element of an axis several times: heads of keys that several queries read."""
    src, count = given.tensor("self"), int(given.number("repeats"))
    axis, shape = int(given.number("dim")) % given.result.rank, given.shape(src)
    one, wide = ((*shape[: axis + 1], extent, *shape[axis + 1 :]) for extent in (1, count))
    made = given.add(Expand(wide), given.add(Reshape(one), src))
    return given.add(Reshape((*shape[:axis], shape[axis] * count, *shape[axis + 1 :])), made)

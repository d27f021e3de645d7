"""ONNX's Attention, of opset 23 and later."""

from __future__ import annotations

from fuseplan.graph.attention import attention as joined
from fuseplan.graph.ops import Permute, Reshape
from fuseplan.graph.why import Why
from fuseplan.onnx.given import Given, LeftError
from fuseplan.ops.attention import Attention


def attention(given: Given) -> str:
    """Of three or four axes; past keys and values, and results besides the output, are left to ONNX."""
    given.wants(1)
    names = list(given.inputs[:3])
    if any(given.has(place) for place in range(4, len(given.inputs))):
        raise LeftError(Why.NOT_IN_TABLE, "Attention with past keys, or lengths")
    softcap, is_causal = given.attribute("softcap", 0.0), bool(given.attribute("is_causal", 0))
    mask = given.inputs[3] if given.has(3) else None
    if softcap and (mask or is_causal):
        raise LeftError(Why.FORMULA, "Attention whose mask is added before its softcap")
    is_flat = len(given.shape()) == 3
    for place, count in enumerate(("q_num_heads", "kv_num_heads", "kv_num_heads")) if is_flat else ():
        batch, rows, whole = given.shape(place)
        heads = given.attribute(count, 0)
        if heads < 1 or whole % heads:
            raise LeftError(Why.SHAPE, f"{whole} elements of {heads} heads")
        split = given.add(Reshape((batch, rows, heads, whole // heads)), names[place])
        names[place] = given.add(Permute((0, 2, 1, 3)), split)
    op = Attention(is_causal=is_causal, scale=given.attribute("scale", 0.0), softcap=softcap)
    query, key, value = names
    made = joined(given, (query, key, value), mask, op)
    if not is_flat:
        return made
    turned = given.add(Permute((0, 2, 1, 3)), made)
    batch, rows, heads, size = given.type_of(turned).shape or (0, 0, 0, 0)
    return given.add(Reshape((batch, rows, heads * size)), turned)

"""Quantized models: integers of 8 bits in the graph, and the rounding to other ones as formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Stored
from fuseplan.graph.op import Tensor
from fuseplan.graph.ops import VIEWS, Concat, Foreign, Map, Reshape
from fuseplan.graph.type import QUANTIZED, numpy_dtype, word_of
from fuseplan.graph.why import LeftError, Why
from fuseplan.onnx.given import Given
from fuseplan.onnx.protos import LIBRARY
from fuseplan.ops.conversion import Dequantize, Quantize

QUANTIZE = f"{LIBRARY}.QuantizeLinear"
OTHER_DTYPE = "a quantization in another dtype than its input's"


def quantized(given: Given) -> str:
    """Integers of 8 bits; views of those that views of dequantized ones give back by the same numbers."""
    if given.attribute("precision", 0):
        raise LeftError(Why.NOT_IN_TABLE, OTHER_DTYPE)
    told = given.attribute("output_dtype", 0) or TensorProto.UINT8
    word = given.type(2).dtype if given.has(2) else word_of(helper.tensor_dtype_to_np_dtype(told))
    if not given.type().is_spec or word not in QUANTIZED or given.type(1).dtype != given.type().dtype:
        raise LeftError(Why.DTYPE, f"{word} of {given.type()}")
    numbers = given.number(given.inputs[1]), given.number(given.inputs[2]) if given.has(2) else 0.0
    return _again(given, given.inputs[0], word, numbers) or given.layer(
        Quantize(word, zero_points=bool(numbers[1])), given.inputs[0], *_scaling(given)
    )


def _scaling(given: Given) -> list[str]:
    """A scale, and a zero point where it is not 0, as operators of plans take them."""
    points = given.constant(2)
    places = (1, 2) if given.has(2) and (points is None or points.any()) else (1,)
    stored = (given.constant(place) for place in places)
    return [
        given.add(Reshape((1,)), given.inputs[place]) if each is None else given.store(each.reshape(1))
        for place, each in zip(places, stored, strict=True)
    ]


def _again(given: Given, name: str, word: str, numbers: tuple[float, float]) -> str | None:
    """The integers that these numbers make a value of, seen as the value is; None where none do."""
    maker = given.maker_of(name)
    if maker is None or not isinstance(maker.op, (*VIEWS, Concat)):
        layer = maker.op.op if maker is not None and isinstance(maker.op, Layer) else None
        if maker is None or not isinstance(layer, Dequantize) or given.type_of(maker.inputs[0]).dtype != word:
            return None
        own = [*map(given.number, maker.inputs[1:]), 0.0]
        return maker.inputs[0] if tuple(own[:2]) == numbers else None
    inner = [_again(given, each, word, numbers) for each in maker.inputs]
    made = [each for each in inner if each]
    return given.add(maker.op, *made) if len(made) == len(inner) else None


def dequantized(given: Given) -> str:
    """Numbers of integers of 8 bits by one scale; those of others are formulas, as `_rounded` says."""
    if not given.type().is_quantized:
        return _rounded(given)
    scale, told = given.type(1), given.attribute("output_dtype", 0)
    if told not in (0, helper.np_dtype_to_tensor_dtype(numpy_dtype(scale.dtype))):
        raise LeftError(Why.NOT_IN_TABLE, OTHER_DTYPE)
    if scale.size != 1 or not scale.is_float or (given.has(2) and given.type(2).size != 1):
        raise LeftError(Why.NOT_IN_TABLE, f"{scale}, which is not one number")
    names = _scaling(given)
    return given.layer(Dequantize(scale.dtype, zero_points=len(names) > 1), given.inputs[0], *names)


def _rounded(given: Given) -> str:
    """Numbers rounded to those that the integers of a QuantizeLinear stand for; none are stored as integers.

    Of zero points z: clamp(round(x / scale) + z, low, high) - z = clamp(round(x / scale), low - z, high - z).
    """
    maker = given.maker()
    if (
        maker is None
        or not isinstance(maker.op, Foreign)
        or maker.op.word != QUANTIZE
        or (maker.why is not None and maker.why.why is not Why.DTYPE)
    ):
        raise LeftError(Why.NOT_IN_TABLE, f"{given.node.op_type} of a value that no QuantizeLinear makes")
    if given.attribute("output_dtype", 0) or dict(maker.op.attributes).get("precision"):
        raise LeftError(Why.NOT_IN_TABLE, OTHER_DTYPE)
    (src, scale, *zero), (_, own_scale, *own_zero) = maker.inputs, given.inputs
    begin, end = (int(given.number(names[0])) if any(names) else 0 for names in (zero, own_zero))
    integer = numpy_dtype(given.type().dtype)
    dtypes = {given.type_of(each).dtype for each in (src, own_scale)}
    if integer.kind not in "iu" or len(dtypes) > 1 or not given.type_of(src).is_float:
        raise LeftError(Why.DTYPE, f"{given.type()} of {given.type_of(src)}")
    low, high = np.iinfo(integer).min - begin, np.iinfo(integer).max - begin
    rounded = Map(f"minimum(maximum(round(a / {given.number(scale)!r}), {low}), {high})")
    made = given.add(rounded, src, origin=maker.origin)
    moved = f"(a + {begin - end})" if begin != end else "a"
    return given.formula(f"{moved} * {given.number(own_scale)!r}", made)


def stored_of(node: Any, values: Sequence[Tensor | None]) -> Stored | None:
    """The integers of a constant that a node dequantizes, less zero points; None where i8 has not all."""
    if node.op_type != "DequantizeLinear" or any(each.name == "block_size" for each in node.attribute):
        return None
    axis = next((each.i for each in node.attribute if each.name == "axis"), 1)
    found, *numbers = (each for each in values if each is not None)
    lined = [_lined_up(each, axis % max(1, found.ndim), found.ndim) for each in numbers]
    if found.dtype not in (np.int8, np.uint8) or len(lined) != len(node.input) - 1:
        return None
    moved = found.astype(np.int32) - lined[1] if len(lined) > 1 and lined[1].any() else found
    is_held = moved.size and moved.min() >= -128 and moved.max() <= 127
    return Stored(moved.astype(np.int8, copy=False), lined[0]) if is_held else None


def _lined_up(numbers: Tensor, axis: int, rank: int) -> Tensor:
    shape = [1] * rank
    if numbers.size != 1:
        shape[axis] = numbers.size
    return numbers.astype(np.int32 if numbers.dtype.kind in "iu" else numbers.dtype).reshape(shape)

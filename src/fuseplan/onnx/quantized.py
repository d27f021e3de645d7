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
from fuseplan.graph.type import FLOATS, QUANTIZED, numpy_dtype, word_of
from fuseplan.graph.why import LeftError, Why
from fuseplan.onnx.given import Given
from fuseplan.onnx.protos import LIBRARY
from fuseplan.onnx.rows import convolved
from fuseplan.ops.affine import Bias
from fuseplan.ops.conversion import Dequantize, Quantize
from fuseplan.ops.matmul import Matmul

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


def _scaling(given: Given, scale: int | None = 1, zero: int = 2) -> list[str]:
    """A scale, 1 where no input has it, and a zero point where it is not 0, as operators take them."""
    points = given.constant(zero)
    is_moved = given.has(zero) and (points is None or bool(points.any()))
    places = [*([] if scale is None else [scale]), *([zero] if is_moved else [])]
    if any(given.type(place).size != 1 for place in places):
        raise LeftError(Why.NOT_IN_TABLE, f"{given.node.op_type} with {given.type(places[0])} as a scale")
    stored = (given.constant(place) for place in places)
    names = [
        given.add(Reshape((1,)), given.inputs[place]) if each is None else given.store(each.reshape(1))
        for place, each in zip(places, stored, strict=True)
    ]
    return [*([given.store(np.ones(1, np.float32))] if scale is None else []), *names]


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
    return _floats(given, 0, 1, 2)


def _floats(given: Given, place: int, scale: int | None, zero: int) -> str:
    """An input of integers of 8 bits as numbers, by one scale."""
    dtype = "f32" if scale is None else given.type(scale).dtype
    if not given.type(place).is_quantized or dtype not in FLOATS:
        raise LeftError(Why.DTYPE, f"{given.type(place)} by a scale of {dtype}")
    names = _scaling(given, scale, zero)
    return given.layer(Dequantize(dtype, zero_points=len(names) > 1), given.inputs[place], *names)


def _weight(given: Given, place: int, scale: int | None, zero: int, axis: int) -> str:
    """A constant weight of integers as numbers, by scales for all or along an axis."""
    found, points = given.known(place, Why.WEIGHT_NOT_CONSTANT), np.zeros((), np.int32)
    scales = np.ones((), np.float32) if scale is None else given.known(scale, Why.WEIGHT_NOT_CONSTANT)
    if given.has(zero):
        points = given.known(zero, Why.WEIGHT_NOT_CONSTANT)
    scales, points = (_lined_up(each, axis % found.ndim, found.ndim) for each in (scales, points))
    name = given.store(((found.astype(np.int32) - points) * scales).astype(scales.dtype))
    stored = _stored(found, scales, points)
    given.stored |= {name: stored} if stored else {}
    return name


def _product(given: Given, src: str, weight: str) -> str:
    """A convolution or a product with a matrix, as the node's name says."""
    if "Conv" in given.node.op_type:
        return convolved(given, src, weight)
    shape = given.type_of(weight).shape or ()
    if len(shape) != 2 or not given.type_of(src).is_spec:
        raise LeftError(Why.SHAPE, f"{given.type_of(src)} and {given.type_of(weight)}")
    return given.layer(Matmul(shape[1]), src, weight)


def linear(given: Given) -> str:
    """QLinearConv and QLinearMatMul: dequantized factors, their product, a bias, and its quantization."""
    axis = 0 if given.node.op_type == "QLinearConv" else -1
    src, weight = _floats(given, 0, 1, 2), _weight(given, 3, 4, 5, axis)
    made = _product(given, src, weight)
    if given.has(8):
        scales = given.known(4).astype(np.float64) * given.number(given.inputs[1])
        bias = given.known(8, Why.WEIGHT_NOT_CONSTANT) * scales.reshape(-1)
        made = given.layer(Bias(), made, given.store(bias.astype(given.known(4).dtype)))
    names = _scaling(given, 6, 7)
    return given.layer(Quantize(given.type(7).dtype, zero_points=len(names) > 1), made, *names)


def integer(given: Given) -> str:
    """ConvInteger and MatMulInteger, whose sums nothing reads but casts to f32: the sums as f32."""
    if not given.is_cast:
        raise LeftError(Why.NOT_IN_TABLE, f"{given.node.op_type} whose sums are read as integers")
    axis = 0 if given.node.op_type == "ConvInteger" else -1
    return _product(given, _floats(given, 0, None, 2), _weight(given, 1, None, 3, axis))


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
    if len(numbers) != len(node.input) - 1:
        return None
    scale, *points = (_lined_up(each, axis % max(1, found.ndim), found.ndim) for each in numbers)
    return _stored(found, scale, points[0] if points else np.zeros((), np.int32))


def _stored(found: Tensor, scale: Tensor, points: Tensor) -> Stored | None:
    if found.dtype not in (np.int8, np.uint8):
        return None
    moved = found.astype(np.int32) - points if points.any() else found
    is_held = moved.size and moved.min() >= -128 and moved.max() <= 127
    return Stored(moved.astype(np.int8, copy=False), scale) if is_held else None


def _lined_up(numbers: Tensor, axis: int, rank: int) -> Tensor:
    shape = [1] * rank
    if numbers.size != 1:
        shape[axis] = numbers.size
    return numbers.astype(np.int32 if numbers.dtype.kind in "iu" else numbers.dtype).reshape(shape)

"""Integers in graphs of torch's: rounding to them and back, their products, and weights stored as such."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import fx

from fuseplan.graph.layer import Layer
from fuseplan.graph.ops import Convert
from fuseplan.graph.type import FLOATS, QUANTIZED
from fuseplan.graph.why import LeftError, Why
from fuseplan.language.dtypes import dtype_of
from fuseplan.ops.conversion import Cast
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.torch.given import Given, type_of

aten = torch.ops.aten
INTEGERS = (*QUANTIZED, "i32")
TURNED = (aten.t.default, aten.permute.default, aten.transpose.int, aten.numpy_T.default)
# Operators that multiply, and the place of the second factor among their arguments.
PRODUCTS = {
    **dict.fromkeys((aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default), 1),
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), 1),
    **{aten.convolution.default: 1, aten.addmm.default: 2},
}


def made_of_weights(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that make second factors of products of the graph's inputs alone, of which one has integers.

    They are torch's: of a module's own tensors they are computed once, and not in each call.
    """
    alone, whole = set[fx.Node](), set[fx.Node]()  # of inputs alone, and those of integers
    for node in graph.nodes:
        given = node.all_input_nodes
        if node.op == "placeholder" and type_of(node.meta.get("val")).dtype in QUANTIZED:
            whole.add(node)
        if node.op == "placeholder" or (node.op == "call_function" and given and alone.issuperset(given)):
            alone.add(node)
            whole.update({node} if not whole.isdisjoint(given) else ())
    needed = set[fx.Node]()
    for node in reversed(graph.nodes):
        is_made = node.op == "call_function" and node in alone and node in whole
        if is_made and any(user in needed or _multiplies(user, node) for user in node.users):
            needed.add(node)
    return {node for node in needed if node.target not in TURNED or type_of(node.meta["val"]).is_float}


def _multiplies(user: fx.Node, node: fx.Node) -> bool:
    place = PRODUCTS.get(user.target)
    return place is not None and user.args[place] is node and type_of(node.meta.get("val")).is_float


def matrix(given: Given, name: str, tensor: Callable[[str], str]) -> tuple[str, bool]:
    """The matrix that an argument is, or is the transpose of, and whether it is the transpose."""
    node, is_turned = given.maker(name), False
    tensor(name)
    while node is not None and _turns(node):
        node, is_turned = node.args[0], not is_turned
    return tensor(name) if node is None else given.value(node), is_turned


def _turns(node: fx.Node) -> bool:
    """Whether the node is the transpose of a matrix."""
    if node.target not in TURNED or node.args[0].meta["val"].ndim != 2:
        return False
    axes = node.args[1] if node.target is aten.permute.default else node.args[1:]
    first, last = (axis % 2 for axis in axes or (0, 1))
    return first == 1 if node.target is aten.permute.default else first != last


def product(given: Given) -> str:
    """A product of matrices of i8, whose sums are i32 and exact."""

    def tensor(name: str) -> str:
        value = given.value(given.argument(name))
        if given.type_of(value).dtype != "i8":
            raise LeftError(Why.DTYPE, given.type_of(value))
        return value

    weight, is_turned = matrix(given, "mat2", tensor)
    op = Linear(given.shape(weight)[0]) if is_turned else Matmul(given.shape(weight)[1])
    return given.add(Layer(op), tensor("self"), weight)


def cast(given: Given) -> str:
    """`self` in the result's dtype: of integers to floats, and of floats to integers that hold them.

    Others torch wraps around, or does not define, where a plan saturates.
    """
    src, dtype = given.value(given.argument("self")), given.result.dtype
    before = given.type_of(src)
    if before.dtype == dtype:
        return src
    if before.is_float and dtype in FLOATS:
        return given.add(Convert(dtype), src)
    is_known = before.dtype in INTEGERS and dtype in FLOATS
    if not is_known and not (before.is_float and dtype in QUANTIZED and _holds(dtype, given)):
        raise LeftError(Why.NOT_IN_TABLE, "a cast to another dtype")
    return given.add(Layer(Cast(dtype)), src)


def _holds(dtype: str, given: Given) -> bool:
    """Whether a dtype of integers holds a node's argument, which is clamped between two numbers."""
    node, row = given.maker("self"), dtype_of(dtype)
    while node is not None and node.target is aten.round.default:
        node = node.args[0]
    if node is None or node.target is not aten.clamp.default:
        return False
    low, high = (given.of(node).argument(name) for name in ("min", "max"))
    is_known = isinstance(low, int | float) and isinstance(high, int | float)
    return is_known and row.least <= low and high <= row.largest


def quantized(given: Given) -> str:
    """round(a * (1 / scale)) + zero_point between two numbers, as i8 or u8."""
    src, word = given.tensor("input"), given.result.dtype
    scale, point, low, high = (
        given.number(each) for each in ("scale", "zero_point", "quant_min", "quant_max")
    )
    if word not in QUANTIZED or given.type_of(src).dtype != "f32" or not math.isfinite(scale) or not scale:
        raise LeftError(Why.DTYPE, f"{given.type_of(src)} to {given.result}")
    text = f"minimum(maximum(round(a * {1 / scale!r}) + ({point!r}), {low!r}), {high!r})"
    return given.add(Layer(Cast(word)), given.formula(text, src))


def dequantized(given: Given) -> str:
    """(a - zero_point) * scale of integers of 8 bits."""
    src, dtype = given.value(given.argument("input")), given.result.dtype
    if given.type_of(src).dtype not in QUANTIZED or dtype != "f32":
        raise LeftError(Why.DTYPE, f"{given.type_of(src)} to {given.result}")
    wide = given.add(Layer(Cast(dtype)), src)
    return given.formula(f"(a - ({given.number('zero_point')!r})) * {given.number('scale')!r}", wide)


# By their names: torch has these operators where a module of its quantization is imported.
ROWS = {
    "quantized_decomposed.quantize_per_tensor.default": quantized,
    "quantized_decomposed.dequantize_per_tensor.default": dequantized,
}

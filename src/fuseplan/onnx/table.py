"""The table: for each operator of ONNX that graphs have, the operators that it becomes.

A row is a function of a node. It adds operators and gives the name of the result, which may be one of the
node's inputs, or the names of several results. `LeftError` leaves the node to ONNX. Rows hold for opsets 13
to 24; `OLDER` has the operators whose earlier versions they read too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import numpy as np
from onnx import helper

from fuseplan.graph.ops import Concat, Permute, Reduce, Reshape
from fuseplan.graph.why import LeftError, Why
from fuseplan.onnx.given import Given
from fuseplan.onnx.quantized import dequantized, quantized
from fuseplan.onnx.rows import (
    attention,
    average_pool,
    batch_norm,
    convolution,
    expanded,
    gather,
    groups,
    max_pool,
    pad,
    rows,
    slices,
    split,
    transposed,
)
from fuseplan.op import Op
from fuseplan.ops import UNARY, activation
from fuseplan.ops.affine import Bias, Prelu
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.ops.normalization import LayerNorm, RmsNorm
from fuseplan.ops.reductions import Amax, Amin, LogSoftmax, Mean, Softmax, Sum

Row = Callable[[Given], str | tuple[str, ...]]


def _plain(kind: type[Op]) -> Callable[[Given], Op]:
    return lambda given: kind()


# Formulas of inputs, of one dtype of plans.
FORMULAS = {
    "Add": "a + b",
    "Sub": "a - b",
    "Mul": "a * b",
    "Div": "a / b",
    "Neg": "-a",
    "Sqrt": "sqrt(a)",
    "Exp": "exp(a)",
    "Log": "log(a)",
    "Erf": "erf(a)",
    "Reciprocal": "1 / a",
    "Round": "round(a)",
    "Floor": "where(round(a) > a, round(a) - 1, round(a))",
    "Ceil": "where(round(a) < a, round(a) + 1, round(a))",
    "Sign": "where(a > 0, 1, where(a < 0, -1, a))",  # NaN stays
}
# Of formulas with an attribute: its name and default, and the formula that it is put into.
WITH_ALPHA = {
    "ThresholdedRelu": (1.0, "where(a > {0}, a, 0)"),
    "Celu": (1.0, "maximum(a, 0) + minimum({0} * expm1(a / {0}), 0)"),
    "Swish": (1.0, "a * sigmoid({0} * a)"),
}
# Of any number of inputs: how two are joined.
JOINED = {"Sum": "a + b", "Mean": "a + b", "Max": "maximum(a, b)", "Min": "minimum(a, b)"}
# Operators of plans, made of the node's attributes: those without fields by the names that they declare.
ACTIVATIONS: dict[str, Callable[[Given], Op]] = {
    **{each.onnx: _plain(each) for each in activation.ACTIVATIONS if each.onnx and not fields(each)},
    "Tanh": lambda given: activation.Tanh(),
    "Elu": lambda given: activation.Elu(given.attribute("alpha", 1.0)),
    "LeakyRelu": lambda given: activation.LeakyRelu(given.attribute("alpha", 0.01)),
    "Gelu": lambda given: activation.Gelu(given.attribute("approximate", "none")),
}
REDUCTIONS: dict[str, tuple[str, Callable[..., Op]]] = {
    "ReduceMean": ("mean", Mean),
    "ReduceSum": ("sum", Sum),
    "ReduceMax": ("amax", Amax),
    "ReduceMin": ("amin", Amin),
}
# Sums with a formula of each element before, and one of the sum behind.
OF_SUMS = {
    "ReduceL1": ("abs(a)", "a"),
    "ReduceL2": ("a * a", "sqrt(a)"),
    "ReduceSumSquare": ("a * a", "a"),
    "ReduceLogSum": ("a", "log(a)"),
}
# Operators whose versions before opset 13 the rows read too, and the first of these versions.
OLDER = {
    **dict.fromkeys((*FORMULAS, *JOINED, *ACTIVATIONS), 6),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), 7),  # attributes of theirs said how they broadcast
    **dict.fromkeys(("Softplus", "Softsign"), 1),
    **dict.fromkeys(("Conv", "Flatten", "Transpose", "Concat", "GlobalAveragePool", "GlobalMaxPool"), 1),
    **dict.fromkeys(("Squeeze", "Unsqueeze", *REDUCTIONS, *OF_SUMS), 1),
    **{"Gemm": 7, "BatchNormalization": 9, "Reshape": 5, "MatMul": 1, "Dropout": 7, "Identity": 1},
    **{"InstanceNormalization": 6, "ConvTranspose": 11},
    **{"MaxPool": 1, "AveragePool": 1, "PRelu": 7, "Slice": 1, "Split": 2},
}


def _formula(text: str, alpha: float = 0.0) -> Row:
    def row(given: Given) -> str:
        """The formula of the inputs, with the attribute `alpha` in place of braces."""
        given.floats()
        return given.formula(text.format(repr(given.attribute("alpha", alpha))), *given.inputs)

    return row


def _joined(name: str, text: str) -> Row:
    def row(given: Given) -> str:
        given.floats()
        made, *others = given.inputs
        for other in others:
            made = given.formula(text, made, other)
        return given.formula(f"a / {len(given.inputs)}", made) if name == "Mean" and others else made

    return row


def _activation(make: Callable[[Given], Op]) -> Row:
    def row(given: Given) -> str:
        given.floats()
        return given.activation(make(given))

    return row


def _reduced(given: Given, src: str, name: str, axes: tuple[int, ...], keepdims: bool) -> str:
    kind, op = REDUCTIONS[name]
    if not given.type().is_spec:
        return given.add(Reduce(kind, axes, keepdims), src)
    return given.layer(op(axes, keepdim=keepdims), src)


def _reduction(name: str, before: str = "a", behind: str = "a") -> Row:
    def row(given: Given) -> str:
        """The reduction between two formulas, whose results may be in memory: squares leave f16's range."""
        given.floats_of_first()
        axes = given.integers(1, "axes")
        shape = given.shape()
        is_nothing = not axes and (not shape or bool(given.attribute("noop_with_empty_axes", 0)))
        if (before, behind) != ("a", "a") and (is_nothing or given.type().dtype not in ("f32", "f64")):
            raise LeftError(Why.NOT_IN_TABLE, f"{given.node.op_type} of {given.type()}")
        if is_nothing:
            return given.inputs[0]
        listed = sorted({axis % len(shape) for axis in axes} if axes else range(len(shape)))
        if math.prod(shape) == 0:
            raise LeftError(Why.SHAPE, given.type())
        src, keepdims = given.formula(before, given.inputs[0]), bool(given.attribute("keepdims", 1))
        return given.formula(behind, _reduced(given, src, name, tuple(listed), keepdims))

    return row


def _clip(given: Given) -> str:
    given.floats_of_first()
    bounds = []
    for place, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        found = given.known(place, Why.FORMULA) if given.has(place) else None
        bounds.append(float(found.reshape(())) if found is not None else given.attribute(name, default))
    if any(map(math.isnan, bounds)):
        raise LeftError(Why.FORMULA, "a bound is NaN")
    low, high = bounds
    if low > high:
        raise LeftError(Why.FORMULA, f"min={low}, max={high}")
    return given.activation(activation.Relu() if bounds == [0, math.inf] else activation.Clamp(low, high))


def _hard_sigmoid(given: Given) -> str:
    given.floats()
    alpha, beta = given.attribute("alpha", 0.2), given.attribute("beta", 0.5)
    return given.formula(f"minimum(maximum({alpha!r} * a + {beta!r}, 0), 1)", given.inputs[0])


def _selu(given: Given) -> str:
    given.floats()
    alpha = given.attribute("alpha", 1.67326319217681884765625)
    gamma = given.attribute("gamma", 1.05070102214813232421875)
    return given.formula(f"{gamma!r} * where(a > 0, a, {alpha!r} * expm1(a))", given.inputs[0])


def _pow(given: Given) -> str:
    given.floats_of_first()
    power = given.constant(1)
    if power is not None and power.size == 1 and np.ndim(power) <= len(given.shape()):
        text = {2.0: "a * a", 3.0: "a * a * a"}.get(float(power.reshape(())))
        return given.formula(text or f"a ** {float(power.reshape(()))!r}", given.inputs[0])
    given.floats()
    return given.formula("a ** b", *given.inputs)


def _prelu(given: Given) -> str:
    given.floats()
    slope, shape = given.constant(1), given.shape()
    lone = (1,) * (len(shape) - 2)
    if slope is not None and given.type().is_spec and slope.shape == (shape[1], *lone) and lone:
        return given.layer(Prelu(), given.inputs[0], given.store(slope.reshape(-1)))
    if np.broadcast_shapes(given.shape(1), shape) != shape:
        raise LeftError(Why.BROADCAST, given.type(1))
    return given.formula("where(a > 0, a, b * a)", *given.inputs)


def _same(given: Given) -> str:
    given.wants(1)
    if given.type().dtype == "?":
        raise LeftError(Why.DTYPE, "no tensor")
    return given.inputs[0]


def _dropout(given: Given) -> str:
    given.wants(1)
    if given.has(2) and bool(given.known(2).reshape(-1)[0]):
        raise LeftError(Why.NOT_IN_TABLE, "Dropout in training")
    return given.inputs[0]


def _cast(given: Given) -> str:
    if given.type().dtype == "?" or str(helper.tensor_dtype_to_np_dtype(given.attribute("to", 0))) != str(
        np.dtype(given.numpy_dtype())
    ):
        raise LeftError(Why.NOT_IN_TABLE, "Cast to another dtype")
    return given.inputs[0]


def _reshaped(given: Given, shape: tuple[int, ...]) -> str:
    return given.inputs[0] if shape == given.shape() else given.add(Reshape(shape), given.inputs[0])


def _reshape(given: Given) -> str:
    wanted, shape = list(given.integers(1, "shape") or ()), given.shape()
    if not given.attribute("allowzero", 0):
        wanted = [shape[place] if extent == 0 else extent for place, extent in enumerate(wanted)]
    if -1 in wanted:
        others = math.prod(extent for extent in wanted if extent != -1)
        if not others:
            raise LeftError(Why.SHAPE, given.type())
        wanted[wanted.index(-1)] = math.prod(shape) // others
    return _reshaped(given, tuple(wanted))


def _flatten(given: Given) -> str:
    shape = given.shape()
    axis = given.attribute("axis", 1)
    axis += len(shape) if axis < 0 else 0
    return _reshaped(given, (math.prod(shape[:axis]), math.prod(shape[axis:])))


def _squeeze(given: Given) -> str:
    shape = given.shape()
    axes = given.integers(1, "axes")
    gone = {a % len(shape) for a in axes} if axes else {a for a, extent in enumerate(shape) if extent == 1}
    return _reshaped(given, tuple(extent for axis, extent in enumerate(shape) if axis not in gone))


def _unsqueeze(given: Given) -> str:
    shape, axes = list(given.shape()), given.integers(1, "axes") or ()
    rank = len(shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return _reshaped(given, tuple(shape))


def _transpose(given: Given) -> str:
    shape = given.shape()
    axes = tuple(range(len(shape)))
    order = tuple(given.attribute("perm", axes[::-1]))
    return given.inputs[0] if order == axes else given.add(Permute(order), given.inputs[0])


def _concat(given: Given) -> str:
    given.floats()
    rank = len(given.shape())
    if len(given.inputs) == 1:
        return given.inputs[0]
    return given.add(Concat(given.attribute("axis", 0) % rank), *given.inputs)


def _global(name: str) -> Row:
    def row(given: Given) -> str:
        given.floats()
        return _reduced(given, given.inputs[0], name, tuple(range(2, len(given.shape()))), True)

    return row


def _along(make: Callable[..., Op]) -> Row:
    def row(given: Given) -> str:
        """An operator along an axis, an input or an attribute; its other fields are true or false."""
        given.floats_of_first()
        if not given.type().is_spec:
            raise LeftError(Why.SHAPE, given.type())
        told = given.known(1, Why.NOT_IN_TABLE).reshape(()) if given.has(1) else given.attribute("axis", -1)
        rank, (_, *others) = len(given.shape()), make().attributes().items()
        axis = int(told) % rank
        more = {name: bool(given.attribute(name, value)) for name, value in others}
        return given.layer(make(-1 if axis == rank - 1 else axis, **more), given.inputs[0])

    return row


def _matmul(given: Given) -> str:
    given.floats()
    weight = given.known(1, Why.WEIGHT_NOT_CONSTANT)
    if weight.ndim != 2 or not given.type().is_spec:
        raise LeftError(Why.SHAPE, f"{given.type()} and {given.type(1)}")
    return given.layer(Matmul(weight.shape[1]), *given.inputs)


def _gemm(given: Given) -> str:
    given.floats()
    weight = given.known(1, Why.WEIGHT_NOT_CONSTANT)
    if not given.type().is_spec:
        raise LeftError(Why.SHAPE, given.type())
    src = given.add(Permute((1, 0)), given.inputs[0]) if given.attribute("transA", 0) else given.inputs[0]
    features = weight.shape[0 if given.attribute("transB", 0) else 1]
    op: Op = Linear(features) if given.attribute("transB", 0) else Matmul(features)
    made = given.layer(op, src, given.inputs[1])
    alpha, beta = given.attribute("alpha", 1.0), given.attribute("beta", 1.0)
    if alpha != 1:
        made = given.formula(f"a * {alpha!r}", made)
    if not given.has(2) or beta == 0:
        return made
    summand, stored = given.inputs[2], given.constant(2)
    if beta != 1 and stored is not None:
        summand = given.store((stored * beta).astype(stored.dtype))
    elif beta != 1:
        return given.formula(f"a + b * {beta!r}", made, summand)
    if stored is not None and given.shape(2) == (features,):
        return given.layer(Bias(), made, summand)
    return given.formula("a + b", made, summand)


TABLE: dict[str, Row] = {
    **{name: _formula(text) for name, text in FORMULAS.items()},
    **{name: _formula(text, alpha) for name, (alpha, text) in WITH_ALPHA.items()},
    **{name: _joined(name, text) for name, text in JOINED.items()},
    **{name: _activation(make) for name, make in ACTIVATIONS.items()},
    **{name: _reduction(name) for name in REDUCTIONS},
    **{name: _reduction("ReduceSum", *texts) for name, texts in OF_SUMS.items()},
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "Selu": _selu,
    "Pow": _pow,
    "PRelu": _prelu,
    "Identity": _same,
    "Dropout": _dropout,
    "Cast": _cast,
    "DequantizeLinear": dequantized,
    "QuantizeLinear": quantized,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Gather": gather,
    "Expand": expanded,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Concat": _concat,
    "Slice": slices,
    "Split": split,
    "Pad": pad,
    "GlobalAveragePool": _global("ReduceMean"),
    "GlobalMaxPool": _global("ReduceMax"),
    **{each.onnx: _along(each) for each in UNARY if each.onnx},
    "Softmax": _along(Softmax),
    "LogSoftmax": _along(LogSoftmax),
    "AveragePool": average_pool,
    "MaxPool": max_pool,
    "Conv": convolution,
    "ConvTranspose": transposed,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "BatchNormalization": batch_norm,
    "InstanceNormalization": groups,
    "GroupNormalization": groups,
    "Attention": attention,
    "LayerNormalization": lambda given: rows(given, LayerNorm, 2),
    "RMSNormalization": lambda given: rows(given, RmsNorm, 1),
}

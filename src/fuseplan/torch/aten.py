"""The table: for each operator of torch that graphs have, the operators that it becomes.

A row is a function of a node. It adds operators and gives the name of the result, which may be one of the
node's inputs. `LeftError` leaves the node to torch.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from fuseplan.graph.layer import Layer
from fuseplan.graph.ops import Expand, Permute, Reshape
from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Op
from fuseplan.ops import UNARY, activation
from fuseplan.ops.affine import Bias, Prelu
from fuseplan.ops.embedding import INDICES, Embedding
from fuseplan.ops.gradient import LinearWeightGradient
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.ops.pool import AVG_POOLS, MAX_POOLS
from fuseplan.ops.reductions import Amax, LogSoftmax, Mean, Softmax
from fuseplan.torch.attending import attention, repeated, safe_softmax
from fuseplan.torch.choices import CHOICES
from fuseplan.torch.flexible import FLEX, READ, flexible, left
from fuseplan.torch.given import Given
from fuseplan.torch.gradients import GRADIENTS
from fuseplan.torch.integers import ROWS, cast, matrix, product
from fuseplan.torch.ranges import PARTS, gated, joined, selected, sliced
from fuseplan.torch.statistics import STATISTICS
from fuseplan.torch.windows import adaptive, convolution, pad, pool

aten = torch.ops.aten
Row = Callable[[Given], str]


def _activation(make: Callable[[Given], Op]) -> Row:
    return lambda given: given.activation(make(given), given.tensor("self"))


def _plain(kind: type[Op]) -> Row:
    return _activation(lambda _: kind())


def _formula(text: str, *tensors: str) -> Row:
    """A formula of tensors, of `self` unless others are named; arguments that are numbers are in braces."""
    names = re.findall(r"{(\w+)}", text)

    def row(given: Given) -> str:
        numbers = {name: f"({given.number(name)!r})" for name in names}
        return given.formula(text.format(**numbers), *map(given.tensor, tensors or ("self",)))

    return row


def _joined(text: str, scale: str = "") -> Row:
    """A formula of `self` and `other`, which is a tensor or a number; `scale` is a factor of the second."""

    def row(given: Given) -> str:
        factor = given.number(scale) if scale else 1.0
        second = "b" if factor == 1 else f"({factor!r} * b)"
        if isinstance(given.argument("other"), int | float):
            number = f"({factor * given.number('other')!r})"
            return given.formula(text.replace("b", number), given.tensor("self"))
        return given.formula(text.replace("b", second), given.tensor("self"), given.tensor("other"))

    return row


def _clamp(given: Given) -> str:
    low, high = (given.number(name) if given.has(name) else default
                 for name, default in (("min", -math.inf), ("max", math.inf)))  # fmt: skip
    if not low <= high:
        raise LeftError(Why.FORMULA, f"min={low}, max={high}")
    return given.activation(activation.Clamp(low, high), given.tensor("self"))


def _between(given: Given) -> str:
    """`self` between tensors."""
    made = given.tensor("self")
    for name, text in (("min", "maximum(a, b)"), ("max", "minimum(a, b)")):
        made = given.formula(text, made, given.tensor(name)) if given.has(name) else made
    return made


def _prelu(given: Given) -> str:
    slope = given.tensor("weight")
    return given.layer(Prelu(shared=math.prod(given.shape(slope)) == 1), given.tensor("self"), slope)


def _elu(given: Given) -> str:
    if given.number("scale") != 1 or given.number("input_scale") != 1:
        raise LeftError(Why.FORMULA, "elu with scales")
    return given.activation(activation.Elu(given.number("alpha")), given.tensor("self"))


def _softplus(given: Given) -> str:
    if given.number("threshold") < 15:  # from there on the identity, which is log1p(exp(-15)) = 3e-7 away
        raise LeftError(Why.FORMULA, f"softplus with threshold={given.number('threshold')}")
    return _formula("softplus({beta} * a) / {beta}")(given)


def _power(given: Given) -> str:
    power, src = given.number("exponent"), given.tensor("self")
    text = {2.0: "a * a", 3.0: "a * a * a", 0.5: "sqrt(a)", -0.5: "1 / sqrt(a)", -1.0: "1 / a"}.get(power)
    return given.formula(text or f"a ** {power!r}", src)


def _linear(given: Given) -> str:
    weight = given.tensor("weight")
    if len(given.shape(weight)) != 2:
        raise LeftError(Why.SHAPE, given.type_of(weight))
    op = Linear(given.shape(weight)[0], precision=given.precision("matmul"))
    made = given.layer(op, given.tensor("input"), weight)
    return given.layer(Bias(), made, given.tensor("bias")) if given.has("bias") else made


def _product(given: Given, first: str, second: str) -> str:
    """Rows times a matrix; matrices that were only transposed before are read as they lie."""
    names = given.tensor(first), given.tensor(second)
    if len(given.shape(names[1])) > 2:
        raise LeftError(Why.WEIGHT_NOT_CONSTANT, names[1])  # a stack of them
    if min(len(given.shape(name)) for name in names) < 2:
        raise LeftError(Why.SHAPE, " and ".join(str(given.type_of(name)) for name in names))
    precision = given.precision("matmul")
    (src, src_turned), (other, other_turned) = (matrix(given, name, given.tensor) for name in (first, second))
    if src_turned and not other_turned:
        return given.layer(LinearWeightGradient(given.shape(src)[1], precision), other, src)
    make, features = (Linear, 0) if other_turned else (Matmul, 1)
    return given.layer(make(given.shape(other)[features], precision=precision), given.tensor(first), other)


def _addmm(given: Given) -> str:
    if given.number("beta") != 1 or given.number("alpha") != 1:
        raise LeftError(Why.FORMULA, "addmm with factors")
    made, bias = _product(given, "mat1", "mat2"), given.tensor("self")
    if given.shape(bias) == given.shape(made)[-1:]:
        return given.layer(Bias(), made, bias)
    return given.formula("a + b", made, bias)


def _embedding(given: Given) -> str:
    """Rows of a table. A gradient by the counts of indices, or without the table's other rows, is torch's."""
    if given.argument("scale_grad_by_freq") or given.argument("sparse"):
        raise LeftError(Why.NOT_IN_TABLE, "embedding with scale_grad_by_freq or sparse")
    weight, indices = given.tensor("weight"), given.value(given.argument("indices"))
    rows, features = given.shape(weight)
    if given.type_of(indices).dtype not in INDICES or not given.result.is_spec:
        raise LeftError(Why.SHAPE, f"{given.type_of(indices)}, rows of {given.type_of(weight)}")
    padding = int(given.number("padding_idx"))
    op = Embedding(rows, features, dtype=given.type_of(weight).dtype, padding=padding)
    return given.add(Layer(op), indices, weight)


def _along(make: Callable[[int], Op]) -> Row:
    def row(given: Given) -> str:
        """An operator along `dim`; -1 is the last axis."""
        given.tensor("self")
        src = cast(given)
        rank = len(given.shape(src))
        axis = int(given.number("dim")) % max(1, rank)
        return given.layer(make(-1 if axis == rank - 1 else axis), src)

    return row


def _reshape(given: Given, kind: type[Reshape | Expand] = Reshape) -> str:
    src, shape = given.tensor("self"), given.result.shape
    if shape is None:
        raise LeftError(Why.SHAPE, given.result)
    return src if shape == given.shape(src) else given.add(kind(shape), src)


def _permute(given: Given) -> str:
    src = given.tensor("self")
    rank = len(given.shape(src))
    order = list(range(rank))
    if "dims" in given.names:
        order = [axis % rank for axis in given.integers("dims")]
    elif "dim0" in given.names:
        first, second = int(given.number("dim0")) % rank, int(given.number("dim1")) % rank
        order[first], order[second] = second, first
    else:
        order.reverse()
    return src if order == sorted(order) else given.add(Permute(tuple(order)), src)


def _same(given: Given) -> str:
    """A copy: the value itself."""
    return given.tensor("self")


def _first(given: Given) -> str:
    """A result of an operator that the table has read; parts of tensors; convolutions' gradients."""
    maker = given.node.args[0]
    if maker.target in PARTS:
        return PARTS[maker.target](given)
    name = given.result_name(given.value(maker), given.node.args[1]) if given.is_read(maker) else ""
    if not given.is_made(name):
        raise LeftError(Why.NOT_IN_TABLE, "a further result, or that of an operator that torch runs")
    return name


ACTIVATIONS: dict[str, type[Op]] = {
    **{"relu": activation.Relu, "tanh": activation.Tanh, "silu": activation.Silu, "mish": activation.Mish},
    **dict.fromkeys(("sigmoid", "special_expit"), activation.Sigmoid),
    **dict.fromkeys(("abs", "absolute"), activation.Abs),
    **{"hardswish": activation.Hardswish, "hardsigmoid": activation.Hardsigmoid},
    "log_sigmoid": activation.LogSigmoid,
}
FORMULAS = {
    **dict.fromkeys(("neg", "negative"), "-a"),
    **{name: f"{name}(a)" for name in ("exp", "expm1", "log", "log1p", "sqrt", "erf", "round")},
    **dict.fromkeys(("sign", "sgn"), "where(a > 0, 1, where(a < 0, -1, 0))"),
    **{"rsqrt": "1 / sqrt(a)", "reciprocal": "1 / a", "square": "a * a"},
    "selu": "1.0507009873554805 * where(a > 0, a, 1.6732632423543772 * expm1(a))",
    "celu": "maximum(a, 0) + minimum({alpha} * expm1(a / {alpha}), 0)",
    "threshold": "where(a <= {threshold}, {value}, a)",
}
TABLE: dict[Any, Row] = {
    **{getattr(aten, name).default: _plain(kind) for name, kind in ACTIVATIONS.items()},
    **{getattr(aten, name).default: _formula(text) for name, text in FORMULAS.items()},
    aten.addcmul.default: _formula("a + {value} * b * c", "self", "tensor1", "tensor2"),
    aten.addcdiv.default: _formula("a + {value} * b / c", "self", "tensor1", "tensor2"),
    aten.prelu.default: _prelu,
    **dict.fromkeys((aten.clamp.Tensor, aten.clamp_min.Tensor, aten.clamp_max.Tensor), _between),
    aten.gelu.default: _activation(lambda given: activation.Gelu(given.argument("approximate"))),
    aten.leaky_relu.default: _activation(lambda given: activation.LeakyRelu(given.number("negative_slope"))),
    aten.elu.default: _elu,
    aten.softplus.default: _softplus,
    aten.relu6.default: _activation(lambda _: activation.Clamp(0.0, 6.0)),
    aten.hardtanh.default: _activation(
        lambda given: activation.Clamp(given.number("min_val"), given.number("max_val"))
    ),
    **dict.fromkeys(
        (aten.clamp.default, aten.clip.default, aten.clamp_min.default, aten.clamp_max.default), _clamp
    ),
    aten.pow.Tensor_Scalar: _power,
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _joined("a + b", "alpha")),
    **dict.fromkeys((aten.minimum.default, aten.min.other), _joined("minimum(a, b)")),
    **dict.fromkeys((aten.maximum.default, aten.max.other), _joined("maximum(a, b)")),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor), _joined("a - b", "alpha")),
    aten.rsub.Scalar: _formula("{other} - {alpha} * a"),
    operator.getitem: _first,
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    aten.glu.default: gated,
    aten.cat.default: joined,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.multiply.Tensor), _joined("a * b")),
    **dict.fromkeys(
        (aten.div.Tensor, aten.div.Scalar, aten.divide.Tensor, aten.true_divide.Tensor), _joined("a / b")
    ),
    **dict.fromkeys((aten.conv1d.default, aten.conv2d.default, aten.conv3d.default), convolution),
    **dict.fromkeys((aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding), convolution),
    **dict.fromkeys((aten.convolution.default, aten.conv_transpose1d.default), convolution),
    **dict.fromkeys((aten.conv_transpose2d.input, aten.conv_transpose3d.input), convolution),
    **{getattr(aten, f"max_pool{rank}d").default: pool(MAX_POOLS) for rank in (1, 2, 3)},
    aten.max_pool2d_with_indices.default: pool(MAX_POOLS),
    aten.max_pool3d_with_indices.default: pool(MAX_POOLS),
    **{getattr(aten, f"avg_pool{rank}d").default: pool(AVG_POOLS) for rank in (1, 2, 3)},
    **{getattr(aten, f"adaptive_avg_pool{rank}d").default: adaptive(Mean, AVG_POOLS) for rank in (1, 2, 3)},
    aten._adaptive_avg_pool2d.default: adaptive(Mean, AVG_POOLS),
    aten._adaptive_avg_pool3d.default: adaptive(Mean, AVG_POOLS),
    **{getattr(aten, f"adaptive_max_pool{rank}d").default: adaptive(Amax, MAX_POOLS) for rank in (1, 2, 3)},
    aten.pad.default: pad,
    aten.constant_pad_nd.default: pad,
    aten.linear.default: _linear,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), lambda given: _product(given, "self", "mat2")),
    aten.matmul.default: lambda given: _product(given, "self", "other"),
    aten.addmm.default: _addmm,
    aten.embedding.default: _embedding,
    **dict.fromkeys((aten.softmax.int, aten._softmax.default), _along(Softmax)),
    aten._safe_softmax.default: safe_softmax,
    **dict.fromkeys((aten.log_softmax.int, aten._log_softmax.default), _along(LogSoftmax)),
    **{getattr(aten, each.torch).default: _along(each) for each in UNARY if each.torch},
    aten.scaled_dot_product_attention.default: attention,
    READ: flexible,
    FLEX: left,
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _reshape),
    aten.flatten.using_ints: _reshape,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default), _reshape),
    aten.expand.default: lambda given: _reshape(given, Expand),
    aten.repeat_interleave.self_int: repeated,
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), _same),
    aten.contiguous.default: _same,
    **GRADIENTS,
    **STATISTICS,
    **CHOICES,
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype, aten.type_as.default), cast),
    aten._int_mm.default: product,
    **ROWS,
}

"""Rows of the table for the operators of backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Elementwise
from fuseplan.ops.activation import Elu, Gelu, Hardsigmoid, Hardswish, LeakyRelu, Mish, Relu, Silu
from fuseplan.ops.expression import Expression
from fuseplan.ops.row_gradients import LogSoftmaxBackward, SoftmaxBackward
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.torch.given import Given

aten = torch.ops.aten
Row = Callable[[Given], str]


def _activation(make: Callable[[Given], Elementwise]) -> Row:
    """The gradient times the derivative; of relu, `self` is the output, which is above 0 where its src is."""
    return lambda given: given.layer(
        ActivationBackward(make(given)), given.tensor("grad_output"), given.tensor("self")
    )


def _relu(given: Given) -> Relu:
    if given.number("threshold"):
        raise LeftError(Why.FORMULA, f"threshold={given.number('threshold')}")
    return Relu()


def _leaky(given: Given) -> LeakyRelu:
    return LeakyRelu(given.number("negative_slope"))


def _hardtanh(given: Given) -> Expression:
    """torch's derivative is 0 at both ends, that of `clamp` is 1."""
    low, high = given.number("min_val"), given.number("max_val")
    return Expression(f"where(x > {low!r}, where(x < {high!r}, x, {high!r}), {low!r})")


def _elu_backward(given: Given) -> str:
    if given.argument("is_result") or given.number("scale") != 1 or given.number("input_scale") != 1:
        raise LeftError(Why.FORMULA, "the gradient of elu by its result, or with scales")
    op = ActivationBackward(Elu(given.number("alpha")))
    return given.layer(op, given.tensor("grad_output"), given.tensor("self_or_result"))


def _formula(text: str) -> Row:
    return lambda given: given.formula(text, given.tensor("grad_output"), given.tensor("output"))


def _softmax(make: type[SoftmaxBackward] | type[LogSoftmaxBackward]) -> Row:
    def row(given: Given) -> str:
        grad, output = given.tensor("grad_output"), given.tensor("output")
        if given.result.dtype != given.type_of(grad).dtype:
            raise LeftError(Why.DTYPE, given.result)
        rank = len(given.shape(grad))
        axis = int(given.number("dim")) % max(1, rank)
        return given.layer(make(axes=-1 if axis == rank - 1 else axis), grad, output)

    return row


def batch_norm_training(given: Given) -> str:
    """Batch norm by the statistics of the batch, which are results, as are running ones."""
    _check_affine(given, "training")
    running = [given.tensor(name) for name in ("running_mean", "running_var") if given.has(name)]
    momentum = given.number("momentum") if running else 0.1
    op = BatchNormTraining(running=bool(running), epsilon=given.number("eps"), momentum=momentum)
    operands = [given.tensor(name) for name in ("weight", "bias")]
    return given.several(op, given.tensor("input"), *operands, *running)


def _batch_norm_backward(given: Given) -> str:
    _check_affine(given, "train")
    operands = [given.tensor(name) for name in ("input", "weight", "save_mean", "save_invstd")]
    return given.several(BatchNormBackward(), given.tensor("grad_out"), *operands)


def _check_affine(given: Given, training: str) -> None:
    """Refuses batch norm without scale, by given statistics, or on a GPU, where torch has its kernels."""
    if not (given.has("weight") and given.argument(training) and given.node.meta["val"][0].is_cpu):
        raise LeftError(Why.NOT_IN_TABLE, "batch norm without scale, by given statistics, or on a GPU")


GRADIENTS: dict[Any, Row] = {
    aten._native_batch_norm_legit_functional.default: batch_norm_training,
    aten._native_batch_norm_legit.no_stats: batch_norm_training,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.gelu_backward.default: _activation(lambda given: Gelu(given.argument("approximate"))),
    aten.silu_backward.default: _activation(lambda _: Silu()),
    aten.mish_backward.default: _activation(lambda _: Mish()),
    aten.threshold_backward.default: _activation(_relu),
    aten.leaky_relu_backward.default: _activation(_leaky),
    aten.hardtanh_backward.default: _activation(_hardtanh),
    aten.hardswish_backward.default: _activation(lambda _: Hardswish()),
    aten.hardsigmoid_backward.default: _activation(lambda _: Hardsigmoid()),
    aten.elu_backward.default: _elu_backward,
    aten.tanh_backward.default: _formula("a * (1 - b * b)"),
    aten.sigmoid_backward.default: _formula("a * ((1 - b) * b)"),
    aten._softmax_backward_data.default: _softmax(SoftmaxBackward),
    aten._log_softmax_backward_data.default: _softmax(LogSoftmaxBackward),
}

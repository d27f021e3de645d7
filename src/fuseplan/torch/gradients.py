"""Rows of the table for the operators of backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Elementwise
from fuseplan.ops.activation import Gelu, Mish, Relu, Silu
from fuseplan.ops.row_gradients import LogSoftmaxBackward, SoftmaxBackward
from fuseplan.ops.training import ActivationBackward
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


GRADIENTS: dict[Any, Row] = {
    aten.gelu_backward.default: _activation(lambda given: Gelu(given.argument("approximate"))),
    aten.silu_backward.default: _activation(lambda _: Silu()),
    aten.mish_backward.default: _activation(lambda _: Mish()),
    aten.threshold_backward.default: _activation(_relu),
    aten.tanh_backward.default: _formula("a * (1 - b * b)"),
    aten.sigmoid_backward.default: _formula("a * ((1 - b) * b)"),
    aten._softmax_backward_data.default: _softmax(SoftmaxBackward),
    aten._log_softmax_backward_data.default: _softmax(LogSoftmaxBackward),
}

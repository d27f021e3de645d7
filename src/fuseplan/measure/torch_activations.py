"""Activations and their backward passes in PyTorch, and what a stage of a plan is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fuseplan.measure.layers import is_usual
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS, Gelu

# Activations, by their names in torch, whose softplus is another function above 20; and those whose numbers
# torch takes by the same names.
FUNCTIONS = {kind.name: kind.torch for kind in ACTIVATIONS if kind.torch and kind.name != "softplus"}
TAKING_NUMBERS = ("leaky_relu", "elu", "clamp")

# Backward passes of activations, of a gradient and the activation's input; then further arguments.
BACKWARD: Mapping[str, Callable[[Any, Mapping[str, float]], Callable[[Any, Any], Any]]] = {
    "relu": lambda aten, _: lambda dy, x: aten.threshold_backward(dy, x, 0),
    "leaky_relu": lambda aten, given: (
        lambda dy, x: aten.leaky_relu_backward(dy, x, given["negative_slope"], False)
    ),
    "elu": lambda aten, given: lambda dy, x: aten.elu_backward(dy, given["alpha"], 1, 1, False, x),
    "silu": lambda aten, _: aten.silu_backward,
    "hardswish": lambda aten, _: aten.hardswish_backward,
    "hardsigmoid": lambda aten, _: aten.hardsigmoid_backward,
    "mish": lambda aten, _: aten.mish_backward,
    "gelu": lambda aten, _: aten.gelu_backward,
}

Held = dict[str, Any]  # tensors by the plan's keys; a stage adds the results that it makes
Stage = Callable[[Any, Held], Any]  # x and the tensors -> x


def activation_of(op: Op) -> Callable[[Any], Any] | None:
    """What torch calls for an activation; None where it has no such function, or the operator is none."""
    import torch
    from torch.nn import functional

    if isinstance(op, Gelu):
        return partial(functional.gelu, approximate=op.approximate)
    if op.name not in TAKING_NUMBERS and not (op.name in FUNCTIONS and is_usual(op)):
        return None
    word = FUNCTIONS[op.name]
    options = {each.name: each.value for each in op.parameters()} if op.name in TAKING_NUMBERS else {}
    return partial(getattr(functional, word, None) or getattr(torch, word), **options)

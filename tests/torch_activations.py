"""Each activation, and what torch calls for it: an implementation that is not ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from fuseplan.op import Elementwise
from fuseplan.ops import activation

Torch = Callable[[Any], Any]


def power(a: float, b: float, g: float, threshold: float) -> Torch:
    """MIOpen's kernel, line by line."""

    def function(x: Any) -> Any:
        t = a + b * x
        return torch.where(t <= threshold, torch.zeros_like(t), torch.pow(t, g))

    return function


CASES: list[tuple[Elementwise, Torch]] = [
    (activation.Identity(), lambda x: x),
    (activation.Sigmoid(), torch.sigmoid),
    (activation.Tanh(), torch.tanh),
    (activation.Tanh(0.5, -1.7), lambda x: -1.7 * torch.tanh(0.5 * x)),
    (activation.Relu(), F.relu),
    (activation.Softplus(), lambda x: F.softplus(x, threshold=700)),
    (activation.Abs(), torch.abs),
    (activation.Power(), power(0, 1, 1, 1e-6)),
    (activation.Power(0.5, 0.25, 1.75), power(0.5, 0.25, 1.75, 1e-6)),
    (activation.Power(1, -2, -0.5, threshold=0.1), power(1, -2, -0.5, 0.1)),
    (activation.ClippedRelu(), F.relu6),
    (activation.ClippedRelu(0.3), lambda x: torch.clamp(x, 0, 0.3)),
    (activation.LeakyRelu(), F.leaky_relu),
    (activation.LeakyRelu(-0.4), lambda x: F.leaky_relu(x, -0.4)),
    (activation.Elu(), F.elu),
    (activation.Elu(0.3), lambda x: F.elu(x, 0.3)),
    (activation.Clamp(-0.5, 0.75), lambda x: torch.clamp(x, -0.5, 0.75)),
    (activation.Clamp(-math.inf, 1), lambda x: torch.clamp(x, max=1)),
    (activation.Gelu(), F.gelu),
    (activation.Gelu("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (activation.Silu(), F.silu),
    (activation.Hardswish(), F.hardswish),
    (activation.Hardsigmoid(), F.hardsigmoid),
    (activation.Mish(), F.mish),
    (activation.Softsign(), F.softsign),
    (activation.LogSigmoid(), F.logsigmoid),
]

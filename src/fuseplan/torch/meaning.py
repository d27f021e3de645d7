"""A plan's meaning by torch's own operators: what its gradients are taken of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fuseplan.measure.spaces import arithmetic_of
from fuseplan.op import Given
from fuseplan.ops.conv import Conv, ConvTranspose
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.matmul import Product
from fuseplan.ops.windows import Window
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.tensors.torch_tensors import DTYPES
from fuseplan.torch.texts import given_of


def evaluated(
    plan: FusionPlan, src: torch.Tensor, given: Sequence[torch.Tensor], parameters: Sequence[float]
) -> list[torch.Tensor]:
    """The output, and the plan's results in order: torch records each operator.

    Elements are computed in the plan's compute dtype, from the operators' own formulas, and rounded where the
    kernel rounds them: in front of a contraction, and at the end.
    """
    compute = DTYPES[plan.src.compute_dtype]
    tensors = dict(zip((each.key for each in given_of(plan)), given, strict=True))
    numbers = [float(each.value) for each in plan.parameters]
    values = dict(zip((each.key for each in plan.parameters), parameters or numbers, strict=True))
    x, results = src.to(compute), dict[str, torch.Tensor]()
    for step in plan.steps:
        if isinstance(step.op, Conv | ConvTranspose | Product):
            weight = tensors[step.keys["weight"]]
            x = _contracted(step.op, step, x.to(src.dtype), weight).to(compute)
            continue
        if isinstance(step.op, Embedding):
            compute = DTYPES[step.dst.compute_dtype]
            table = tensors[step.keys["weight"]]
            rows: Any = step.op.meaning(Given(src, step.src, {"weight": table}, {}, by=arithmetic_of(table)))
            x = rows[0].to(compute)
            if step.op.padding >= 0:
                x = torch.where((src == step.op.padding)[..., None], x.detach(), x)
            continue
        x, made = step.evaluate(x, tensors | results, values, by=arithmetic_of(x))
        results |= made
    saved = [results[each.key].to(DTYPES[each.spec.dtype]) for each in plan.results]
    return [x.to(DTYPES[plan.output.dtype]), *saved]


def _contracted(
    op: Conv | ConvTranspose | Product, step: Step, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    weight = weight.to(x.dtype)
    if isinstance(op, Product):
        return x @ (weight.mT if op.transposed else weight)
    window = op.window(step.src)
    if isinstance(op, ConvTranspose):
        return _transposed(op, window, x, weight)
    if all(low == high for low, high in window.padding):
        padding: Any = tuple(low for low, _ in window.padding)
    else:
        sides = [side for pair in reversed(window.padding) for side in pair]
        x, padding = torch.nn.functional.pad(x, sides), 0
    convolution = getattr(torch.nn.functional, op.name)  # torch names it alike
    made: torch.Tensor = convolution(x, weight, None, window.stride, padding, window.dilation, op.groups)
    return made


def _transposed(op: ConvTranspose, window: Window, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By torch's operator without padding; that is cut off, and zeros follow where the output is longer."""
    convolution = getattr(torch.nn.functional, op.name)
    whole = convolution(x, weight, None, window.stride, groups=op.groups, dilation=window.dilation)
    ends = [
        side
        for (low, _), out, have in zip(window.padding, window.dst, whole.shape[2:], strict=True)
        for side in (out + low - have, -low)
    ]
    return torch.nn.functional.pad(whole, ends[::-1])

"""The float64 meaning of a plan on torch's tensors, which NumPy's `FusionPlan.evaluate` has for arrays.

The meaning comes from the operators' own formulas. The sums of convolutions and products are written here
once more, as products of float64 matrices: no library's convolution is trusted with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from fuseplan.measure.spaces import Shape, Tensor, Tensors, leaves_of, space_of
from fuseplan.op import Elementwise
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Product
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.parts import Parted
from fuseplan.plan import FusionPlan
from fuseplan.reduction import Statistic, reduce
from fuseplan.scalar import fold
from fuseplan.step import Step
from fuseplan.tensor import TensorSpec

TEMPORARY_BYTES = 1 << 30  # of one product's float64 operand: larger ones are made of fewer images at once


def evaluated(plan: FusionPlan, tensors: Tensors, slip: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the plan's results by key; old values of updated results are in `tensors`.

    Statistics are off by `slip`, relative.
    """
    x = tensors["src"].double()
    results: dict[str, Tensor] = {}
    for step in plan.steps:
        if isinstance(step.op, Normalization):
            x, made = _normalized(step, step.op, x, {**tensors, **results}, slip)
            results |= made
        else:
            x = applied(step, x, {**tensors, **results})
            results |= {each.key: x for each in step.results}
    return x, results


def applied(step: Step, x: Tensor, tensors: Tensors) -> Tensor:
    """One step's result, in float64.

    Raises:
        TypeError: there is no such sum here.
    """
    if isinstance(step.op, Elementwise):
        return elements(step, leaves_of(step, x, tensors), space_of(x).meanings)
    if not isinstance(step.op, Conv | Product):
        raise TypeError(f"the float64 reference on a GPU does not support {step.op.name!r}")
    weight = tensors[step.keys["weight"]].double()
    if isinstance(step.op, Conv):
        return convolved(step.op, step.src, x, weight)
    matrix = weight.mT if step.op.transposed else weight
    return (x.reshape(x.shape[0], -1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


def elements(step: Step, leaves: Tensors, meanings: Mapping[str, Callable[..., Any]]) -> Tensor:
    """The result of an elementwise operator, whose leaves are torch's tensors, by its formulas."""
    x = leaves["x"]
    if isinstance(step.op, Parted):
        return step.op.split(step.src).fill(x.new_empty(step.dst.shape), step.formulas, leaves, meanings)
    return fold(step.formulas[0], leaves, meanings).expand(x.shape)


def _normalized(
    step: Step, op: Normalization, x: Tensor, tensors: Tensors, slip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of an operator with statistics, and its results by key; every sum is of all elements."""
    leaves, meanings = leaves_of(step, x, tensors), space_of(x).meanings
    for each in op.reductions(step.leaves, step.src):
        leaves |= {name: (1 + slip) * number for name, number in reduced(each, leaves, step).items()}
    formulas = op.result_formulas(step.leaves, step.src)
    results = {
        each.key: fold(formulas[each.name], leaves, meanings).reshape(each.shape) for each in step.results
    }
    out = fold(op.formula(step.leaves, step.src), leaves, meanings).expand(op.spread_shape(step.src))
    return out.reshape(step.dst.shape), results


def reduced(statistic: Statistic, leaves: Tensors, step: Step) -> dict[str, Tensor]:
    """The numbers of a statistic of a step by name: NumPy's arrays or torch's tensors, as the leaves."""
    assert isinstance(step.op, Normalization)
    axes, space = step.op.over(step.src), space_of(leaves["x"])
    return reduce(statistic, leaves, step.src.shape, axes, space.meanings, space.joins, space.broadcast)


def convolved(op: Conv, spec: TensorSpec, src: Tensor, weight: Tensor) -> Tensor:
    """The convolution of float64 tensors: for each tap of the kernel, one product of matrices.

    Args:
        op: the convolution.
        spec: its src.
        src: (n, c, *spatial).
        weight: (features, c/groups, *kernel).
    """
    import torch

    window = op.window(spec)
    dst = torch.zeros((spec.batch, op.features, *window.dst), dtype=torch.float64, device=src.device)
    sides = [side for pair in reversed(window.padding) for side in pair]
    images = max(1, TEMPORARY_BYTES // (8 * prod(spec.shape[1:])))
    for begin in range(0, spec.batch, images):
        some = torch.nn.functional.pad(src[begin : begin + images], sides)
        for tap, under in _taps(window.kernel, window.stride, window.dilation, window.dst):
            seen = some[(slice(None), slice(None), *under)]
            dst[begin : begin + images] += _product(seen, weight[(slice(None), slice(None), *tap)], op.groups)
    return dst


def _taps(
    kernel: Shape, stride: Shape, dilation: Shape, dst: Shape
) -> Iterator[tuple[Shape, tuple[slice, ...]]]:
    """Each position of a kernel, and where it meets the padded src."""
    for tap in product(*map(range, kernel)):
        starts = [at * apart for at, apart in zip(tap, dilation, strict=True)]
        under = [
            slice(start, start + (extent - 1) * step + 1, step)
            for start, step, extent in zip(starts, stride, dst, strict=True)
        ]
        yield tap, tuple(under)


def _product(seen: Tensor, weight: Tensor, groups: int) -> Tensor:
    """(n, c, *dst) times (features, c/groups) in groups: (n, features, *dst)."""
    batch, spatial = seen.shape[0], seen.shape[2:]
    if weight.shape[1] == 1 and weight.shape[0] == groups:
        return seen * weight.reshape(-1, *[1] * len(spatial))
    rows = seen.reshape(batch, groups, -1, prod(spatial))
    weights = weight.reshape(1, groups, -1, weight.shape[1])
    return (weights @ rows).reshape(batch, -1, *spatial)

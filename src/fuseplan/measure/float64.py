"""The float64 meaning of a plan on torch's tensors, which NumPy's `FusionPlan.evaluate` has for arrays.

The meaning comes from the operators' own formulas. The sums of convolutions and products are written here
once more, as products of float64 matrices: no library's convolution is trusted with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from fuseplan.language.reduction import JOINS, Statistic, indices
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.spaces import Shape, Tensor, Tensors, leaves_of, space_of
from fuseplan.op import Elementwise
from fuseplan.ops.attention import Attending, AttentionGradient
from fuseplan.ops.conv import Conv
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.gradient import ConvWeightGradient, LinearWeightGradient
from fuseplan.ops.matmul import Product
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.parts import Parted
from fuseplan.ops.pool import Pool, taps_counted
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step
from fuseplan.scalar import fold

TEMPORARY_BYTES = 1 << 30  # of one product's float64 operand: larger ones are made of fewer images at once


def evaluated(plan: FusionPlan, tensors: Tensors, slip: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the plan's results by key; old values of updated results are in `tensors`.

    Statistics are off by `slip`, relative.
    """
    x = tensors["src"].double()
    results: dict[str, Tensor] = {}
    for step in plan.steps:
        if isinstance(step.op, Conv | Product | LinearWeightGradient | ConvWeightGradient):
            x = applied(step, x, tensors)
        elif isinstance(step.op, Attending):
            x, made = attended(step, step.op, x, tensors)
            results |= made
        elif isinstance(step.op, Embedding):
            x = looked_up(step, step.op, tensors["src"], tensors).double()
        else:
            x, made = formed(step, x, {**tensors, **results}, slip=slip)
            results |= made
    return x, results | {key: x[index] for key, index in plan.views.items()}


def looked_up(step: Step, op: Embedding, numbers: Tensor, tensors: Tensors) -> Tensor:
    """The rows of a table, NaN where it has none."""
    index = numbers.long()
    index = index + op.rows * ((index < 0) & op.from_end)
    is_row = (index >= 0) & (index < op.rows)
    table = tensors[step.keys["weight"]]
    return space_of(numbers).meanings["where"](is_row[..., None], table[index * is_row], float("nan"))


def attended(step: Step, op: Attending, x: Tensor, tensors: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of attention or its gradient, and its result by key, in the dtype of x."""
    made, space = op.attend(step.src), space_of(x)
    given = {each.name: tensors[each.key].to(x.dtype) for each in step.operands}
    if isinstance(op, AttentionGradient):
        known = {**given, "query": x}
        gradients = {name: known[name].new_zeros(known[name].shape) for name in ("query", "key", "value")}
        made.differentiate(known, gradients, space.meanings, x.new_tensor)
        return gradients[op.by], {each.key: gradients["value"] for each in step.results}
    dst, sums = x.new_empty(step.dst.shape), x.new_empty(x.shape[:3])
    largest = space.joins["maximum"]
    made.evaluate({**given, "query": x}, dst, sums, space.meanings, largest, x.new_tensor)
    return dst, {each.key: sums for each in step.results}


def applied(step: Step, x: Tensor, tensors: Tensors) -> Tensor:
    """One step's result, in float64.

    Raises:
        TypeError: there is no such sum here.
    """
    if isinstance(step.op, Elementwise | Pool):
        return formed(step, x, tensors)[0]
    if isinstance(step.op, LinearWeightGradient):
        grad = tensors[step.keys["grad"]].double()
        return grad.reshape(-1, step.op.features).T @ x.reshape(-1, x.shape[-1])
    if isinstance(step.op, ConvWeightGradient):
        return weight_gradient(step.op, step.src, x, tensors[step.keys["grad"]].double())
    if not isinstance(step.op, Conv | Product):
        raise TypeError(f"the float64 reference on a GPU does not support {step.op.name!r}")
    weight = tensors[step.keys["weight"]].double()
    if isinstance(step.op, Conv):
        return convolved(step.op, step.src, x, weight)
    matrix = weight.mT if step.op.transposed else weight
    return (x.reshape(x.shape[0], -1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


def formed(
    step: Step, x: Tensor, tensors: Tensors, values: Mapping[str, float] | None = None, slip: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of an operator by its formulas, and its results by key, in the dtype of x.

    Args:
        step: the operator at its place; none with a weight.
        x: its src.
        tensors: as `leaves_of` takes them.
        values: likewise.
        slip: relative error of each statistic.
    """
    op, leaves = step.op, leaves_of(step, x, tensors, values, x.dtype)
    meanings = {**space_of(x).meanings, "const": x.new_tensor}
    if isinstance(op, Pool):
        return pooled(op, step.src, x), {}
    if isinstance(op, Parted):
        return op.split(step.src).fill(x.new_empty(step.dst.shape), step.formulas, leaves, meanings), {}
    leaves |= {key: meanings["const"](indices(x.shape, along)) for key, along in step.indices.items()}
    if not isinstance(op, Normalization):
        out = fold(step.formulas[0], leaves, meanings).expand(x.shape)
        return out, {each.key: out for each in step.results}
    leaves |= {name: meanings["const"](places) for name, places in op.places(step.src).items()}
    for each in op.reductions(step.leaves, step.src):
        made = reduced(each, leaves, step, meanings)
        leaves |= {name: (1 + slip) * number for name, number in made.items()}
    space = space_of(x)
    found = op.summed(leaves, step.leaves, step.src, meanings, space.joins, space.broadcast)
    formulas = op.result_formulas(step.leaves, step.src)
    found |= {name: op.each_run(fold(each, leaves, meanings), step.src) for name, each in formulas.items()}
    results = {each.key: found[each.name].reshape(each.shape) for each in step.results}
    out = fold(step.formulas[0], leaves, meanings).expand(op.spread_shape(step.src))
    return out.reshape(step.dst.shape), results


def reduced(
    statistic: Statistic,
    leaves: Tensors,
    step: Step,
    meanings: Mapping[str, Callable[..., Any]] | None = None,
) -> dict[str, Tensor]:
    """The numbers of a statistic of a step by name: NumPy's arrays or torch's tensors, as the leaves."""
    assert isinstance(step.op, Normalization)
    space = space_of(leaves["x"])
    return step.op.reduced(
        statistic, leaves, step.src, meanings or space.meanings, space.joins, space.broadcast
    )


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


def weight_gradient(op: ConvWeightGradient, spec: TensorSpec, src: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a convolution's weight in float64: for each tap, one product of matrices.

    Args:
        op: its operator.
        spec: its src.
        src: (n, c, *spatial).
        grad: (n, features, *positions).
    """
    import torch

    window = op.window(spec)
    sides = [side for pair in reversed(window.padding) for side in pair]
    padded = torch.nn.functional.pad(src, sides)
    features = grad.transpose(0, 1).reshape(op.groups, op.features // op.groups, -1)
    dst = torch.empty(op.output(spec).shape, dtype=torch.float64, device=src.device)
    for tap, under in _taps(window.kernel, window.stride, window.dilation, window.dst):
        seen = padded[(slice(None), slice(None), *under)].transpose(0, 1)
        made = features @ seen.reshape(op.groups, spec.channels // op.groups, -1).mT
        dst[(slice(None), slice(None), *tap)] = made.reshape(dst.shape[:2])
    return dst


def pooled(op: Pool, spec: TensorSpec, src: Tensor) -> Tensor:
    """The pool of a tensor, in its dtype: one tap of the window after the other."""
    import torch

    window, join = op.window(spec), {"add": torch.add, "maximum": torch.maximum}[op.join]
    sides = [side for pair in reversed(window.padding) for side in pair]
    padded = torch.nn.functional.pad(src, sides, value=JOINS[op.join])
    taps = _taps(window.kernel, window.stride, window.dilation, window.dst)
    made = functools.reduce(join, (padded[(slice(None), slice(None), *under)] for _, under in taps))
    for axis, ends in enumerate(op.counted(spec)):
        counts = src.new_tensor(taps_counted(window, axis, ends))
        made = made / counts.reshape([-1 if each == 2 + axis else 1 for each in range(src.ndim)])
    return made


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

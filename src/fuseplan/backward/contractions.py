"""Gradients of products and convolutions: each is a product or a convolution over other axes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import GRADIENT, Walk, gradient, refused
from fuseplan.graph.node import Origin
from fuseplan.graph.ops import Flip, Permute, Reshape
from fuseplan.language.declarations import Operand
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.conv import CONVOLUTIONS, Conv
from fuseplan.ops.gradient import (
    Conv1dWeightGradient,
    Conv2dWeightGradient,
    Conv3dWeightGradient,
    ConvWeightGradient,
    LinearWeightGradient,
)
from fuseplan.ops.matmul import Matmul, Product
from fuseplan.plans.step import Step

WEIGHT_GRADIENTS: dict[int, type[ConvWeightGradient]] = {
    1: Conv1dWeightGradient,
    2: Conv2dWeightGradient,
    3: Conv3dWeightGradient,
}
BY_AXES: dict[int, type[Conv]] = {each.axes: each for each in CONVOLUTIONS}


@gradient.register
def _(op: Product, walk: Walk, step: Step, chain: Chain) -> Chain:
    (weight,) = step.operands
    if weight.key in walk.wrt:
        chain = walk.stored(chain, step)
        make = _of_batches if op.batched else _of_rows
        walk.gradients[weight.key] = make(op, walk, step, chain.start, f"{weight.key}_gradient")
    back = Matmul(step.src.channels, transposed=not op.transposed, batched=op.batched, precision=op.precision)
    return chain.then([Piece(back, (("weight", weight.key),))])


def _of_rows(op: Product, walk: Walk, step: Step, grad: str, key: str) -> str:
    """The gradient of a weight that all rows share: (features, c), or (c, features) by the other factor."""
    if op.transposed:
        made = LinearWeightGradient(op.features, op.precision)
        return walk.emit(walk.source(step).then([Piece(made, (("grad", grad),))]), key)
    made = LinearWeightGradient(step.src.channels, op.precision)
    return walk.emit(Chain(grad, step.dst, (Piece(made, (("grad", walk.before(step)),)),)), key)


def _of_batches(op: Product, walk: Walk, step: Step, grad: str, key: str) -> str:
    """The gradients of weights of their own: a product of the transposed factor for each."""
    if step.src.rank != 3:
        raise refused(step, f"a batched product of {step.src.rank} axes")
    first, second = (grad, walk.before(step)) if op.transposed else (walk.before(step), grad)
    spec, other = (step.dst, step.src) if op.transposed else (step.src, step.dst)
    turned = walk.named(f"{first}_transposed")
    walk.add(Permute((0, 2, 1)), (first,), (turned,), Origin(key, GRADIENT))
    batch, rows, columns = spec.shape
    steps = spec.element_strides
    names = ROWS[3]
    made = TensorSpec((batch, columns, rows), spec.dtype, strides=(steps[0], steps[2], steps[1]), names=names)
    back = Matmul(other.channels, batched=True, precision=op.precision)
    return walk.emit(Chain(turned, made, (Piece(back, (("weight", second),)),)), key)


def _same_fields(op: Conv) -> dict[str, Any]:
    return {each.name: getattr(op, each.name) for each in fields(op) if each.init}


@gradient.register
def _(op: Conv, walk: Walk, step: Step, chain: Chain) -> Chain:
    (weight,) = step.operands
    if weight.key in walk.wrt:
        chain = walk.stored(chain, step)
        made = WEIGHT_GRADIENTS[op.axes](**_same_fields(op))
        source = walk.source(step).then([Piece(made, (("grad", chain.start),))])
        walk.gradients[weight.key] = walk.emit(source, f"{weight.key}_gradient")
    if not walk.is_ahead(step):
        return chain
    window = op.window(step.src)
    if any(each > 1 for each in window.stride):
        raise refused(step, f"stride={op.stride}; the gradient of src is a convolution where the stride is 1")
    reach = [(kernel - 1) * dilation for kernel, dilation in zip(window.kernel, window.dilation, strict=True)]
    padding = tuple(
        (most - low, most - high) for most, (low, high) in zip(reach, window.padding, strict=True)
    )
    if any(side < 0 for pair in padding for side in pair):
        raise refused(step, f"padding={op.padding}, as far as the windows reach")
    back = BY_AXES[op.axes](**{**_same_fields(op), "features": step.src.channels, "padding": padding})
    return chain.then([Piece(back, (("weight", _turned(op, walk, weight)),))])


def _turned(op: Conv, walk: Walk, weight: Operand) -> str:
    """The weight (features, c/groups, *kernel) as (c, features/groups, *kernel), its taps turned around."""
    features, channels, *kernel = weight.shape
    grouped = (op.groups, features // op.groups, channels, *kernel)
    spatial = tuple(range(3, len(grouped)))
    turned = (op.groups * channels, features // op.groups, *kernel)
    name = weight.key
    nodes = (
        Reshape(grouped),
        Permute((0, 2, 1, *spatial)),
        Reshape(turned),
        Flip(tuple(range(2, len(turned)))),
    )
    for node in nodes:
        made = walk.named(f"{weight.key}_turned")
        walk.add(node, (name,), (made,), Origin(f"{weight.key} as the data gradient's", GRADIENT))
        name = made
    return name

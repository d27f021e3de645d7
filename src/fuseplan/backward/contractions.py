"""Gradients of products and convolutions: each is a product or a convolution over other axes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.graph.ops import Permute
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.conv import CONVOLUTIONS, Conv, OfConvolution
from fuseplan.ops.gradient import (
    Conv1dWeightGradient,
    Conv2dWeightGradient,
    Conv3dWeightGradient,
    ConvWeightGradient,
    LinearWeightGradient,
)
from fuseplan.ops.matmul import Matmul, Product
from fuseplan.ops.transposed import TRANSPOSED, ConvTranspose
from fuseplan.plans.step import Step

WEIGHT_GRADIENTS: dict[int, type[ConvWeightGradient]] = {
    1: Conv1dWeightGradient,
    2: Conv2dWeightGradient,
    3: Conv3dWeightGradient,
}


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
    back = Matmul(other.channels, batched=True, precision=op.precision)
    return turned_product(walk, (first, spec), second, back, key)


def turned_product(walk: Walk, first: tuple[str, TensorSpec], second: str, back: Matmul, wanted: str) -> str:
    """The products of the transposes of matrices (n, rows, columns) with as many (n, rows, features)."""
    name, spec = first
    turned = walk.viewed(name, [Permute((0, 2, 1))], f"{name}_transposed")
    batch, rows, columns = spec.shape
    steps = spec.element_strides
    strides = (steps[0], steps[2], steps[1])
    made = TensorSpec((batch, columns, rows), spec.dtype, strides=strides, names=ROWS[3])
    return walk.emit(Chain(turned, made, (Piece(back, (("weight", second),)),)), wanted)


def _same_fields(op: OfConvolution) -> dict[str, Any]:
    return {name: getattr(op, name) for name in ("kernel", "stride", "dilation", "groups", "precision")}


@gradient.register
def _(op: Conv, walk: Walk, step: Step, chain: Chain) -> Chain:
    """src's is the transposed convolution, as long as src; elements behind the last window have none."""
    (weight,) = step.operands
    window = op.window(step.src)
    same = {**_same_fields(op), "padding": window.padding}
    if weight.key in walk.wrt:
        chain = walk.stored(chain, step)
        made = WEIGHT_GRADIENTS[op.axes](op.features, **same)
        source = walk.source(step).then([Piece(made, (("grad", chain.start),))])
        walk.gradients[weight.key] = walk.emit(source, f"{weight.key}_gradient")
    back = TRANSPOSED[op.axes - 1](step.src.channels, **same)
    short = zip(step.src.spatial, back.window(step.dst).dst, strict=True)
    back = replace(back, output_padding=tuple(extent - made for extent, made in short))
    return chain.then([Piece(back, (("weight", weight.key),))])


@gradient.register
def _(op: ConvTranspose, walk: Walk, step: Step, chain: Chain) -> Chain:
    """src's is the convolution; the weight's is its weight's, of the output's gradient."""
    (weight,) = step.operands
    same = {**_same_fields(op), "padding": op.window(step.src).padding}
    back = CONVOLUTIONS[op.axes - 1](step.src.channels, **same)
    if back.window(step.dst).dst != step.src.spatial:
        raise refused(step, f"output_padding={op.output_padding}, as long as a stride")
    if weight.key in walk.wrt:
        chain = walk.stored(chain, step)
        made = WEIGHT_GRADIENTS[op.axes](step.src.channels, **same)
        source = Chain(chain.start, step.dst, (Piece(made, (("grad", walk.before(step)),)),))
        walk.gradients[weight.key] = walk.emit(source, f"{weight.key}_gradient")
    return chain.then([Piece(back, (("weight", weight.key),))])

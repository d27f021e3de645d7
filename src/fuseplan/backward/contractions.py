"""Gradients of products and convolutions: each is a product or a convolution over other axes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.graph.ops import Flip, Pad, Permute, Reshape, Slice
from fuseplan.language.declarations import Operand
from fuseplan.language.layouts import ROWS, dense
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.activation import Identity
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
from fuseplan.ops.windows import Window
from fuseplan.plans.step import Step

NARROW = 16  # channels of a group: as transposed features, fewer leave lanes of a vector without work
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
    """src's is the transposed convolution, as long as src; elements behind the last window have none.

    With few channels in a group, a convolution has those of neighbouring places as features, and a copy puts
    them into their places: on a Zen 4, 0.24 of the time of 96 groups, 0.2 of that of 3 channels and kernel 7.
    """
    (weight,) = step.operands
    window = op.window(step.src)
    same = {**_same_fields(op), "padding": window.padding}
    if weight.key in walk.wrt:
        chain = walk.stored(chain, step)
        own = WEIGHT_GRADIENTS[op.axes](op.features, **same)
        source = walk.source(step).then([Piece(own, (("grad", chain.start),))])
        walk.gradients[weight.key] = walk.emit(source, f"{weight.key}_gradient")
    if not walk.is_ahead(step):
        return chain
    is_narrow = op.stride != 1 and step.src.channels // op.groups < NARROW
    back = _back(op, step) if is_narrow else None
    if back is not None:
        chain = chain.then([Piece(back, (("weight", _turned(op, walk, weight, window)),))])
        return _spread(op, walk, step, chain)
    made = TRANSPOSED[op.axes - 1](step.src.channels, **same)
    short = zip(step.src.spatial, made.window(step.dst).dst, strict=True)
    made = replace(made, output_padding=tuple(extent - out for extent, out in short))
    return chain.then([Piece(made, (("weight", weight.key),))])


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


def _back(op: Conv, step: Step) -> Conv | None:
    """The convolution of the output's gradient that gives src's.

    Places of src that are a stride apart read the same taps. With a stride s along an axis, the features are
    those of s neighbouring places, each with its own taps, and the others 0. None with dilation along such an
    axis, or padding beyond the window.
    """
    window = op.window(step.src)
    dilated = [each for each, stride in zip(window.dilation, window.stride, strict=True) if stride > 1]
    if any(each > 1 for each in dilated):
        return None
    kernel, padding = [], []
    for axis, stride in enumerate(window.stride):
        low, high = _ends(op, axis, window)
        kernel.append((low + window.kernel[axis] + high) // stride)
        reach, front = (kernel[-1] - 1) * window.dilation[axis], -(-window.padding[axis][0] // stride)
        padding.append((reach - front, -(-step.src.spatial[axis] // stride) - window.dst[axis] + front))
    if any(side < 0 for pair in padding for side in pair):
        return None
    features = step.src.channels * prod(window.stride)
    same = {**_same_fields(op), "kernel": tuple(kernel), "stride": 1, "padding": tuple(padding)}
    return CONVOLUTIONS[op.axes - 1](features, **same)


def _ends(op: Conv, axis: int, window: Window) -> tuple[int, int]:
    """Taps of 0 in front of an axis's and behind them: as many as make each place's the same number."""
    stride = window.stride[axis]
    low = -window.padding[axis][0] % stride
    return low, -(window.kernel[axis] + low) % stride


def _turned(op: Conv, walk: Walk, weight: Operand, window: Window) -> str:
    """The weight (features, c/groups, *kernel) as (c * strides, features/groups, *taps), its taps turned."""
    features, channels, *kernel = weight.shape
    ends = [_ends(op, axis, window) for axis in range(op.axes)]
    own = features // op.groups
    split, steps, taps = [op.groups, own, channels], [], []
    for stride, extent, (low, high) in zip(window.stride, kernel, ends, strict=True):
        taps.append(len(split))
        steps.append(len(split) + 1)
        split += [(low + extent + high) // stride, stride]
    turned = (op.groups * channels * prod(window.stride), own, *(split[place] for place in taps))
    nodes = (
        *([Pad(((0, 0), (0, 0), *ends))] if any(map(any, ends)) else []),
        Reshape(tuple(split)),
        Permute((0, 2, *steps, 1, *taps)),
        Reshape(turned),
        Flip(tuple(range(2, len(turned)))),
    )
    return walk.viewed(weight.key, nodes, f"{weight.key}_turned")


def _spread(op: Conv, walk: Walk, step: Step, chain: Chain) -> Chain:
    """src's gradient from the features of neighbouring places, each in its place."""
    src, strides = step.src, op.window(step.src).stride
    order = sorted(range(src.rank), key=lambda axis: -src.element_strides[axis])  # as src lies in memory
    back = chain.pieces[-1].op.output(chain.spec)
    split: list[int] = []
    places: dict[int, int] = {}
    for axis in order:
        places[axis] = len(split)
        split += [src.channels, *strides] if axis == 1 else [back.shape[axis]]
    pairs = [[places[axis], *([places[1] + axis - 1] if axis > 1 else [])] for axis in order]
    whole = [prod(split[place] for place in pair) for pair in pairs]
    cuts = [
        Slice(place, 0, src.shape[axis]) for place, axis in enumerate(order) if whole[place] > src.shape[axis]
    ]
    undone = tuple(map(order.index, range(src.rank)))
    nodes = (
        Permute(tuple(order)),
        Reshape(tuple(split)),
        Permute(tuple(place for pair in pairs for place in pair)),
        Reshape(tuple(whole)),
        *cuts,
        Permute(undone),
    )
    name = walk.viewed(walk.value(chain, f"grad_{op.name}_steps"), nodes, f"grad_{op.name}")
    lies = dense(tuple(whole), range(src.rank))
    spec = TensorSpec(src.shape, src.dtype, strides=[lies[place] for place in undone], names=src.names)
    return Chain(name, spec, (Piece(Identity()),) if cuts else ())

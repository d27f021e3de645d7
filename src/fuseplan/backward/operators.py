"""The gradients of contractions, attention and operators with statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.graph.ops import Flip, Pad, Permute, Reshape, Slice
from fuseplan.language.declarations import Operand
from fuseplan.language.layouts import ROWS, dense
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op
from fuseplan.ops.activation import Identity
from fuseplan.ops.affine import Mul
from fuseplan.ops.attention import Attention, AttentionGradient
from fuseplan.ops.conv import CONVOLUTIONS, TRANSPOSED, Conv, ConvTranspose, OfConvolution
from fuseplan.ops.conversion import Cast
from fuseplan.ops.gradient import WEIGHT_GRADIENTS, LinearWeightGradient
from fuseplan.ops.losses import CrossEntropy, CrossEntropyBackward
from fuseplan.ops.matmul import Matmul, Product
from fuseplan.ops.normalization import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from fuseplan.ops.reductions import LogSoftmax, Softmax, Sum
from fuseplan.ops.row_gradients import (
    GroupNormBackward,
    InstanceNormBackward,
    LayerNormBackward,
    LogSoftmaxBackward,
    RmsNormBackward,
    SoftmaxBackward,
)
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining
from fuseplan.ops.windows import Window
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step

NARROW = 16  # channels of a group: as transposed features, fewer leave lanes of a vector without work


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
        own = WEIGHT_GRADIENTS[op.axes - 1](op.features, **same)
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
        made = WEIGHT_GRADIENTS[op.axes - 1](step.src.channels, **same)
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


@gradient.register
def _(op: Attention, walk: Walk, step: Step, chain: Chain) -> Chain:
    """delta is the sum of gradient times output over a row; then key and value, and the queries."""
    if op.nan_unseen:
        raise refused(step, "the gradient of NaN, which queries without a key give")
    if op.rotary:
        raise refused(step, "the gradient through rotary, which is an operator of its own too")
    for each in walk.wanted(step):
        if each.name not in ("key", "value"):
            raise refused(step, f"the gradient of {each.key}")
    grad, wide = walk.stored(chain, step), step.src.compute_dtype
    products = grad.then([Piece(Mul(), (("other", walk.after(step)),))])
    if step.dst.dtype != wide:
        products = products.then([Piece(Cast(wide))])
    given = {
        **walk.operands(step),
        "lse": step.keys["lse"],
        "delta": walk.emit(products.then([Piece(Sum(-1))]), "delta"),
        "grad": grad.start,
    }
    fields: dict[str, Any] = {
        name: each
        for name, each in op.attributes().items()
        if name not in ("return_lse", "nan_unseen", "rotary", "interleaved")
    }
    back = AttentionGradient(**fields)
    query = Chain(walk.before(step), step.src)
    wanted = {each.name: each.key for each in walk.wanted(step)}
    if wanted:
        by_key = Piece(replace(back, by="key"), tuple(given.items()))
        walk.emit(query.then([by_key]), "key_gradient")
        made = dict(zip(("key", "value"), walk.nodes[-1].outputs, strict=True))
        walk.gradients |= {key: made[name] for name, key in wanted.items()}
    return query.then([Piece(back, tuple(given.items()))]) if walk.is_ahead(step) else chain


def giving_lse(plan: FusionPlan, walk: Walk) -> FusionPlan:
    """The plan, whose attention gives the logarithms of its sums where its gradients are computed."""
    ops = [
        replace(step.op, return_lse=True)
        if isinstance(step.op, Attention) and (walk.wanted(step) or walk.is_ahead(step))
        else step.op
        for step in plan
    ]
    return FusionPlan(plan.src, *ops)


BACKWARD: dict[type[Op], Callable[..., Op]] = {
    LayerNorm: LayerNormBackward,
    RmsNorm: RmsNormBackward,
    GroupNorm: GroupNormBackward,
    InstanceNorm: InstanceNormBackward,
    Softmax: SoftmaxBackward,
    LogSoftmax: LogSoftmaxBackward,
}


def _backward(op: Op) -> Op:
    """The gradient of an operator by src: an operator with the same fields."""
    return BACKWARD[type(op)](**{name: value for name, value, _ in op.written()})


@gradient.register
def _(op: LayerNorm | RmsNorm | GroupNorm | InstanceNorm, walk: Walk, step: Step, chain: Chain) -> Chain:
    """The gradients of shift and scale, sums over the rows, and of src, by the statistics of a row.

    Where rows lie as runs of memory, one kernel gives all of them. Of other rows, and of groups of an image,
    the scale's reads the normalized rows, which a kernel of their own computes again times the gradient.
    """
    at, plain, backward = walk.before(step), replace(op, affine=False), _backward(op)
    if any(each.name == "scale" for each in walk.wanted(step)) and _gives_sums(backward, step):
        return _at_once(walk, step, chain, backward)
    for operand in walk.wanted(step):
        if operand.name == "shift":
            chain = walk.operand(step, operand, (), chain, is_read_again=True)
            continue
        chain = walk.stored(chain, step)
        wide = [Piece(Cast(operand.dtype))] if operand.dtype != step.dst.dtype else []
        again = Chain(
            at, step.src, (Piece(plain), Piece(Mul(), (("other", chain.start),)), *wide), plain.name
        )
        rows = Chain(walk.emit(again, f"{operand.key}_products"), step.dst.with_dtype(operand.dtype))
        walk.operand(step, operand, (), rows, is_read_again=False)
    return chain.then([Piece(backward, (("input", at), *walk.operands(step).items()))])


def _gives_sums(backward: Op, step: Step) -> bool:
    """Whether the gradient of src has those of scale and shift as results: of rows that are runs."""
    axis = step.src.channel_axis
    is_row = step.src.shape[axis] > 1 and step.src.element_strides[axis] == 1
    return is_row and isinstance(backward, LayerNormBackward | RmsNormBackward)


def _at_once(walk: Walk, step: Step, chain: Chain, backward: Op) -> Chain:
    """All gradients of a norm of rows from one kernel, which further operators on src's may follow."""
    assert isinstance(backward, LayerNormBackward | RmsNormBackward)  # by `_gives_sums`
    given = (("input", walk.before(step)), *walk.operands(step).items())
    gives = tuple((f"{each.name}_gradient", each.key) for each in walk.wanted(step))
    chain = chain.then([Piece(replace(backward, gradients=True), given, gives)])
    return chain if walk.is_ahead(step) else walk.stored(chain, step)


@gradient.register
def _(op: BatchNormTraining, walk: Walk, step: Step, chain: Chain) -> Chain:
    backward = BatchNormBackward(mode=op.mode)
    if not op.saved:
        backward = replace(backward, statistics="recomputed", epsilon=op.epsilon)
    saved = {"mean": "saved_mean", "inverse_variance": "saved_inverse_variance"} if op.saved else {}
    given = walk.operands(step) | {name: step.keys[result] for name, result in saved.items()}
    pieces = [Piece(backward, (("input", walk.before(step)), *given.items()))]
    made = walk.emit(chain.then(pieces), f"grad_{step.op.name}_input")
    by_scale, by_shift = walk.nodes[-1].outputs[-2:]
    found = {"scale": by_scale, "shift": by_shift}
    walk.gradients |= {each.key: found[each.name] for each in walk.wanted(step)}
    return Chain(made, step.src)


@gradient.register
def _(op: Softmax | LogSoftmax, walk: Walk, step: Step, chain: Chain) -> Chain:
    return chain.then([Piece(_backward(op), (("result", walk.after(step)),))])


@gradient.register
def _(op: CrossEntropy, walk: Walk, step: Step, chain: Chain) -> Chain:
    back = CrossEntropyBackward(op.label_smoothing, op.ignore_index, op.z_loss, op.index_dtype)
    (lse,) = step.results
    wide = chain.then([Piece(Cast(lse.dtype))] if lse.dtype != step.dst.dtype else [])
    given = walk.operands(step) | {"lse": step.keys["lse"], "gradient": walk.stored(wide, step).start}
    return Chain(walk.before(step), step.src, (Piece(back, tuple(given.items())),))

"""Gradients of operators with statistics, and of operators that read an axis in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.op import Op
from fuseplan.ops.affine import Mul
from fuseplan.ops.conversion import Cast
from fuseplan.ops.groups import GroupNorm, InstanceNorm
from fuseplan.ops.losses import CrossEntropy, CrossEntropyBackward
from fuseplan.ops.parts import Glu, GluBackward, Rotary
from fuseplan.ops.reductions import LogSoftmax, Softmax
from fuseplan.ops.row_gradients import (
    GroupNormBackward,
    InstanceNormBackward,
    LayerNormBackward,
    LogSoftmaxBackward,
    RmsNormBackward,
    SoftmaxBackward,
)
from fuseplan.ops.rows import LayerNorm, RmsNorm
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining
from fuseplan.plans.step import Step

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


@gradient.register
def _(op: Rotary, walk: Walk, step: Step, chain: Chain) -> Chain:
    if walk.wanted(step):
        raise refused(step, "the gradients of cos and sin")
    if op.whole:
        raise refused(step, "the gradient where each element has a cos and sin of its own")
    back = Piece(replace(op, inverse=not op.inverse), tuple(walk.operands(step).items()))
    return chain.then([back])


@gradient.register
def _(op: Glu, walk: Walk, step: Step, chain: Chain) -> Chain:
    back = GluBackward(op.activation, op.gate, op.axis, op.interleaved)
    return walk.source(step).then([Piece(back, (("grad", walk.stored(chain, step).start),))])

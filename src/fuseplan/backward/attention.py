"""The gradients of attention: products, and the gradient of softmax, on scores that are in memory."""

from __future__ import annotations

from fuseplan.backward.contractions import turned_product
from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.graph.ops import Reshape
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.attention import Attention
from fuseplan.ops.expression import Expression
from fuseplan.ops.matmul import Matmul
from fuseplan.ops.reductions import Softmax
from fuseplan.ops.row_gradients import SoftmaxBackward
from fuseplan.plans.step import Step

HIDING = ("is_causal", "window", "is_padded", "mask_axes", "bias_axes", "softcap")


@gradient.register
def _(op: Attention, walk: Walk, step: Step, chain: Chain) -> Chain:
    """Scores and their softmax are computed again, for each head of key and value with all its queries."""
    hiding = [name for name in HIDING if getattr(op, name)]
    if hiding:
        raise refused(step, f"attention with {' and '.join(hiding)}")
    made = op.attend(step.src)
    if step.index and step.src.element_strides != TensorSpec(step.src.shape, step.src.dtype).element_strides:
        raise refused(step, f"{step.src}, behind operators: the gradient lies as bhsd")
    count, rows = made.batch * made.key_heads, made.heads // made.key_heads * made.queries
    dtype, named = step.src.dtype, walk.operands(step)

    def spec(columns: int) -> TensorSpec:
        return TensorSpec((count, rows, columns), dtype, names=ROWS[3])

    def heads(name: str, *shape: int) -> str:
        return walk.viewed(name, [Reshape((count, *shape))], f"{name}_heads")

    def product(src: str, weight: str, columns: int, wanted: str, again: str = "") -> str:
        back = Matmul(made.keys, transposed=True, batched=True)
        return walk.emit(Chain(src, spec(columns), (Piece(back, (("weight", weight),)),), again), wanted)

    query = heads(walk.before(step), rows, made.size)
    key = heads(named["key"], made.keys, made.size)
    value = heads(named["value"], made.keys, made.features)
    grad = heads(walk.stored(chain, step).start, rows, made.features)
    scale = Piece(Expression("x * scale", scale=made.scale))
    scores = product(query, key, made.size, "scores", "matmul")
    again = Chain(scores, spec(made.keys), (scale, Piece(Softmax())), "elementwise -> softmax")
    shares = walk.emit(again, "shares")
    factors = {"value": (shares, grad, made.features)}
    by_shares = product(grad, value, made.features, "grad_shares")
    normed = Piece(SoftmaxBackward(), (("result", shares),))
    by_scores = walk.emit(Chain(by_shares, spec(made.keys), (normed, scale)), "grad_scores")
    factors["key"] = (by_scores, query, made.size)
    for each in walk.wanted(step):
        first, second, columns = factors[each.name]
        back, wanted = Matmul(columns, batched=True), f"{each.key}_gradient"
        whole = turned_product(walk, (first, spec(made.keys)), second, back, f"{wanted}_heads")
        walk.gradients[each.key] = walk.viewed(whole, [Reshape(each.shape)], wanted)
    if not walk.is_ahead(step):
        return chain
    last = Piece(Matmul(made.size, batched=True), (("weight", key),))
    whole = walk.emit(Chain(by_scores, spec(made.keys), (last,)), "grad_attention_heads")
    name = walk.viewed(whole, [Reshape(step.src.shape)], "grad_attention")
    return Chain(name, TensorSpec(step.src.shape, dtype, names=step.src.names))

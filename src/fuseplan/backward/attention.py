"""The gradients of attention: kernels that compute the scores again, block by block, from the saved sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fuseplan.backward.factors import Chain, Piece
from fuseplan.backward.walk import Walk, gradient, refused
from fuseplan.ops.affine import Mul
from fuseplan.ops.attention import Attention, AttentionGradient
from fuseplan.ops.conversion import Cast
from fuseplan.ops.reductions import Sum
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step


@gradient.register
def _(op: Attention, walk: Walk, step: Step, chain: Chain) -> Chain:
    """delta is the sum of gradient times output over a row; then key and value, and the queries."""
    if op.nan_unseen:
        raise refused(step, "the gradient of NaN, which queries without a key give")
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
        name: each for name, each in op.attributes().items() if name not in ("return_lse", "nan_unseen")
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

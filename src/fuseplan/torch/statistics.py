"""Rows of the table for operators with statistics: reductions and norms."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from fuseplan.graph.ops import Reduce
from fuseplan.graph.why import LeftError, Why
from fuseplan.op import Op
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.normalization import GroupNorm, InstanceNorm, LayerNorm, RmsNorm
from fuseplan.ops.reductions import Amax, Amin, Logsumexp, Mean, Prod, Removing, Sum, Var
from fuseplan.torch.given import Given
from fuseplan.torch.layers import usual_epsilon
from fuseplan.torch.lying import added

aten = torch.ops.aten
Row = Callable[[Given], str]
NORMS = (aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default)
# Of linalg_vector_norm by its order: the formula of an element, the statistic, and the formula of the result.
LENGTHS: dict[float, tuple[str, type[Removing], str]] = {
    1.0: ("abs(a)", Sum, ""),
    2.0: ("a * a", Sum, "sqrt(a)"),
    math.inf: ("abs(a)", Amax, ""),
}


def flatten_norms(graph: fx.Graph) -> None:
    """Writes norms over several axes as norms of rows, which plans have: the elements are the same.

    before: `layer_norm(x, (h, w), weight, bias)`
    after: `layer_norm(x.reshape(-1, h * w), (h * w,), weight.reshape(-1), bias.reshape(-1)).reshape(x.shape)`
    """
    norms = [each for each in graph.nodes if each.target in NORMS and not each.kwargs]
    for node in (each for each in norms if len(each.args[1]) > 1):
        src, inner, *rest = node.args
        shape, is_several = src.meta["val"].shape, node.target is aten.native_layer_norm.default
        results = [each for each in node.users if not is_several or each.args[1] == 0]
        if not all(type(each) is int for each in shape) or len(results) < len(node.users):
            continue
        if node.target is aten.rms_norm.default and not src.meta["val"].is_contiguous():
            continue  # torch's result has the strides of src
        count = math.prod(inner)
        with graph.inserting_before(node):
            flat = added(graph, aten.reshape.default, src, [math.prod(shape[: -len(inner)]), count])
            rest = [
                added(graph, aten.reshape.default, each, [count]) if isinstance(each, fx.Node) else each
                for each in rest
            ]
        node.args = (flat, [count], *rest)
        with flat.meta["val"].fake_mode:
            node.meta["val"] = node.target(*fx.map_arg(node.args, lambda each: each.meta["val"]))
        for each in results if is_several else [node]:
            each.meta["val"] = node.meta["val"][0] if is_several else node.meta["val"]
            with graph.inserting_after(each):
                made = added(graph, aten.reshape.default, each, [*shape])
            each.replace_all_uses_with(made, delete_user_cb=partial(operator.is_not, made))


def _reduction(make: type[Removing]) -> Row:
    return lambda given: _over(given, make, given.tensor("self"))


def _over(given: Given, make: type[Removing], src: str, **fields: Any) -> str:
    """A statistic over axes; over all of them, where torch is given none."""
    if given.result.dtype not in (given.type_of(src).dtype, "?"):  # of one that gives places too
        raise LeftError(Why.DTYPE, given.result)
    rank, dim = len(given.shape(src)), given.argument("dim") if "dim" in given.names else None
    told = [dim] if isinstance(dim, int) else dim
    axes = tuple(sorted({axis % rank for axis in told or range(rank)}))
    keepdim = "keepdim" in given.names and bool(given.argument("keepdim"))
    if not given.type_of(src).is_spec and make in (Mean, Sum, Amax, Amin):
        return given.add(Reduce(make.name, axes, keepdim), src)
    return given.layer(make(axes, keepdim=keepdim, **fields), src)


def _variance(given: Given) -> str:
    if "unbiased" in given.names:
        correction = int(given.argument("unbiased"))
    else:
        correction = given.argument("correction") if given.has("correction") else 1
    return _over(given, Var, given.tensor("self"), correction=correction)


def _deviation(given: Given) -> str:
    return given.formula("sqrt(a)", _variance(given))


def _length(given: Given) -> str:
    """The norm of the vectors along axes."""
    order = given.number("ord")
    if order not in LENGTHS:
        raise LeftError(Why.NOT_IN_TABLE, f"linalg_vector_norm of the order {order}")
    element, make, result = LENGTHS[order]
    made = _over(given, make, given.formula(element, given.tensor("self")))
    return given.formula(result, made) if result else made


def _batch_norm(given: Given) -> str:
    if "training" in given.names and given.argument("training"):
        raise LeftError(Why.NOT_IN_TABLE, "batch norm in training")
    if not given.has("running_mean") or not given.has("weight") or not given.has("bias"):
        raise LeftError(Why.NOT_IN_TABLE, "batch norm without all of its tensors")
    operands = (given.tensor(name) for name in ("running_mean", "running_var", "weight", "bias"))
    return given.layer(BatchNorm(epsilon=given.number("eps")), given.tensor("input"), *operands)


def _rows(make: Callable[..., Op], names: tuple[str, ...], has_default: bool) -> Row:
    def row(given: Given) -> str:
        """A norm of the last axis; a weight without a bias is a factor behind it."""
        if len(given.integers("normalized_shape")) != 1:
            raise LeftError(Why.SHAPE, "a norm over several axes")
        is_usual = has_default and not given.has("eps")
        epsilon = usual_epsilon(given.node.meta["val"].dtype) if is_usual else given.number("eps")
        src, held = given.tensor("input"), [name for name in names if given.has(name)]
        operands = [given.tensor(name) for name in held]
        if held != ["weight"] or len(names) == 1:
            return given.layer(make(affine=bool(held), epsilon=epsilon), src, *operands)
        return given.formula("a * b", given.layer(make(affine=False, epsilon=epsilon), src), *operands)

    return row


def _affine(given: Given) -> list[str]:
    """The tensors of a norm: both, or none."""
    held = [name for name in ("weight", "bias") if given.has(name)]
    if len(held) == 1:
        raise LeftError(Why.NOT_IN_TABLE, "a norm with a weight and no bias")
    return [given.tensor(name) for name in held]


def _group_norm(groups: str) -> Row:
    def row(given: Given) -> str:
        operands, count = _affine(given), given.argument(groups)
        op = GroupNorm(count, affine=bool(operands), epsilon=given.number("eps"))
        return given.layer(op, given.tensor("input"), *operands)

    return row


def _instance_norm(given: Given) -> str:
    if not given.argument("use_input_stats") or given.has("running_mean"):
        raise LeftError(Why.NOT_IN_TABLE, "an instance norm with running statistics")
    operands = _affine(given)
    op = InstanceNorm(affine=bool(operands), epsilon=given.number("eps"))
    return given.layer(op, given.tensor("input"), *operands)


STATISTICS: dict[Any, Row] = {
    **dict.fromkeys((aten.mean.dim, aten.mean.default), _reduction(Mean)),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), _reduction(Sum)),
    **dict.fromkeys((aten.amax.default, aten.max.dim, aten.max.default), _reduction(Amax)),
    **dict.fromkeys((aten.amin.default, aten.min.dim, aten.min.default), _reduction(Amin)),
    **dict.fromkeys((aten.prod.dim_int, aten.prod.default), _reduction(Prod)),
    aten.logsumexp.default: _reduction(Logsumexp),
    **dict.fromkeys((aten.var.dim, aten.var.correction, aten.var.default), _variance),
    **dict.fromkeys((aten.std.dim, aten.std.correction, aten.std.default), _deviation),
    aten.linalg_vector_norm.default: _length,
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.layer_norm.default: _rows(LayerNorm, ("weight", "bias"), False),
    aten.native_layer_norm.default: _rows(LayerNorm, ("weight", "bias"), False),
    aten.rms_norm.default: _rows(RmsNorm, ("weight",), True),
    aten.group_norm.default: _group_norm("num_groups"),
    aten.native_group_norm.default: _group_norm("group"),
    aten.instance_norm.default: _instance_norm,
}

"""FlexAttention of torch, whose functions of scores and masks are read as a formula that attention takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch import fx

from fuseplan.errors import PlanError
from fuseplan.graph.attention import attention
from fuseplan.graph.why import LeftError, Why
from fuseplan.language.formula import parse_expression
from fuseplan.measure.spaces import arithmetic_of
from fuseplan.ops.attention import AXES, Attention
from fuseplan.scalar import (
    NUMPY,
    Scalar,
    call,
    const,
    exp,
    fold,
    index,
    leaf,
    maximum,
    minimum,
    neg,
    relu,
    scalar,
    sigmoid,
    sqrt,
    tanh,
    text,
    where,
)
from fuseplan.torch.given import Given
from fuseplan.torch.lying import added
from fuseplan.torch.masks import LARGEST, constant

aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
IMAGE, HEAD, QUERY, KEY = (index(axis) for axis in AXES)
AND = (aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor)

torch.library.define(
    "fuseplan::flex_attention",
    "(Tensor query, Tensor key, Tensor value, str score, bool is_causal, int window, float scale) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: str,
    is_causal: bool,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Torch's operators, one after another; the result lies in the order of the query, as torch's own."""
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    group = query.shape[1] // key.shape[1]
    key, value = (each.to(wide).repeat_interleave(group, 1) for each in (key, value))
    scores = query.to(wide) @ key.mT * scale
    places = {
        f"index({axis})": torch.arange(extent, device=query.device, dtype=wide).view(
            [-1 if each == axis else 1 for each in AXES]
        )
        for axis, extent in zip(AXES, scores.shape, strict=True)
    }
    if score:
        scores = fold(parse_expression(score), {"x": scores, **places}, arithmetic_of(scores).table).to(wide)
    apart = places["index(s)"] - places["index(t)"]
    hidden = (apart < 0) if is_causal else torch.zeros_like(apart, dtype=torch.bool)
    hidden = hidden | (apart.abs() >= window) if window else hidden
    scores = scores.masked_fill(hidden, -inf)
    is_none = scores.amax(-1, keepdim=True) == -inf
    made = _output(query, value)
    return made.copy_(scores.masked_fill(is_none, 0).softmax(-1).masked_fill(is_none, 0) @ value)


def _output(query: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    order = sorted(range(4), key=query.stride().__getitem__, reverse=True)
    shape = (*query.shape[:3], value.shape[3])
    return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)


torch.library.impl("fuseplan::flex_attention", ("CPU", "CUDA"), _computed)
torch.library.register_fake(
    "fuseplan::flex_attention", lambda query, _, value, *fields: _output(query, value, *fields)
)
READ = torch.ops.fuseplan.flex_attention.default


def read_scores(graph: fx.Graph, constants: Mapping[str, torch.Tensor] | None = None) -> None:
    """Puts an operator with a formula in the place of each FlexAttention whose functions are read.

    Args:
        graph: of functional ATen operators.
        constants: tensors that placeholders of the graph stand for in every call.
    """
    found = graph.find_nodes(op="call_function", target=FLEX)
    for node in found:
        try:
            fields = _fields(node, constants or {})
        except (LeftError, PlanError) as error:
            node.meta["left"] = str(error)
            continue
        with graph.inserting_before(node):
            made = added(graph, READ, *node.args[:3], *fields)
        for first in (user for user in node.users if user.args[1] == 0):
            first.replace_all_uses_with(made)
    if found:
        graph.eliminate_dead_code()


def flexible(given: Given) -> str:
    """Attention with a formula."""
    fields = {name: given.argument(name) for name in ("score", "is_causal", "window", "scale")}
    names = tuple(given.tensor(name) for name in ("query", "key", "value"))
    if fields["scale"] == 1 / given.shape(names[0])[3] ** 0.5:
        fields["scale"] = 0.0  # the usual one
    return attention(given, names, None, Attention(**fields))  # type: ignore[arg-type]


def left(given: Given) -> str:
    """Why a FlexAttention stays torch's.

    Raises:
        LeftError: always.
    """
    raise LeftError(Why.FORMULA, given.node.meta.get("left", "a score_mod or mask_mod of FlexAttention"))


def _fields(node: fx.Node, constants: Mapping[str, torch.Tensor]) -> tuple[str, bool, int, float]:
    """The score's formula, whether it is causal, its window and its scale.

    Raises:
        LeftError, PlanError: a function has no formula, the blocks of a mask are others than its function
            says, or the sums of exponentials are wanted.
    """
    query, key, _, score_mod, blocks, scale, _, buffers, mask_buffers = node.args
    if not all(type(each) is int for each in (*query.meta["val"].shape, *key.meta["val"].shape)):
        raise LeftError(Why.SHAPE, "flex_attention with open extents")
    if buffers or mask_buffers:
        raise LeftError(Why.FORMULA, "a score_mod or mask_mod that reads tensors")
    if any(user.args[1] != 0 and user.users for user in node.users):
        raise LeftError(Why.NOT_IN_TABLE, "a further result of flex_attention")
    score = formula_of(_graph(score_mod), (leaf("x"), IMAGE, HEAD, QUERY, KEY))
    terms = list(_terms(_graph(blocks[-1]), (IMAGE, HEAD, QUERY, KEY)))
    extents = *query.meta["val"].shape[:3], key.meta["val"].shape[2]
    if max(blocks[-3], 1) < extents[2] or max(blocks[-2], 1) < extents[3]:
        _check_blocks(blocks, terms, extents, constants)
    is_causal = call("ge", QUERY, KEY) in terms
    window = 0
    for term in [each for each in terms if each != call("ge", QUERY, KEY)]:
        reach = _reach(term, is_causal)
        if reach and not window:
            window = reach
        else:
            score = where(term, score, -inf)
    return "" if score == leaf("x") else text(score), is_causal, window, scale


def _graph(node: fx.Node) -> fx.Graph:
    return getattr(node.graph.owning_module, str(node.target)).graph


def _reach(term: Scalar, is_causal: bool) -> int:
    """The window that a condition of a mask is; 0 for none."""
    apart = QUERY - KEY
    if term.fn not in ("gt", "ge") or term.args[1] != (apart if is_causal else abs(apart)):
        return 0
    most = term.args[0].args[0] if term.args[0].fn == "const" else 0.0
    return int(most) + (term.fn == "ge") if float(most).is_integer() and most > 0 else 0


def _check_blocks(
    blocks: Sequence[Any],
    terms: Sequence[Scalar],
    extents: Sequence[int],
    constants: Mapping[str, torch.Tensor],
) -> None:
    """Checks that blocks of a mask leave out what its function hides, and nothing else.

    Raises:
        LeftError: they do not, or their numbers are not known before the call.
    """
    known: dict[fx.Node, torch.Tensor | None] = {}
    tensors = [
        None if each is None else constants.get(each.name, constant(each, known)) for each in blocks[2:6]
    ]
    if any(each is not None and made is None for each, made in zip(blocks[2:6], tensors, strict=True)):
        raise LeftError(Why.FORMULA, "a block mask that is made in each call")
    if prod(extents[2:]) > LARGEST:
        raise LeftError(Why.FORMULA, "a block mask of too many scores to be compared with its function")
    rows, columns = (
        np.arange(extent) // block for extent, block in zip(extents[2:], blocks[-3:-1], strict=True)
    )
    listed: list[Any] = [None if each is None else each.cpu().numpy() for each in tensors]
    (counts, places), whole = listed[:2], listed[2:]
    for at in np.ndindex(counts.shape[:2]):
        heads = {"index(b)": float(at[0]), "index(h)": float(at[1])}
        grid = {"index(s)": np.arange(float(extents[2]))[:, None], "index(t)": np.arange(float(extents[3]))}
        seen = np.ones(tuple(extents[2:]), bool)
        for term in terms:
            seen = seen & fold(term, {**heads, **grid}, NUMPY)
        grid_of = np.ix_(rows, columns)
        met = seen & _listed(counts[at], places[at], columns[-1] + 1)[grid_of]
        if whole[0] is not None:
            met |= _listed(whole[0][at], whole[1][at], columns[-1] + 1)[grid_of]
        if (seen != met).any():
            raise LeftError(Why.FORMULA, "a block mask that hides other keys than its mask_mod")


def _listed(counts: Any, places: Any, columns: int) -> Any:
    """Which blocks are among the first of each row's list."""
    made = np.zeros((len(counts), max(columns, places.shape[-1])), bool)
    for row, count in enumerate(counts):
        made[row, places[row, :count]] = True
    return made


def _terms(graph: fx.Graph, leaves: Sequence[Scalar]) -> Iterator[Scalar]:
    """The conditions that all hold where a mask is true."""
    (output,) = graph.find_nodes(op="output")
    ahead = [output.args[0]]
    while ahead:
        node = ahead.pop(0)
        if node.target in AND:
            ahead += node.args
            continue
        made = formula_of(graph, leaves, node)
        if made != const(1):
            yield _condition(made)


def formula_of(graph: fx.Graph, leaves: Sequence[Scalar], wanted: fx.Node | None = None) -> Scalar:
    """The expression that a graph of numbers computes; a condition is 1 where it holds, else 0.

    Args:
        leaves: the expressions that its placeholders stand for.
        wanted: the node whose value it is; the output's unless told.

    Raises:
        LeftError: an operator has no formula, or there are further placeholders.
    """
    values: dict[fx.Node, Scalar] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and len(values) < len(leaves):
            values[node] = leaves[len(values)]
        elif node.op == "call_function" and node.target in ROWS:
            _check_dtype(node)
            given = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = ROWS[node.target](*given[0], **given[1])
        elif node.op == "output":
            return values[node.args[0]]
        else:
            raise LeftError(Why.FORMULA, f"{node.target} in a function of FlexAttention")
        if node is wanted:
            return values[node]
    raise AssertionError("a graph ends with its output")


def _check_dtype(node: fx.Node) -> None:
    """Whole numbers are a formula's where they are added and compared; they have bits, and no fractions."""
    made = node.meta["val"].dtype
    if made not in (torch.bool, torch.float32, torch.float64) and node.target not in WHOLE:
        raise LeftError(Why.DTYPE, f"{node.target} of {made} in a function of FlexAttention")


def _condition(value: Scalar | float) -> Scalar:
    """Where a condition, which is 1 or 0, holds."""
    value = scalar(value)
    if value.fn == "where" and value.args[1:] == (const(1), const(0)):
        return value.args[0]  # type: ignore[no-any-return]
    return value > 0


def _holds(fn: str, *, is_swapped: bool = False) -> Callable[[Any, Any], Scalar]:
    def row(a: Any, b: Any) -> Scalar:
        return where(call(fn, *((b, a) if is_swapped else (a, b))), 1, 0)

    return row


def _equal(a: Any, b: Any) -> Scalar:
    return where(call("ge", a, b), where(call("ge", b, a), 1, 0), 0)


def _same(x: Any, *_: object, **__: object) -> Scalar:
    """The number in another dtype, which `_check_dtype` allows."""
    return scalar(x)


def _clamp(x: Any, low: float | None = None, high: float | None = None) -> Scalar:
    made = scalar(x) if low is None else maximum(x, low)
    return made if high is None else minimum(made, high)


def _pairs(name: str, row: Callable[..., Scalar]) -> dict[Any, Callable[..., Scalar]]:
    packet = getattr(aten, name)
    return {
        getattr(packet, each): row for each in ("Tensor", "Scalar", "Tensor_Scalar") if hasattr(packet, each)
    }


CONSTANTS: dict[Any, Callable[..., Any]] = {
    aten.scalar_tensor.default: lambda number, **_: const(float(number)),
    aten.full.default: lambda _, number, **__: const(float(number)),
    aten.new_ones.default: lambda _, __, **___: const(1),
}
ROWS: dict[Any, Callable[..., Any]] = {
    **_pairs("add", lambda a, b, alpha=1: scalar(a) + scalar(b) * alpha if alpha != 1 else scalar(a) + b),
    **_pairs("sub", lambda a, b, alpha=1: scalar(a) - scalar(b) * alpha if alpha != 1 else scalar(a) - b),
    **_pairs("rsub", lambda a, b, alpha=1: scalar(b) - scalar(a) * alpha if alpha != 1 else scalar(b) - a),
    **_pairs("mul", lambda a, b: scalar(a) * b),
    **_pairs("div", lambda a, b: scalar(a) / b),
    **dict.fromkeys((aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor), partial(call, "pow")),
    aten.neg.default: neg,
    aten.abs.default: lambda a: abs(scalar(a)),
    aten.exp.default: exp,
    aten.exp2.default: lambda a: call("pow", 2, a),
    aten.log.default: lambda a: call("log", a),
    aten.sqrt.default: sqrt,
    aten.rsqrt.default: lambda a: 1 / sqrt(a),
    aten.reciprocal.default: lambda a: 1 / scalar(a),
    aten.tanh.default: tanh,
    aten.sigmoid.default: sigmoid,
    aten.relu.default: relu,
    aten.maximum.default: maximum,
    aten.minimum.default: minimum,
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default), _clamp),
    aten.clamp_max.default: minimum,
    **_pairs("gt", _holds("gt")),
    **_pairs("ge", _holds("ge")),
    **_pairs("lt", _holds("gt", is_swapped=True)),
    **_pairs("le", _holds("ge", is_swapped=True)),
    **_pairs("eq", _equal),
    **_pairs("ne", lambda a, b: 1 - _equal(a, b)),
    **dict.fromkeys(AND, lambda a, b: where(_condition(a), b, 0)),
    **dict.fromkeys(
        (aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor),
        lambda a, b: where(_condition(a), 1, b),
    ),
    **dict.fromkeys(
        (aten.logical_not.default, aten.bitwise_not.default), lambda a: where(_condition(a), 0, 1)
    ),
    **dict.fromkeys(
        (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar),
        lambda condition, a, b: where(_condition(condition), a, b),
    ),
    aten.masked_fill.Scalar: lambda a, condition, b: where(_condition(condition), b, a),
    **CONSTANTS,
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype), _same),
}
WHOLE = {*_pairs("add", neg), *_pairs("sub", neg), *_pairs("rsub", neg), *_pairs("mul", neg), *CONSTANTS}
WHOLE |= {aten.neg.default, aten.abs.default, aten.maximum.default, aten.minimum.default, aten.where.self}

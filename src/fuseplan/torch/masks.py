"""Masks of attention that no input decides: one that masks nothing is left out, and a causal one is a flag.

Exported models compute such masks in each call, and attention that is given a mask leaves out nothing: torch
takes a slower kernel for it, and plans read it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import inf, prod

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fuseplan.torch.intact import SDPA, arguments_of, name_of
from fuseplan.torch.lying import added

aten = torch.ops.aten
MASK = 3  # the place of the mask among an operator's arguments
CAUSAL = {  # the place of the flag
    aten.scaled_dot_product_attention.default: 5,
    aten._scaled_dot_product_efficient_attention.default: 6,
}
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
ADDING = (aten.add.Tensor, aten.baddbmm.default)
# Where scores are filled: the places of the scores, the condition and the number among the arguments.
FILLING = {
    aten.masked_fill.Scalar: (0, 1, 2),
    aten.where.ScalarSelf: (2, 0, 1),
    aten.where.ScalarOther: (1, 0, 2),
}
LOW = -1e9
LOWEST = -1e38  # it is finite in units of log2 too, and no score changes it
SCALES = (aten.mul.Tensor, aten.div.Tensor)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
LARGEST = 2**26  # elements of a mask that is looked at
IN_PLACE = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "pow")),
}


def simplify_masks(graph: fx.Graph) -> None:
    """Leaves out the masks of attention that constants alone decide, where none or the flag says the same."""
    known: dict[fx.Node, torch.Tensor | None] = {}
    for node in graph.nodes:
        if node.target not in CAUSAL or len(node.args) <= MASK or not isinstance(node.args[MASK], fx.Node):
            continue
        with _disable_current_modes():  # AOT's makes tensors without elements
            mask = constant(node.args[MASK], known)
            hides_none = mask is not None and bool(_keeps(mask).all())
            is_causal = mask is not None and _is_causal(mask)
        if mask is None or _flag(node, CAUSAL[node.target]):
            continue
        if hides_none:
            node.update_arg(MASK, None)
        elif is_causal:
            _set_causal(node, CAUSAL[node.target])
    graph.eliminate_dead_code()


def number_of(node: fx.Node) -> float | None:
    """The value of a node that is one floating-point number in each call; None of all others."""
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor) or made.ndim or not made.is_floating_point():
        return None
    with _disable_current_modes():
        found = constant(node, {})
        return None if found is None else float(found)


def hide_by_masks(graph: fx.Graph) -> None:
    """Writes scores that are filled in front of a softmax as scores with a mask, which attention has.

    before: `softmax(scores.masked_fill(hidden, filled))`
    after: filled with minus infinity where a mask is not true; without it where a constant fills nothing;
        `softmax(scores + where(hidden, LOWEST, 0))` for -1e9 and less, which no sum of scores comes near

    A query that sees no key has the mean of the values by `LOWEST` too. Scores with another mask are left:
    they may be as low.
    """
    known: dict[fx.Node, torch.Tensor | None] = {}
    for node in (each for each in graph.nodes if any(user.target in SOFTMAX for user in each.users)):
        if node.target not in FILLING:
            continue
        values, condition, filled = (node.args[place] for place in FILLING[node.target])
        is_kept = node.target is aten.where.ScalarOther  # where the condition is true
        with _disable_current_modes():
            filling = constant(condition, known)
            is_empty = filling is not None and bool((filling if is_kept else filling.logical_not()).all())
        made = None
        is_like = str(node.meta["val"].shape) == str(values.meta["val"].shape)
        steps = [each.target for each in _steps(values)]
        is_bare = bool(steps) and not {*steps} & {*ADDING}  # a product of stacks, scaled and viewed
        is_low = isinstance(filled, int | float) and -inf < filled <= LOW
        with graph.inserting_before(node):
            if is_empty and is_like:
                made = values
            elif filled == -inf and not is_kept:
                seen = added(graph, aten.logical_not.default, condition)
                made = added(graph, aten.where.ScalarOther, seen, values, filled)
            elif is_low and is_like and is_bare:
                made = _lowered(graph, values, condition, (0.0, LOWEST) if is_kept else (LOWEST, 0.0))
        if made is not None:
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _lowered(graph: fx.Graph, scores: fx.Node, condition: fx.Node, numbers: tuple[float, float]) -> fx.Node:
    """Scores with a mask, which is one of two numbers, by a condition."""
    mask, dtype = added(graph, aten.where.Scalar, condition, *numbers), scores.meta["val"].dtype
    if mask.meta["val"].dtype != dtype:
        mask = added(graph, aten.to.dtype, mask, dtype)
    return added(graph, aten.add.Tensor, scores, mask)


def sum_masks(graph: fx.Graph) -> None:
    """Adds what a softmax's scores are given, one after another, to each other: plans read one mask.

    before: `softmax((query @ key + first) * factor + second)`
    after: `softmax(query @ key * factor + (first * factor + second))`

    Scores in f16 are left: sums of the lowest number and another one are minus infinity there.
    """
    for steps in [_steps(each.args[0]) for each in graph.nodes if each.target in SOFTMAX]:
        if not any(each.target in ADDING for each in steps[:-1] or steps):
            continue
        with graph.inserting_before(steps[-1]):
            made = _summed(graph, steps)
        if made is not None:
            steps[-1].replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _steps(node: object) -> tuple[fx.Node, ...]:
    """A product of stacks, and what scales, views and adds to it up to a node; nothing for other values."""
    made = node.meta.get("val") if isinstance(node, fx.Node) and len(node.users) == 1 else None
    if not isinstance(node, fx.Node) or not isinstance(made, torch.Tensor) or made.dtype is torch.float16:
        return ()
    if node.target in PRODUCTS:
        is_plain = made.ndim > 2 and node.kwargs.get("beta", 1) == 1
        return (node,) if is_plain else ()
    if node.target not in (aten.add.Tensor, *SCALES, *RESHAPES) or node.kwargs:
        return ()
    for each in node.args[: 2 if node.target is aten.add.Tensor else 1]:
        steps = _steps(each)
        if steps and _is_step(node, each, made):
            return (*steps, node)
    return ()


def _is_step(node: fx.Node, scores: fx.Node, made: torch.Tensor) -> bool:
    """Whether a node makes scores of scores, of the same dtype."""
    was, others = scores.meta["val"], [each for each in node.args if each is not scores]
    if node.target in RESHAPES or not others:
        return bool(others)
    other = others[0].meta["val"] if isinstance(others[0], fx.Node) else torch.tensor(others[0])
    is_like = str(made.shape) == str(was.shape) and made.dtype == was.dtype  # extents may be open
    is_mask = other.ndim > 0 and other.dtype == was.dtype
    return is_like and (other.ndim == 0 if node.target in SCALES else is_mask)


def _summed(graph: fx.Graph, steps: tuple[fx.Node, ...]) -> fx.Node | None:
    """The scores with one mask; None where a view between two masks does more than part heads."""
    scores, mask = steps[0], None
    if scores.target is aten.baddbmm.default:
        mask, *factors = scores.args
        alpha = scores.kwargs.get("alpha", 1)
        scores = added(graph, aten.mul.Tensor, added(graph, aten.bmm.default, *factors), alpha)
    for before, node in pairwise(steps):
        if node.target is aten.add.Tensor:
            (other,) = (each for each in node.args if each is not before)
            mask = other if mask is None else added(graph, node.target, mask, other)
            continue
        if mask is not None and node.target in RESHAPES:
            mask = _viewed(graph, mask, before.meta["val"].shape, node)
            if mask is None:
                return None
        elif mask is not None:
            mask = added(graph, node.target, mask, node.args[1])
        scores = added(graph, node.target, scores, node.args[1])
    return added(graph, aten.add.Tensor, scores, mask)


def _viewed(graph: fx.Graph, mask: fx.Node, scores: torch.Size, node: fx.Node) -> fx.Node | None:
    """The mask behind a view of the scores.

    The view has scores (b * h, s, t) as (b, h, s, t), or parts windows (b * w, h, s, t) as (b, w, h, s, t),
    or joins them again. None for other views, and for masks that such a view would part.
    """
    made, shape = node.meta["val"].shape, mask.meta["val"].shape
    ranks, are_windows = (len(scores), len(made)), all(type(each) is int for each in (*scores, *made))
    if ranks == (3, 4) and str(scores[1:]) == str(made[2:]):
        if len(shape) < 3 or str(shape[0]) != str(scores[0]):
            return mask
        ends = zip(shape[1:], node.args[1][2:], strict=True)
        ones = (1 if isinstance(extent, int) and extent == 1 else each for extent, each in ends)
        return added(graph, aten.reshape.default, mask, [*node.args[1][:2], *ones])
    if ranks == (4, 5) and are_windows and scores[1:] == made[2:]:
        return mask if len(shape) < 4 or shape[0] == 1 else None
    if ranks == (5, 4) and are_windows and scores[2:] == made[1:]:
        heads, is_one = shape[-3:], all(extent == 1 for extent in shape[:-3])
        wide = mask if is_one else added(graph, aten.expand.default, mask, [*scores[:2], *heads])
        return added(graph, aten.reshape.default, wide, [1 if is_one else made[0], *heads])
    return None


def fold_masks(given: fx.GraphModule) -> None:
    """Does so in a graph of Dynamo's, where gradients are taken: AOT chooses a kernel by the mask."""
    known: dict[fx.Node, torch.Tensor | None] = {}
    for node in given.graph.find_nodes(op="call_function", target=SDPA) if torch.is_grad_enabled() else ():
        told = arguments_of(node)
        mask = None if told is None or told["is_causal"] else told["attn_mask"]
        if told is None or not isinstance(mask, fx.Node):
            continue
        if mask not in known:
            known[mask] = _evaluated(mask)
        value = known[mask]
        hides_none = value is not None and bool(_keeps(value).all())
        if value is not None and (hides_none or _is_causal(value)):
            node.args, node.kwargs = (), {**told, "attn_mask": None, "is_causal": not hides_none}
    given.recompile()


def _evaluated(mask: fx.Node) -> torch.Tensor | None:
    """The value of a node of Dynamo's; None where an input or chance decides it, or something writes it."""
    needed = _reached(mask, lambda node: node.all_input_nodes)
    behind = {each for node in needed for each in _reached(node, _readers)}
    if any(node.op not in ("call_function", "call_method") for node in needed) or any(
        map(_may_write, behind)
    ):
        return None
    made: fx.Graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in mask.graph.nodes:
        if node in needed:
            copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(copies[mask])
    from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - a solver's import: no second start has it

    with _disable_current_modes():
        traced = make_fx(fx.GraphModule(nn.Module(), made), tracing_mode="fake")()
        (output,) = traced.graph.find_nodes(op="output")
        return constant(output.args[0], {})


def _reached(node: fx.Node, further: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The node, and those that it leads to."""
    found, ahead = {node}, [node]
    while ahead:
        more = set(further(ahead.pop())) - found
        found |= more
        ahead += more
    return found


def _readers(node: fx.Node) -> Iterable[fx.Node]:
    """The nodes whose values may lie in the node's memory: attention's do not."""
    return () if node.target is SDPA else node.users


def _may_write(node: fx.Node) -> bool:
    """Whether a node of Dynamo's may write what it is given, or is no function of it alone."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    is_operator = getattr(target, "__module__", "") == "_operator"  # which has `and_` beside `iand`
    is_in_place = name.endswith("_") and not name.endswith("__") and not is_operator
    writes = is_in_place or target in IN_PLACE or "out" in node.kwargs
    return node.op != "output" and (writes or "functorch" in name_of(node))


def constant(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    """The value of a node that reads no input; None of all others."""
    if node not in known:
        known[node] = _computed(node, known)
    return known[node]


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    if node.target is aten.lift_fresh_copy.default:
        return _literal(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not _is_pure(node):
        return None
    values = {each: constant(each, known) for each in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    here = {"device": torch.device("cpu")} if "device" in node.kwargs else {}
    args, kwargs = fx.map_arg((node.args, {**node.kwargs, **here}), values.__getitem__)
    return node.target(*args, **kwargs)


def _literal(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a model's code wrote down, as a graph holds it."""
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return held.cpu() if isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor) else None


def _is_pure(node: fx.Node) -> bool:
    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor) or not all(isinstance(each, int) for each in made.shape):
        return False
    is_random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not is_random and not node.target._schema.is_mutable and prod(made.shape) <= LARGEST


def _keeps(mask: torch.Tensor) -> torch.Tensor:
    """Where the mask neither hides a key nor changes its score."""
    return mask if mask.dtype is torch.bool else mask == 0


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether each query sees the keys up to its own place, of as many, and no others."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    keeps = _keeps(mask)
    hides = ~mask if mask.dtype is torch.bool else mask <= torch.finfo(mask.dtype).min
    seen = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return bool(((keeps == seen) & (hides == ~seen)).all())


def _flag(node: fx.Node, place: int) -> bool:
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get("is_causal", False))


def _set_causal(node: fx.Node, place: int) -> None:
    """Writes the flag in the place of the mask, with all arguments in between."""
    between = node.target._schema.arguments[len(node.args) : place]
    given = [node.kwargs.get(each.name, each.default_value) for each in between]
    args = [*node.args[:MASK], None, *node.args[MASK + 1 : place], *given, True]
    node.args = (*args, *node.args[len(args) :])
    named = {each.name for each in between} | {"is_causal"}
    node.kwargs = {key: each for key, each in node.kwargs.items() if key not in named}


def join_batches(graph: fx.Graph) -> None:
    """Writes heads of windows, (b, w, s, h, d) as (b, w, h, s, d), by four axes, (b * w, h, s, d).

    Graphs without products of such heads are left.
    """
    if not any(each.target in PRODUCTS and each.meta["val"].ndim == 5 for each in graph.nodes):
        return
    for node in graph.find_nodes(op="call_function", target=aten.permute.default):
        value, order = node.args
        made = value.meta["val"]
        if [*order] != [0, 1, 3, 2, 4] or not all(type(each) is int for each in made.shape):
            continue
        images, windows, *rest = made.shape
        if images > 1 and made.stride(0) != made.stride(1) * windows:
            continue  # the two axes would be joined by a copy
        with graph.inserting_before(node):
            heads = added(graph, aten.reshape.default, value, [images * windows, *rest])
            turned = added(graph, aten.permute.default, heads, [0, 2, 1, 3])
            parted = added(graph, aten.reshape.default, turned, [*node.meta["val"].shape])
        node.replace_all_uses_with(parted)
        graph.erase_node(node)

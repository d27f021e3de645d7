"""Masks of attention that no input decides: one that masks nothing is left out, and a causal one is a flag.

Exported models compute such masks in each call, and attention that is given a mask leaves out nothing: torch
takes a slower kernel for it, and plans read it.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten
MASK = 3  # the place of the mask among an operator's arguments
CAUSAL = {  # the place of the flag
    aten.scaled_dot_product_attention.default: 5,
    aten._scaled_dot_product_efficient_attention.default: 6,
}
LARGEST = 2**26  # elements of a mask that is looked at


def simplify_masks(graph: fx.Graph) -> None:
    """Leaves out the masks of attention that constants alone decide, where none or the flag says the same."""
    known: dict[fx.Node, torch.Tensor | None] = {}
    for node in graph.nodes:
        if node.target not in CAUSAL or len(node.args) <= MASK or not isinstance(node.args[MASK], fx.Node):
            continue
        with _disable_current_modes():  # AOT's makes tensors without elements
            mask = _constant(node.args[MASK], known)
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
        found = _constant(node, {})
        return None if found is None else float(found)


def _constant(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    """The value of a node that reads no input; None of all others."""
    if node not in known:
        known[node] = _computed(node, known)
    return known[node]


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor | None]) -> torch.Tensor | None:
    if node.target is aten.lift_fresh_copy.default:
        return _literal(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not _is_pure(node):
        return None
    values = {each: _constant(each, known) for each in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    here = {"device": torch.device("cpu")} if "device" in node.kwargs else {}
    args, kwargs = fx.map_arg((node.args, {**node.kwargs, **here}), values.__getitem__)
    return node.target(*args, **kwargs)


def _literal(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a model's code wrote down, as a graph holds it."""
    held = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    is_told = isinstance(held, torch.Tensor) and not isinstance(held, FakeTensor)
    return held.cpu() if is_told else None


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

"""Calls that record gradients: plans compute the results, torch's own operators the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
Results = Callable[..., Sequence[Any]]


def is_random(graph: fx.Graph) -> bool:
    """Whether the graph computed again may give other numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        and not (node.target is ATTENTION and not (*node.args[4:5], node.kwargs.get("dropout_p"))[0])
        for node in graph.nodes
    )


def has_own_gradients(tensors: Sequence[Any]) -> bool:
    """Whether a torch.autograd.Function made any of the tensors: graphs have its forward alone."""
    ahead = [each.grad_fn for each in tensors if torch.is_tensor(each)]
    seen = {None, *ahead}
    while ahead:
        node = ahead.pop()
        if isinstance(node, BackwardCFunction):
            return True
        behind = {each for each, _ in node.next_functions} - seen if node else set()
        seen |= behind
        ahead += behind
    return False


class Recomputed(torch.autograd.Function):  # type: ignore[misc]
    """A graph's results, and their gradients by torch's own operators, which run in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Results, plain: Results, flags: Sequence[bool], *given: Any) -> Any:
        """The results.

        Args:
            ctx: torch's.
            run: gives them.
            plain: the graph of torch's operators, called by a backward pass.
            flags: which of the results have gradients.
            *given: what the graph is called with.
        """
        others = {place: each for place, each in enumerate(given) if not isinstance(each, torch.Tensor)}
        ctx.save_for_backward(*(None if place in others else each for place, each in enumerate(given)))
        ctx.plain, ctx.others, made = plain, others, tuple(run())
        if False in flags:
            pairs = zip(made, flags, strict=True)
            ctx.mark_non_differentiable(*(each for each, flag in pairs if torch.is_tensor(each) and not flag))
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients, which may be differentiated as well."""
        needs, again = ctx.needs_input_grad[3:], torch.is_grad_enabled()
        with torch.enable_grad():
            given = [
                ctx.others.get(place)
                if each is None
                else each.view_as(each)
                if again
                else each.detach().requires_grad_(need)
                for place, (each, need) in enumerate(zip(ctx.saved_tensors, needs, strict=True))
            ]
            made = zip(ctx.plain(*given), gradients, strict=True)
            pairs = [(out, gradient) for out, gradient in made if gradient is not None and out.requires_grad]
            outs, wanted = [out for out, _ in pairs], [gradient for _, gradient in pairs]
            sources = [each for each, need in zip(given, needs, strict=True) if need]
            found = torch.autograd.grad(outs, sources, wanted, allow_unused=True, create_graph=again)
        ahead = iter(found)
        return None, None, None, *(next(ahead) if need else None for need in needs)


# `Function.apply` without its looks for tensors of torch.func, which no caller gives: 4 us of 10.
recorded = super(torch.autograd.Function, Recomputed).apply

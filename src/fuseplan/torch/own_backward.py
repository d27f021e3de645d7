"""Modules with a backward pass of their own: of a torch.autograd.Function, graphs have the forward alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree


class Watch:
    """What the results of a module's call were made by.

    Attributes:
        functions: the names of the torch.autograd.Functions; None as long as no result had a gradient.
    """

    functions: tuple[str, ...] | None = None

    def look(self, module: nn.Module, given: Any, made: Any) -> None:
        """Follows the gradients of the results, as a hook of the module."""
        tensors = [each for each in pytree.tree_leaves(made) if isinstance(each, torch.Tensor)]
        ahead = [each.grad_fn for each in tensors if each.grad_fn is not None]
        if not ahead:
            return
        seen, found = set(ahead), dict[str, None]()
        while ahead:
            node = ahead.pop()
            if isinstance(node, BackwardCFunction):
                found[type(node).__name__.removesuffix("Backward")] = None
            behind = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= behind
            ahead += behind
        self.functions = tuple(found)


@contextmanager
def watched(module: nn.Module) -> Iterator[Watch]:
    """Watches the calls of a module."""
    watch = Watch()
    handle = module.register_forward_hook(watch.look)
    try:
        yield watch
    finally:
        handle.remove()


def functions_of(module: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The torch.autograd.Functions of a call whose results have gradients; tensors without elements run.

    Args:
        module: as it was before it was fused.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), watched(module) as watch:
        fake = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (tuple(inputs), dict(kwargs)))
        module(*fake[0], **fake[1])
    return watch.functions or ()

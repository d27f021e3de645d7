"""Calls of plans in the code that Inductor writes: each keeps its plan bound as the call before had it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from fuseplan.execution.run import BoundPlan
from fuseplan.tensors.torch_tensors import Likeness, alike
from fuseplan.torch.kernels import ALIGNMENT, Bindings, Kernel, Tensors, kernel_on
from fuseplan.torch.operator import is_seen, is_watched, readable


class Site:
    """`torch.ops.fuseplan.run` at one place of a program, without torch's dispatcher.

    Any number of threads may call at once: what is known of the call before is replaced as a whole.
    """

    def __init__(self) -> None:
        self._known: tuple[Kernel, Likeness, list[tuple[int, int]]] | None = None
        self._last: tuple[list[torch.Tensor], list[int], Bindings] | None = None

    def __call__(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        """The operator's outputs, for the operator's arguments."""
        known = self._known
        if known is None or parameters or is_watched() or not known[1](src, *given):
            return self._anew(operators, src, given, parameters)
        plan = self._bound(known[0], given).plan
        address = _where(src)
        words = [(word, _where(given[place])) for place, word in known[2]]
        if not address or any(not at for _, at in words):
            return self._anew(operators, src, given, parameters)
        return [plan.unchecked(src, address, words)]

    def _bound(self, kernel: Kernel, given: Tensors) -> Bindings:
        """The plan with its weights, as the call before had it where they are the same."""
        own = [given[place] for place in kernel.constant]
        last = self._last
        is_same = last is not None and all(map(operator.is_, own, last[0]))
        if last and is_same and [*map(torch.Tensor.data_ptr, own)] == last[1] and last[2].is_current(given):
            return last[2]
        made = kernel.held(given)
        if made.is_kept:
            self._last = own, [*map(torch.Tensor.data_ptr, own)], made
        return made

    def _anew(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        tensors = (src, *given)
        if is_seen(tensors):
            made: list[torch.Tensor] = torch.ops.fuseplan.run(operators, src, given, parameters)
            return made
        plain = readable(src)
        kernel = kernel_on(operators, plain)
        self._known = self._last = None
        made = kernel(plain, given, parameters)
        plan = kernel.held(given).plan
        is_one = type(plan) is BoundPlan  # and none for each extent
        if is_one and plain is src and not parameters and kernel.reads_in_place(given):
            words = [(place, plan.word_of(key)) for place, key in kernel.per_call]
            self._known = kernel, alike(*tensors), words
        return made


def _where(tensor: torch.Tensor) -> int:
    """Where a tensor lies; 0 where a kernel may not read it so."""
    address: int = tensor.data_ptr()
    return 0 if address % ALIGNMENT or tensor.is_neg() else address

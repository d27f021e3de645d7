"""Calls of plans in the code that Inductor writes: each keeps its plan bound as the call before had it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fuseplan.execution.run import BoundPlan
from fuseplan.tensors.torch_tensors import Likeness, alike
from fuseplan.torch.kernels import ALIGNMENT, Bindings, Kernel, Tensors, kernel_on
from fuseplan.torch.operator import is_seen, is_watched, readable


class _Known(NamedTuple):
    """What a call tells of the next.

    Attributes:
        kernel: that it ran.
        are_alike: whether tensors look as its own did.
        read: the places of the tensors that the kernel reads where they lie, with their words.
        packed: the places of those of which it has copies.
        plan: bound for the call.
    """

    kernel: Kernel
    are_alike: Likeness
    read: list[tuple[int, int]]
    packed: list[int]
    plan: BoundPlan


class Site:
    """`torch.ops.fuseplan.run` at one place of a program, without torch's dispatcher.

    Any number of threads may call at once: what is known of the call before is replaced as a whole.
    """

    def __init__(self) -> None:
        self._known: _Known | None = None
        self._last: tuple[list[torch.Tensor], list[int], Bindings] | None = None

    def __call__(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        """The operator's outputs, for the operator's arguments."""
        known = self._known
        if known is None or parameters or is_watched() or not known.are_alike(src, *given):
            return self._anew(operators, src, given, parameters)
        plan = self._bound(known, given).plan if known.packed else known.plan
        address = _where(src)
        words = [(word, _where(given[place])) for place, word in known.read]
        if not address or any(not at for _, at in words):
            return self._anew(operators, src, given, parameters)
        return [plan.unchecked(src, address, words)]

    def _bound(self, known: _Known, given: Tensors) -> Bindings:
        """The plan with its packed tensors, as the call before had it where they are the same."""
        own = [given[place] for place in known.packed]
        last = self._last
        is_same = last is not None and all(map(operator.is_, own, last[0]))
        if last and is_same and [*map(torch.Tensor.data_ptr, own)] == last[1] and last[2].is_current(given):
            return last[2]
        made = known.kernel.held(given)
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
            self._known = _Known(kernel, alike(*tensors), kernel.read(plan), kernel.packed(plan), plan)
        return made


def _where(tensor: torch.Tensor) -> int:
    """Where a tensor lies; 0 where a kernel may not read it so."""
    address: int = tensor.data_ptr()
    return 0 if address % ALIGNMENT or tensor.is_neg() else address

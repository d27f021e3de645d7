"""Calls of plans in the code that Inductor writes: each keeps its plan bound as the call before had it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from fuseplan.tensors.torch_tensors import Likeness, alike
from fuseplan.torch.kernels import Bindings, Kernel, Tensors, aligned, kernel_on
from fuseplan.torch.operator import is_seen, is_watched, readable

Marks = tuple[list[int], list[int]]  # how often tensors were written, and where they lie
_version = operator.attrgetter("_version")


class Site:
    """`torch.ops.fuseplan.run` at one place of a program, without torch's dispatcher.

    Any number of threads may call at once: what is known of the call before is replaced as a whole.
    """

    def __init__(self) -> None:
        self._known: tuple[Kernel, Likeness] | None = None
        self._last: tuple[list[torch.Tensor], Marks, Bindings] | None = None

    def __call__(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        """The operator's outputs, for the operator's arguments."""
        known = self._known
        if known is None or parameters or is_watched() or not known[1](src, *given):
            return self._anew(operators, src, given, parameters)
        kernel = known[0]
        plan = self._bound(kernel, given).plan
        values = {key: aligned(given[place]) for place, key in kernel.per_call}
        return [plan(aligned(src), **values)]

    def _bound(self, kernel: Kernel, given: Tensors) -> Bindings:
        """The plan with its weights, as the call before had it where they are the same."""
        own = [given[place] for place in kernel.constant]
        last = self._last
        if last is not None and all(map(operator.is_, own, last[0])):
            marks = [*map(_version, own)], [*map(torch.Tensor.data_ptr, own)]
            if marks == last[1] and last[2].is_current(given):
                return last[2]
        made = kernel.held(given)
        if made.is_kept:
            self._last = own, ([*map(_version, own)], [*map(torch.Tensor.data_ptr, own)]), made
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
        if plain is src and not parameters and kernel.reads_in_place(given):
            self._known = kernel, alike(*tensors)
        return made

"""Calls of plans in the code that Inductor writes: each keeps its plan bound as the call before had it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fuseplan.execution.passed import Look
from fuseplan.execution.run import BoundPlan
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.tensors.torch_tensors import Likeness, alike
from fuseplan.torch.kernels import Bindings, Kernel, kernel_on
from fuseplan.torch.lying import ALIGNMENT, laid
from fuseplan.torch.operator import is_seen, is_watched, launched, readable
from fuseplan.torch.texts import Tensors


class _Known(NamedTuple):
    """What a call tells of the next.

    Attributes:
        kernel: that it ran.
        are_alike: whether tensors look as its own did.
        is_copied: whether the kernel reads a copy of src, whose elements share memory.
        step: what the addresses divide that the kernel reads.
        read: the places of the tensors that the kernel reads where they lie, with their words.
        moved: the places of those of them that lie otherwise and are copied, and how the kernel has them.
        packed: the places of the others.
        looks: how each of these looked; nothing where they are joined before they are packed.
        old: the places of values that results are made of, with the words of these.
    """

    kernel: Kernel
    are_alike: Likeness
    is_copied: bool
    step: int
    read: list[tuple[int, int]]
    moved: Mapping[int, TensorSpec | Dense]
    packed: list[int]
    looks: Mapping[int, Look]
    old: list[tuple[int, int]]


class Site:
    """`torch.ops.fuseplan.run` at one place of a program, without torch's dispatcher.

    Any number of threads may call at once: what is known of the call before is replaced as a whole.
    """

    def __init__(self) -> None:
        self.__name__ = "site"  # in the code of graphs
        self._known: _Known | None = None
        self._last: tuple[list[torch.Tensor], list[int], Bindings] | None = None

    def __call__(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float] = ()
    ) -> list[torch.Tensor]:
        """The operator's outputs, for the operator's arguments."""
        known = self._known
        if known is None or parameters or is_watched() or not known.are_alike(src, *given):
            return self._anew(operators, src, given, parameters)
        return self._again(known, src, given) or self._anew(operators, src, given, parameters)

    def _again(self, known: _Known, src: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
        """A call with tensors that look as known ones did; nothing where they lie otherwise."""
        src = readable(src) if known.is_copied else src
        address = _where(src, known.step)
        if known.moved:
            given = [
                laid(each, known.moved[at]) if at in known.moved else each for at, each in enumerate(given)
            ]
        words = [(word, _where(given[place], known.step)) for place, word in known.read]
        if not address or not all(at for _, at in words):
            return []
        bindings = self._bindings(known, given) if known.packed else None
        old = {word: given[place] for place, word in known.old}
        if bindings is not None:
            return bindings.plan.unchecked(src, address, words, old=old)
        if len(known.looks) < len(known.packed) or any(given[place].is_neg() for place in known.looks):
            return []
        held = []
        for place, look in known.looks.items():
            begin, kept = look.packed(given[place], given[place].data_ptr())
            words.append((look.place, begin))
            held.append(kept)
        return known.kernel.unbound.unchecked(src, address, words, old=old)

    def _bindings(self, known: _Known, given: Tensors) -> Bindings | None:
        """The plan with its packed tensors, as the call before had it where they are the same.

        None where calls see them for the first time.
        """
        own = [given[place] for place in known.packed]
        last = self._last
        is_same = last is not None and all(map(operator.is_, own, last[0]))
        if last and is_same and [*map(torch.Tensor.data_ptr, own)] == last[1] and last[2].is_current(given):
            return last[2]
        made = known.kernel.known(given)
        is_kept = made is not None and made.is_kept
        self._last = (own, [*map(torch.Tensor.data_ptr, own)], made) if made and is_kept else None
        return made

    def _anew(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        if is_seen((src, *given)):
            return launched(operators, src, given, parameters)
        return self._learnt(operators, src, given, parameters)

    def inside(self, operators: str, src: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
        """The same inside of torch's dispatcher, where nothing watches; no tensor is kept alive."""
        known = self._known
        is_known = known is not None and not known.packed and known.are_alike(src, *given)
        made = self._again(known, src, given) if known and is_known else []
        return made or self._learnt(operators, src, given, ())

    def _learnt(
        self, operators: str, src: torch.Tensor, given: Tensors, parameters: Sequence[float]
    ) -> list[torch.Tensor]:
        """The outputs, with all checks; what is known of the call is for the next one."""
        plain = readable(src)
        kernel = kernel_on(operators, plain)
        self._known = self._last = None
        made = kernel(plain, given, parameters)
        is_one = type(kernel.unbound) is BoundPlan  # and none for each extent
        if is_one and not parameters:
            looks = kernel.looks(given)
            read, moved = kernel.read(looks, given), kernel.moved(given)
            packed = [place for place in kernel.constant if place not in dict(read)]
            known = {place: look for place, look in looks.items() if look and place in packed}
            step = ALIGNMENT if src.is_cuda else 1
            are_alike = alike(src, *given)
            self._known = _Known(
                kernel, are_alike, plain is not src, step, read, moved, packed, known, kernel.old
            )
        return made


def called(operators: str, src: torch.Tensor, given: Tensors) -> list[torch.Tensor]:
    """A plan's outputs inside of torch's dispatcher: calls with an alike src are one site."""
    return _site(operators, src.shape, src.stride(), src.dtype, src.device).inside(operators, src, given)


@functools.lru_cache(maxsize=4096)
def _site(*_: object) -> Site:
    return Site()


def _where(tensor: torch.Tensor, step: int) -> int:
    """Where a tensor lies; 0 where a kernel may not read it so."""
    address: int = tensor.data_ptr()
    return 0 if address % step or tensor.is_neg() else address

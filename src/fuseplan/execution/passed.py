"""Operands that passed all checks of a call: those of later calls that look like them pass by less."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fuseplan.backends.backend import Packer
from fuseplan.execution.runner import Runner, Words
from fuseplan.tensors.arguments import operand_buffer
from fuseplan.tensors.arrays import ALIGNMENT


class Look(NamedTuple):
    """How an operand of a call looked.

    Attributes:
        place: its word.
        address: where another one lies that looks the same; 0 for one that does not.
        reach: its first byte and the one past its last, from its address.
        pack: what makes of it what the kernel reads; None where that is the tensor itself.
        step: what its address divides if the kernel read it where it lay; else 0.
    """

    place: int
    address: Callable[[Any], int]
    reach: tuple[int, int]
    pack: Packer | None
    step: int

    def packed(self, tensor: Any, begin: int) -> tuple[int, object]:
        """Where the kernel reads one that lies at an address, and what keeps that memory alive."""
        return self.pack(tensor, begin) if self.pack else (begin, None)


class Given(NamedTuple):
    """The operands of a call: words as the kernel reads them, where they lie, and packed copies to hold."""

    words: Words | tuple[()]
    begins: Sequence[int]
    held: Sequence[object]


NONE = Given((), (), ())


def look_of(runner: Runner, key: str, tensor: Any, is_in_place: bool) -> Look | None:
    """How an operand looks that was accepted; None for kinds that are checked anew each time."""
    memory, packing = runner.memory, runner.operands[key]
    place, form = runner.place("operand", key), memory.form_of(tensor)
    if place is None or form is None:
        return None
    buffer = operand_buffer(runner.plan, runner.plan_operands[key], tensor, memory.view)
    low, end = buffer.bounds
    pack = None if packing is None else memory.packer(packing, buffer)
    step = (ALIGNMENT if packing else 1) if is_in_place else 0
    return Look(place, form.address, (low - buffer.address, end - buffer.address), pack, step)


def like_before(looks: Mapping[str, Look], given: Mapping[str, Any]) -> Given | None:
    """The operands of a call, by key, that look like those which passed; None where one does not."""
    if given.keys() != looks.keys():
        return None
    begins = [each.address(given[key]) for key, each in looks.items()]
    if 0 in begins:
        return None
    words, held = [], []
    for (key, each), begin in zip(looks.items(), begins, strict=True):
        where, kept = each.packed(given[key], begin)
        words.append((each.place, where))
        held.append(kept)
    return Given(words, begins, held)

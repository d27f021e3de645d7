"""How the operands of a call looked that passed all checks: operands that look alike pass fewer checks."""

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
        place: the index of its word.
        address: the address of another operand that looks the same; 0 for any other tensor.
        reach: the offsets of its first byte and of its end from its address.
        pack: packs an operand for the kernel; None where the kernel reads the tensor itself.
        step: the alignment in bytes of an operand that the kernel reads in place; else 0.
    """

    place: int
    address: Callable[[Any], int]
    reach: tuple[int, int]
    pack: Packer | None
    step: int

    def packed(self, tensor: Any, begin: int) -> tuple[int, object]:
        """The address that the kernel reads of an operand at `begin`, and the owner of that memory."""
        return self.pack(tensor, begin) if self.pack else (begin, None)


class Given(NamedTuple):
    """The operands of a call: the kernel's words, the tensors' addresses, and the owners of packed copies."""

    words: Words | tuple[()]
    begins: Sequence[int]
    held: Sequence[object]


NONE = Given((), (), ())


def look_of(runner: Runner, key: str, tensor: Any, is_in_place: bool) -> Look | None:
    """The look of an accepted operand; None for kinds of tensors that every call checks anew."""
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
    """The operands of a call, by key, if all look like the accepted ones; None if one does not."""
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

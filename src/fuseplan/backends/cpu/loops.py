"""Loops that templates share: whole pieces and what is left, positions along axes, stores past the caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from fuseplan.backends.cpu.ir import Builder, Index
from fuseplan.backends.cpu.ir_text import I64


def pieces(
    b: Builder,
    extent: int,
    size: int,
    part: Callable[[Index, int], None],
    *,
    name: str,
    within: tuple[Index, Index] | None = None,
    numbered: bool = False,
) -> None:
    """Calls part(first, count) for whole pieces of an extent in a loop, then for what is left, if anything.

    Args:
        b: the function being written.
        extent: elements.
        size: elements of a whole piece.
        part: writes the code of one piece.
        name: of the loop's counter.
        within: the first element, and the one behind the last, where these are not all: an end behind the
            whole pieces is the extent's.
        numbered: `within` and `first` count pieces, not elements.
    """
    step = 1 if numbered else size
    whole, rest = extent // size * step, extent % size
    start, stop = within or (0, whole)
    if whole:
        with b.loop(start, b.smaller(stop, whole), step, name=name) as first:
            part(first, size)
    if rest and within is None:
        part(whole, rest)
    elif rest:
        with b.when(b.compare("sgt", b.const(stop, I64), whole)):
            part(whole, rest)


def places(index: Index, extents: Iterable[int]) -> list[Index]:
    """The position along each axis of a number that counts all of them, the last axis fastest."""
    found: list[Index] = []
    for extent in reversed(list(extents)[1:]):
        found.insert(0, index % extent)
        index = index // extent
    return [index, *found]


class Write(Protocol):
    """Writes the code that computes and stores some elements of a run."""

    def __call__(self, at: Index, count: int, *, stream: bool) -> None:
        """`count` elements from `at` on; `stream`: past the caches, whole vectors at aligned addresses."""

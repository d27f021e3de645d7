"""The indices of elements that formulas of a kernel read, as the kernel's axes count them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fuseplan.plans.step import Step


@dataclass(frozen=True)
class Counted:
    """An element's index, a leaf of formulas: a whole number that is computed and not read.

    Attributes:
        key: the leaf's name; it ends with the operator's number.
        steps: what a step along each axis adds, of src in the `prologue` and of dst in the `epilogue`.
        role: where it is used.
    """

    key: str
    steps: tuple[int, ...]
    role: str


def counted(
    steps: Iterable[Step],
    role: str,
    places: Sequence[int] = (),
    rank: int = 0,
    run: tuple[int, int] | None = None,
) -> Iterator[Counted]:
    """The indices of some operators.

    Args:
        places: the kernel's axis of each of src's, of `rank` axes; n, c, spatial unless given.
        run: an axis of src that is two, runs and the elements of each, and the number of these.
    """
    for step in steps:
        src, axes = step.src, rank or step.src.canonical.rank
        where = places or src.places
        for key, own in step.indices.items():
            at, length = run or (0, 1)
            along = (*own[:at], own[at] * length, *own[at:]) if run else own
            found = dict(zip(where, along, strict=True))
            yield Counted(key, tuple(found.get(axis, 0) for axis in range(axes)), role)

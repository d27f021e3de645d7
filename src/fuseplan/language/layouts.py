"""Names of axes, and layouts: the order of the axes in memory.

A word of one letter per axis is a layout. `nc`, `ncw`, `nwc`, `nchw`, `nhwc`, `ncdhw` and `ndhwc` order the
axes n, c and the spatial ones, whose logical order is n, c, then spatial. Any other word, without an n,
names the axes in their logical order, and they lie in memory in that order: `bsc`. The axes of `bcs of bsc`
lie in another order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fuseplan.errors import PlanError, near_miss
from fuseplan.language.extents import OPEN, outermost_first
from fuseplan.messages.elsewhere import LAYOUTS as PLACES
from fuseplan.messages.excerpt import shown

# The short layouts of each rank; the first is the default, which is not printed.
LAYOUTS = {2: ("nc",), 3: ("ncw", "nwc"), 4: ("nchw", "nhwc"), 5: ("ncdhw", "ndhwc")}
# The names of the axes for operators that read rows: each row is one run of the last axis.
ROWS = {0: "", 1: "c", 2: "nc", 3: "bsc", 4: "bhsc", 5: "abhsc"}
OF_KERNELS = "ncedhw"  # six axes, which kernels alone have
WORD = re.compile(r"([a-z]+)(?:\s+of\s+([a-z]+))?")


def channel_names(rank: int) -> str:
    """The names of axes that no layout named: n, c, then the spatial axes."""
    return short(rank)[0]


def short(rank: int) -> tuple[str, ...]:
    """The layouts of n, c and the spatial axes; of a vector, c alone, and of a number none."""
    return LAYOUTS.get(rank) or (ROWS.get(rank, OF_KERNELS),)


def check_rank(rank: int, most: int) -> None:
    """Refuses more than so many axes with a PlanError."""
    if rank > most:
        raise PlanError(
            "a tensor has at most 5 axes: n, c, and up to three spatial ones",
            got=f"{rank} axes",
            want="c, nxc, nxcxw, nxcxhxw or nxcxdxhxw",
        )


def known(word: object, rank: int) -> tuple[str, str]:
    """The names of the axes in logical order, and their order in memory, outermost first.

    Raises:
        PlanError: the word is no layout of so many axes.
    """
    if word is None:
        return channel_names(rank), channel_names(rank)
    if word in short(rank):
        return channel_names(rank), str(word)
    is_new = isinstance(word, str) and word not in PLACES  # `nlc` is another library's word for `nwc`
    found = WORD.fullmatch(str(word)) if is_new else None
    order, names = (found[1], found[2] or found[1]) if found else ("", "")
    is_word = len(order) == rank and sorted(order) == sorted(names) and len(set(order)) == rank
    if is_word and "n" not in names:  # n stands in the short layouts alone, so that `nchv` is a mistake
        return names, order
    raise _unknown(word, rank)


def _unknown(word: object, rank: int) -> PlanError:
    places = {name: short(rank)[place] for name, place in PLACES.items()}
    return PlanError(
        f"no layout of {rank} axes is named {shown(word)}",
        want=f"{' or '.join(short(rank))}; or other letters that name the axes: {ROWS[rank]}",
        remedy=near_miss(str(word), short(rank), places) or "Other orders of the axes are given as strides",
    )


def without(names: str, removed: Iterable[int]) -> str:
    """The names of the axes besides the removed ones, in logical order.

    Behind n and c the spatial axes have the names of their number: n, c, h become n, c, w. An n without a c
    behind it becomes b.
    """
    gone = {names[axis] for axis in removed}
    kept = "".join(name for name in names if name not in gone)
    return channel_names(len(kept)) if kept.startswith("nc") else kept.replace("n", "b")


def order_of(layout: str, names: str) -> list[int]:
    """The logical axes, outermost first."""
    return [names.index(axis) for axis in layout]


def dense(shape: Sequence[int], outermost_first: Iterable[int]) -> tuple[int, ...]:
    """Strides of a tensor without gaps, in elements and logical order; open around an open axis."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(list(outermost_first)):
        strides[axis] = step
        step = OPEN if OPEN in (step, shape[axis]) else step * shape[axis]
    return tuple(strides)


def image_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Strides of one image without gaps, whose axes are in the order that they have in memory."""
    return dense(shape, sorted(range(1, len(shape)), key=lambda axis: strides[axis])[::-1])


def same_strides(shape: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Whether strides put every element at the same place; an axis of extent 1 may have any."""
    return all(a == b or extent == 1 for extent, a, b in zip(shape, ours, theirs, strict=True))


def layout_with(strides: Sequence[int], shape: Sequence[int], names: str) -> str | None:
    """The layout that has these strides; None if none has."""
    for layout in _layouts(strides, names):
        if same_strides(shape, strides, dense(shape, order_of(layout, names))):
            return layout
    return None


def _layouts(strides: Sequence[int], names: str) -> tuple[str, ...]:
    """The layouts to try: the short ones, or the one whose axes are in the order of their strides."""
    if names in short(len(names)):
        return short(len(names))
    return names, "".join(names[axis] for axis in outermost_first(strides))


def shared_stride(strides: Sequence[int], shape: Sequence[int]) -> tuple[int, int] | None:
    """A stride along which elements share storage, and the stride that it has to exceed; None if none do."""
    reach = 0  # the furthest element along the axes seen so far, which have the smaller strides
    for axis in reversed(outermost_first(strides)):
        stride, extent = strides[axis], shape[axis]
        if extent != 1 and stride is not OPEN and stride <= reach:
            return stride, reach
        reach += 0 if extent is OPEN else (extent - 1) * stride
    return None


def in_runs(shape: Sequence[int], split: tuple[int, int]) -> tuple[int, ...]:
    """The extents where an axis is two: so many runs, and the elements of each; of extent 1, both are 1."""
    axis, runs = split
    runs = runs if shape[axis] > 1 else 1
    return (*shape[:axis], runs, shape[axis] // runs, *shape[axis + 1 :])


def behind_runs(axes: Iterable[int], axis: int) -> tuple[int, ...]:
    """Axes where `axis` is two: the elements of a run in its place, and those behind it one further."""
    return tuple(each + (each >= axis) for each in axes)

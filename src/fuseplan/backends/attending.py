"""What both backends' attention share: the rows of a tile, and how an image of dst lies."""

from __future__ import annotations

from collections.abc import Sequence

from fuseplan.language.attend import Attend


class Heads:
    """Which rows a tile has: queries of one head, or of all heads that read the same keys.

    Args:
        made: the attention.
        few: of fewer queries, all heads that read the same keys are rows of one tile.

    Attributes:
        members: heads whose queries are rows of one tile.
        groups: of such heads, over all images.
        rows: of a group; the heads come one after another.
    """

    def __init__(self, made: Attend, few: int) -> None:
        self.members = made.group if made.queries < few else 1
        self.groups = made.batch * (made.heads // self.members)
        self.rows = self.members * made.queries


def image_steps(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides of one image without gaps, its axes in the order that they have in memory."""
    inner, step = [0] * len(shape), 1
    for axis in sorted(range(1, len(shape)), key=lambda axis: strides[axis]):
        inner[axis] = step
        step *= shape[axis]
    return inner

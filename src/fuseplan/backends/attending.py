"""What both backends' attention and its gradients share: the rows of a tile, and the rows it goes through."""

from __future__ import annotations

import numpy as np

from fuseplan.kernels.kernel import Kernel
from fuseplan.language.attend import Attend, AttendGradient

# By what a gradient is: the tensors whose rows are in tiles, and those that a tile goes through. The first of
# each are the factors of the scores.
SIDES = {"query": (("query", "grad"), ("key", "value")), "key": (("key", "value"), ("query", "grad"))}


class Heads:
    """Which rows a tile has: queries of one head, or of all heads that read the same keys; or keys.

    The row at place p meets the others at places more than p - back and less than p + front; 0 is no bound.

    Args:
        few: of fewer queries, all heads that read the same keys are rows of one tile.
        by: of a gradient, what it is by: by `key` the rows are keys, and meet the queries of the heads that
            read them; "" for attention.

    Attributes:
        members: heads whose queries are rows of one tile.
        per_image: groups of such heads.
        groups: of such heads, over all images.
        rows: of a group; the heads come one after another.
        others: rows that a tile goes through, for each of `through` heads.
        offset: the place of the first row among the others.
        back, front: how far a row reaches.
    """

    def __init__(self, made: Attend, few: int, by: str = "") -> None:
        self.by, is_key = by, by == "key"
        self.members = made.group if made.queries < few and not by else 1
        self.per_image = made.key_heads if is_key else made.heads // self.members
        self.groups = made.batch * self.per_image
        self.rows = made.keys if is_key else self.members * made.queries
        self.others, self.through = (made.queries, made.group) if is_key else (made.keys, 1)
        self.offset = -made.offset if is_key else made.offset
        reach = (made.window, 1 if made.is_causal else made.window)
        self.back, self.front = reach[::-1] if is_key else reach

    @classmethod
    def of(cls, kernel: Kernel, few: int) -> Heads:
        """Those of a kernel with attention or a gradient of it, which joins no heads in a tile."""
        centre = kernel.centre
        return cls(kernel.attention, few, centre.by if isinstance(centre, AttendGradient) else "")

    def waste(self, block: int) -> float:
        """What blocks of so many rows go through, each for all of its rows, over what the rows reach."""
        return self._met(block) / max(1, self._met(1))

    def _met(self, block: int) -> int:
        """The pairs: a block goes from the first of its first row to the last of its last one."""
        first = np.arange(0, self.rows, block) + self.offset
        last = np.minimum(first + block, self.rows + self.offset) - 1
        if self.members > 1:  # heads whose rows are at the same places
            first, last = first * 0 + self.offset, first * 0 + self.offset + self.rows // self.members - 1
        low = np.maximum(first - self.back + 1, 0) if self.back else first * 0
        high = np.minimum(last + self.front, self.others) if self.front else first * 0 + self.others
        return int(np.maximum(high - low, 0).sum()) * block

"""What both backends' attention and its gradients share: the rows of a tile, and the rows it goes through."""

from __future__ import annotations

from fuseplan.kernels.kernel import Kernel
from fuseplan.language.attend import Attend, AttendGradient

# By what a gradient is: the tensors whose rows are in tiles, and those that a tile goes through. The first of
# each are the factors of the scores.
SIDES = {
    "query": (("query", "grad"), ("key", "value")),
    "key": (("key", "value"), ("query", "grad")),
}


class Heads:
    """Which rows a tile has: queries of one head, or of all heads that read the same keys; or keys.

    The row at place p meets the others at places more than p - back and less than p + front; 0 is no bound.

    Args:
        made: the attention.
        few: of fewer queries, all heads that read the same keys are rows of one tile.
        by: of a gradient, what it is by: by `key` the rows are keys, and meet the queries of the heads that
            read them; "" for attention.

    Attributes:
        by: as given.
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

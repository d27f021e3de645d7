"""What both backends' attention share: the rows of a tile."""

from __future__ import annotations

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

"""Lines of every kernel of attention on a GPU: a tile's place, its keys, scores, weights and results.

Each row keeps the largest score so far, in units of log2, and the sum of the exponentials of what lies below
it. When the largest grows, sum and result are corrected. Blocks that every query of the tile sees are written
without masks; those at the edges of a band, of a length and at the end have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from math import log, log2

import numpy as np

from fuseplan.backends.attending import Heads
from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Elementwise, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    condition,
    number,
    total,
)
from fuseplan.backends.triton.shell import Writer
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.dtypes import dtype_of
from fuseplan.scalar import NUMPY, fold
from fuseplan.system.locks import cached_property

LOG2_E = log2(2.718281828459045)
NOTHING = 'float("-inf")'
LEAST = -3.4028234663852886e38  # of f32


class Scores(Writer):
    """Writes parts of one kernel.

    Args:
        few: of fewer queries, the heads that read the same keys are rows of one tile.
        rows, keys: of a tile, and of a block.
        namespace: what the text calls the language: `tl` or `gl`.

    Attributes:
        tiles: of the rows of a group of heads.
        epilogue: the stages behind attention.
        tile, batch, key_head: of a tile, when `place_tile` has written them.
        head, query: of the rows; a template sets them.
        is_beside: whether tensors beside the scores have an element for each of them.
        places: of the tile's first and last query, among the keys.
    """

    def __init__(
        self, kernel: Kernel, title: str, few: int, rows: int, keys: int, namespace: str = "tl"
    ) -> None:
        super().__init__(kernel, title)
        self.made, self.heads = kernel.attention, Heads.of(kernel, few)
        self.rows, self.keys, self.namespace = rows, keys, namespace
        self.tiles = ceil_div(self.heads.rows, rows)
        self.epilogue = Elementwise(kernel, "epilogue", self.text, namespace=namespace)
        self.table = dialect.table(self.text, namespace, kernel.src.dtype, kernel.compute_dtype)
        self.table["number"] = lambda place: self.text.let("number", f"{place} * 1.0")
        self.beside = {each.role: each for each in kernel.operands if each.strides}
        self.is_beside = bool(self.made.bias_axes or self.made.mask_axes)
        # Without anything between product and exponential, the scale is a factor of both.
        self.is_plain = self.made.is_scaled and not self.made.bias_axes and self.made.scale > 0
        self.factor = self.made.scale * LOG2_E if self.is_plain else 1.0
        self.is_wide = False
        self.head = self.query = as_index(0)

    def pointer(self, role: str) -> str:
        """The argument that a tensor beside src is."""
        return argument(Slot("operand", self.beside[role].key))

    def vector(self, count: int, lacking: int) -> Index:
        """The numbers from 0 to `count`, along the axis of the scores that is not `lacking`."""
        return arange(count, self.namespace)

    # ---- where the tile lies

    def place_tile(self, tile: Index, group: Index) -> Index:
        """Writes of which image and heads a tile is; its first head."""
        text, made, heads, rows = self.text, self.made, self.heads, self.rows
        tile, group = text.index("tile", tile), text.index("group", group)
        self.batch = text.index("batch", (group // heads.per_image).wide(self.is_wide))
        first = text.index("head", group % heads.per_image * heads.members)
        group = first if heads.by == "key" else first // made.group
        self.key_head = text.index("key_head", group.wide(self.is_wide))
        self.tile = tile
        if heads.members > 1:
            self.places = (as_index(made.offset), as_index(made.queries - 1 + made.offset))
            return first
        low = tile * rows
        high = f"{self.namespace}.minimum({low + (rows - 1)}, {heads.rows - 1})"
        last = low + (rows - 1) if heads.rows % rows == 0 else number(high, heads.rows)
        self.places = (low + heads.offset, last + heads.offset)
        return first

    def seen(self, limit: Index) -> tuple[Index, Index, Index, Index]:
        """Keys that some query of the tile sees, from `low` to `high`; all see `begin` to `end`."""
        heads, (first, last) = self.heads, self.places
        low, high, begin, end = as_index(0), limit, as_index(0), limit
        if heads.front:
            high, end = self.least(high, last + heads.front), self.least(end, first + heads.front)
        if heads.back:
            low = self.most(first - (heads.back - 1), 0) // self.keys * self.keys
            begin = last - (heads.back - 1)
        return low, high, begin, end

    def least(self, first: Index, second: Index) -> Index:
        """The smaller of two numbers."""
        if first.high <= second.low or second.high <= first.low:
            return first if first.high <= second.low else second
        low, high = min(first.low, second.low), min(first.high, second.high)
        return Index(f"{self.namespace}.minimum({first}, {second})", low, high)

    def most(self, first: Index, second: Index | int) -> Index:
        """The larger of two numbers."""
        second = as_index(second)
        if first.low >= second.high or second.low >= first.high:
            return first if first.low >= second.high else second
        low, high = max(first.low, second.low), max(first.high, second.high)
        return Index(f"{self.namespace}.maximum({first}, {second})", low, high)

    # ---- a block

    def axes_at(self, head: Index, other: Index) -> Mapping[str, Index]:
        """Where a block's scores are, by the letter of the axis: of rows of `query`, and what they meet."""
        down, across = ("t", "s") if self.heads.by == "key" else ("s", "t")
        return {"b": self.batch, "h": head.at(DOWN), down: self.query.at(DOWN), across: other.at(ACROSS)}

    def known(self, head: Index, other: Index) -> Mapping[str, str]:
        """The leaves of the formula of a block's scores, by name."""
        places, known = self.axes_at(head, other), {"x": "scores"}
        # Of blocks that a formula hides ptxas drops the products, which cannot be told from those that it
        # drops in error. So places have a 0 that no compiler knows: the last axis has one program.
        ns = self.namespace
        zero = f" + {ns}.num_programs(2) - {ns}.program_id(2) - 1" if self.hides else ""
        for axis in self.made.places:
            # Functions of Gluon take tensors alone, and image and head are of none.
            spread = f" + 0 * {self.query.at(DOWN).atom}" if axis in "bh" else ""
            known[f"index({axis})"] = f"({places[axis].atom}{spread}{zero})"
        return known

    @cached_property
    def hides(self) -> bool:
        """Whether the formula hides a block's corners from the corners of all rows, so that x is not read."""
        made, across = self.made, "s" if self.heads.by == "key" else "t"
        first = np.arange(0.0, self.heads.others, self.keys)
        last = np.minimum(first + self.keys, self.heads.others) - 1
        ends = ((first, last) if axis == across else (0.0, end - 1.0) for axis, end in made.extents.items())
        seen = np.zeros(len(first), bool)
        for corner in product(*ends):
            known = {f"index({axis})": np.asarray(at) for axis, at in zip("bhst", corner, strict=True)}
            seen |= np.isnan(fold(made.score, {**known, "x": np.asarray(np.nan)}, NUMPY))
        return bool(made.places) and not seen.all()

    def scale(self, known: Mapping[str, str]) -> None:
        """What stands between product and exponential, but for the bias; in units of log2."""
        made = self.made
        if made.formula:
            score = fold(made.score, known, self.table)
            self.text.line(f"scores = {score} * {LOG2_E!r}")
        elif made.softcap:
            self.text.line(f"scores = scores * {made.scale / made.softcap!r}")
            self.text.line(f"scores = {self.table['tanh']('scores')} * {made.softcap * LOG2_E!r}")
        elif not self.is_plain:
            self.text.line(f"scores = scores * {made.scale * LOG2_E!r}")

    def length(self) -> Index:
        """How many keys the tile's image has; written where a tensor says it."""
        ns, keys = self.namespace, self.made.keys
        if not self.made.is_padded:
            return as_index(keys)
        length = f"{ns}.load({self.pointer('lengths')} + {self.batch})"
        self.text.line(f"length = {ns}.minimum({ns}.maximum({length}, 0), {keys})")
        return Index("length", 0, keys)

    def load_beside(self, head: Index, other: Index, has_row: Mask, has_other: Mask) -> None:
        """Loads a block's bias and mask, for rows of `query` and what they meet."""
        made, is_key = self.made, self.heads.by == "key"
        down, across = ("t", "s") if is_key else ("s", "t")
        known = self.axes_at(head, other)
        by_row = {down, "h"} if self.heads.members > 1 else {down}
        for role, name, axes in (("bias", "bias", made.bias_axes), ("mask", "seen", made.mask_axes)):
            if not axes:
                continue
            steps = zip(axes, self.beside[role].strides, strict=True)
            where = f"{self.pointer(role)} + {total(known[axis] * step for axis, step in steps)}"
            mask = has_row.at(DOWN) if by_row & {*axes} else ALL
            mask = mask & has_other.at(ACROSS) if across in axes else mask
            self.text.line(f"{name} = {self.namespace}.load({where}{mask.guard('0')})")

    def add_beside(self) -> None:
        """Adds the bias, in units of log2, and hides what the mask does."""
        ns, made = self.namespace, self.made
        if made.bias_axes:
            scaled = f"bias.to({ns}.float32) * {LOG2_E!r}"
            # Frameworks hide keys by f32's least number, which stays a number: some key has a weight then.
            if not self.heads.by and dtype_of(self.beside["bias"].dtype).largest * LOG2_E > -LEAST:
                hidden = f"{ns}.where(bias == {NOTHING}, {NOTHING}, {LEAST!r})"
                scaled = f"{ns}.where(bias < {LEAST / LOG2_E!r}, {hidden}, {scaled})"
            self.text.line(f"scores += {scaled}")
        if made.mask_axes:
            self.text.line(f"scores = {ns}.where(seen != 0, scores, {NOTHING})")

    def has_key(self, key: Index, limit: Index) -> Mask:
        """The keys below a length, or below the last block's end."""
        is_whole = limit.constant is not None and self.heads.others % self.keys == 0
        return ALL if is_whole else key < limit

    def hide(self, key: Index, has_key: Mask, begin: Index, end: Index, start: Index | None = None) -> None:
        """Masks the block from `start` on, where some query does not see all of it."""
        text, ns, is_first = self.text, self.namespace, start is not None
        hidden = has_key.at(ACROSS) & self._band(key)
        if not hidden:
            return
        start = Index("start", 0, self.heads.others) if start is None else start
        behind = start + self.keys
        edges = [f"{behind} > {end.atom}"] if not is_first or behind.high > end.low else []
        edges += [f"{start} < {begin.atom}"] if self.heads.back else []
        if not edges:
            return
        is_certain = behind.low > end.high
        with nullcontext() if is_certain else text.block(f"if {' or '.join(edges)}"):
            text.line(f"scores = {ns}.where({hidden}, scores, {NOTHING})")

    def _band(self, key: Index) -> Mask:
        """The keys that a query's place lets it see."""
        heads, band = self.heads, ALL
        place, across = (self.query + heads.offset).at(DOWN), key.at(ACROSS)
        if heads.front == 1:
            band = condition(f"({across} <= {place})")
        if heads.back:
            band = band & condition(f"({across} > {place - heads.back})")
        if heads.front > 1:
            band = band & condition(f"({across} < {place + heads.front})")
        return band

    def weigh(self) -> None:
        """The exponentials of a block's scores, and what the sums so far are corrected by."""
        ns, scaled = self.namespace, "" if self.factor == 1.0 else f" * {self.factor!r}"
        self.text.line(
            f"larger = {ns}.maximum(top, {ns}.max(scores, 1){scaled})",
            f"base = {ns}.where(larger == {NOTHING}, 0.0, larger)",
            f"weights = {ns}.exp2(scores{scaled} - base[:, None])",
            f"correction = {ns}.exp2(top - base)",
            f"sums = sums * correction + {ns}.sum(weights, 1)",
            "top = larger",
        )

    def load_told(self, head: Index, query: Index, exists: Mask, axes: str = "") -> None:
        """Of queries: `lse`, the logarithms of their sums, and `delta`."""
        ns = self.namespace
        for name, other in (("lse", 'float("inf")'), ("delta", "0.0")):
            n, h, s = self.beside[name].strides
            at = self.batch * n + head * h + query * s
            self.text.line(f"{name} = {ns}.load({self.pointer(name)} + {at}{exists.guard(other)}){axes}")

    def write_base(self) -> None:
        """What weights are taken by: `lse` in units of log2."""
        # A query whose keys are all hidden by f32's least number has that as its sum: no digit is left of the
        # weights, and its keys get no gradient, as those of a query that sees none.
        ns = self.namespace
        self.text.line(f"base = {ns}.where(lse < {0.99 * LEAST / LOG2_E!r}, 0.0, lse) * {LOG2_E!r}")

    # ---- the end

    def store_sums(self, has_row: Mask) -> None:
        """The logarithm of each row's sum of exponentials, where the plan gives them."""
        made, ns = self.made, self.namespace
        for each in self.kernel.results:
            at = self.batch * (made.heads * made.queries) + self.head * made.queries + self.query
            address = f"{argument(Slot('result', each.key))} + {at}"
            value = f"top * {log(2)!r} + {ns}.log(sums)"
            self.text.line(f"{ns}.store({address}, {value}{has_row.guard(other='')})")

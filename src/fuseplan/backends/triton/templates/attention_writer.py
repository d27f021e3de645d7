"""The text of attention for any GPU: a tile of queries goes through blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.triton.index import ACROSS, DOWN, PRODUCT, WIDE, Index, Mask, arange, ceil_div, number
from fuseplan.backends.triton.shell import last_to_arrive, of_launch
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.attention_rows import AttentionKnobs, Factor, Rows, factors_of, padded
from fuseplan.backends.triton.templates.attention_scores import NOTHING
from fuseplan.kernels.emit import COUNTER_BYTES
from fuseplan.kernels.kernel import Kernel

FEW = 64  # queries: of fewer, the heads that read the same keys are rows of one tile


@dataclass(frozen=True)
class Side:
    """Rows of a tensor as one axis of a tile.

    Attributes:
        pointer: the tensor's argument.
        row: where each row begins; its elements are `step` apart.
        place: of each row, among the keys.
        exists: the rows that there are.
        across: how the elements of a row lie in the tile.
    """

    pointer: str
    row: Index
    step: int
    place: Index
    exists: Mask
    across: str


class AttentionWriter(Rows):
    """Writes one kernel.

    Attributes:
        workspace_bytes: the counters, and each part's sums; nothing where the keys are in one part.
    """

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title, FEW)
        spans = [kernel.src.span, kernel.dst.span, *(each.size for each in self.beside.values())]
        reach = max(spans) + knobs.rows * kernel.src.span // self.made.queries
        self.is_wide = self.is_open or reach >= WIDE
        # Numbers of one part: each row's largest score, sum, and sums of features.
        self._share = knobs.rows * (2 + padded(self.made.features))
        sums = 4 * self.tiles * self.heads.groups * knobs.parts * self._share
        self.workspace_bytes = COUNTER_BYTES + sums if knobs.parts > 1 else 0

    def write_body(self) -> None:
        self._tile()
        self._queries()
        self._loops()
        if self.knobs.parts > 1:
            self._meet()
        else:
            self._finish()

    # ---- where the tile lies

    def _tile(self) -> None:
        """Which heads and queries; the tiles with the most keys begin first."""
        text, made, heads, rows = self.text, self.made, self.heads, self.knobs.rows
        programs = of_launch(self.kernel, heads.groups) * self.tiles
        self.launched = text.index("program", number("tl.program_id(0)", programs))
        tile = self.launched % self.tiles
        tile = (self.tiles - 1) - tile if made.is_causal else tile
        first = self.place_tile(tile, self.launched // self.tiles)
        row = text.index("row", self.tile * rows + arange(rows))
        self.has_row = text.mask("has_row", row < heads.rows)
        self.query = text.index("query", row % made.queries if heads.members > 1 else row)
        head = first + row // made.queries if heads.members > 1 else first
        self.head = text.index("heads" if heads.members > 1 else "head", head.wide(self.is_wide))

    def _queries(self) -> None:
        at, step = self.begin("query", "src_row", self.head, self.query)
        place = self.query + self.made.offset
        side = Side("src", at.at(DOWN), step, place.at(DOWN), self.has_row.at(DOWN), ACROSS)
        factors = factors_of(self.made, self.is_wide, is_single=self.is_single)
        self.queries = [(self._loaded("queries", side, each), each) for each in factors]
        self.text.line(f"top = tl.full([{self.rows}], {NOTHING}, tl.float32)")
        self.text.line(f"sums = tl.zeros([{self.rows}], tl.float32)")
        self.results = self.zeros("made", self.made.features)

    def _loaded(self, name: str, side: Side, factor: Factor) -> tuple[str, ...]:
        """Loads elements of rows; pairs are turned by the angles of their rows' places."""
        text, names, across = self.text, list[str](), side.across
        for piece in factor.pieces:
            mask = side.exists & piece.exists.at(across)
            where = side.row + (piece.at * side.step).at(across)
            names.append(text.let(name, f"tl.load({side.pointer} + {where}{mask.guard()})"))
        if factor.pair is not None:
            at = side.place * self.made.angles[1] + factor.pair.at(across)
            guard = f"{at}{mask.guard()}"
            cos, sin = (
                text.let(each, f"tl.load({self.pointer(each)} + {guard}).to(tl.float32)")
                for each in ("cos", "sin")
            )
            one, other = (f"{each}.to(tl.float32)" for each in names)
            turned = (f"{one} * {cos} - {other} * {sin}", f"{other} * {cos} + {one} * {sin}")
            names = [text.let(name, f"({each}).to({named(self.kernel.src.dtype)})") for each in turned]
        self.split(*names)
        return tuple(names)

    # ---- the keys

    def _loops(self) -> None:
        """Blocks that some query of the tile sees.

        It is one loop: of two, ptxas makes the products wait for one another.
        """
        text, keys, parts = self.text, self.keys, self.knobs.parts
        limit = self.length()
        low, high, begin, end = self.seen(limit)
        low, high = text.index("low", low), text.index("high", self.most(high, 0))
        if parts > 1:
            low, high = self._part(low, high)
        begin, end = text.index("begin", begin), text.index("end", end)
        with text.block(f"for start in range({low}, {high}, {keys})"):
            self._block(limit, begin, end)

    def _part(self, low: Index, high: Index) -> tuple[Index, Index]:
        """The keys of this program, of those that its tile goes through: whole blocks."""
        text, keys, parts = self.text, self.knobs.keys, self.knobs.parts
        if low.constant == 0 and high.constant is not None:
            share = str(ceil_div(high.constant, keys * parts) * keys)
        else:
            span = f"tl.maximum({high} - {low.atom}, 0)" if low.constant is None else str(high)
            share = text.let("share", f"tl.cdiv({span}, {keys * parts}) * {keys}")
        part = number("tl.program_id(1)", parts)
        begin = low + Index(f"{part} * {share}", 0, self.made.keys, PRODUCT)
        text.line(f"part_low = {begin}", f"part_high = tl.minimum({high}, part_low + {share})")
        return Index("part_low", 0, self.made.keys), Index("part_high", 0, self.made.keys)

    def _block(self, limit: Index, begin: Index, end: Index) -> None:
        """One block: scores, their exponentials, and the product with the values."""
        text, made, keys = self.text, self.made, self.knobs.keys
        key = text.index("key", Index("start", 0, made.keys) + arange(keys))
        has_key = text.mask("has_key", self.has_key(key, limit))
        at, step = self.begin("key", "key_row", self.key_head, key)
        pointer, places = self.pointer("key"), key.at(ACROSS)
        side, sums = Side(pointer, at.at(ACROSS), step, places, has_key.at(ACROSS), DOWN), ""
        for queries, factor in self.queries:
            for query, name in zip(queries, self._loaded("k", side, factor), strict=True):
                self.dot("scores", query, name, sums)
                sums = "scores"
        self.scale(self.known(self.head, key))
        self.load_beside(self.head, key, self.has_row, has_key)
        self.add_beside()
        self.hide(key, has_key, begin, end)
        self.weigh()
        weights = "weights" if self.is_single else f"weights.to({named(self.kernel.src.dtype)})"
        self.split(weights)
        at, size = self.begin("value", "value_row", self.key_head, key)
        for result, piece in self.results:
            mask = has_key.at(DOWN) & piece.exists.at(ACROSS)
            where = at.at(DOWN) + (piece.at * size).at(ACROSS)
            text.line(f"v = tl.load({self.pointer('value')} + {where}{mask.guard()})")
            self.split("v")
            self.dot(result, weights, "v", f"{result} * correction[:, None]")

    # ---- the end

    def _meet(self) -> None:
        """Keeps this part's numbers; the last program of a tile joins them all, in order, and goes on."""
        text, rows, parts, share = self.text, self.knobs.rows, self.knobs.parts, self._share
        counter = f"workspace + {self.launched}"
        text.line(
            f"shares = (workspace + {COUNTER_BYTES // 4}).to(tl.pointer_type(tl.float32))",
            f"shares += {self.launched.wide()} * {parts * share}",
            f"within = tl.arange(0, {rows})",
        )
        places, start = [("top", "within"), ("sums", f"{rows} + within")], 2 * rows
        for result, piece in self.results:
            inside = f"within[:, None] * {piece.size} + tl.arange(0, {piece.size})[None, :]"
            places.append((result, f"{start} + {inside}"))
            start += rows * piece.size
        text.line(f"own = shares + tl.program_id(1) * {share}")
        text.line(*(f"tl.store(own + {at}, {name}, cache_modifier='.cg')" for name, at in places))
        with last_to_arrive(text, counter, parts):
            text.line(*(f"{name} = tl.load(shares + {at}, cache_modifier='.cg')" for name, at in places))
            with text.block(f"for part in range(1, {parts})"):
                text.line(f"other = shares + part * {share}")
                loads = [f"tl.load(other + {at}, cache_modifier='.cg')" for _, at in places]
                text.line(
                    f"other_top = {loads[0]}",
                    "larger = tl.maximum(top, other_top)",
                    f"base = tl.where(larger == {NOTHING}, 0.0, larger)",
                    "mine = tl.exp2(top - base)",
                    "theirs = tl.exp2(other_top - base)",
                    "top = larger",
                    f"sums = sums * mine + {loads[1]} * theirs",
                )
                for (name, _), load in zip(places[2:], loads[2:], strict=True):
                    text.line(f"{name} = {name} * mine[:, None] + {load} * theirs[:, None]")
            self._finish()

    def _finish(self) -> None:
        """The results, divided by the sums, through the epilogue; and the logarithms of the sums."""
        sums = "sums" if self.made.nan_unseen else "tl.where(sums == 0, 1.0, sums)"
        self.text.line(f"divisor = {sums}")
        self.store(self.results, lambda name: self.text.let("result", f"{name} / divisor[:, None]"))
        self.store_sums(self.has_row)

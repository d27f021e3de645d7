"""The text of attention for any GPU: a tile of queries goes through blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    PRODUCT,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    number,
    power_of_two,
    total,
)
from fuseplan.backends.triton.shell import Shell, of_launch, programs_of
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention_scores import LOG2_E, NOTHING, Scores
from fuseplan.kernels.emit import COUNTER_BYTES, Slot, Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.language.layouts import image_strides

LEAST = 16  # the smallest extent of a product's factor
FEW = 64  # queries: of fewer, the heads that read the same keys are rows of one tile


@dataclass(frozen=True)
class AttentionKnobs(GpuTemplate):
    """The fields of `GpuAttention`, which says what they mean."""

    rows: int
    keys: int
    parts: int
    warps: int
    stages: int


def pieces(size: int) -> tuple[int, ...]:
    """Powers of two that hold a row together: 96 as 64 and 32, where one would be padded to 128."""
    whole = power_of_two(max(size, LEAST))
    first = whole // 2
    rest = power_of_two(max(size - first, LEAST))
    return (whole,) if first < LEAST or rest >= first or first + rest >= whole else (first, rest)


@dataclass(frozen=True)
class Piece:
    """Elements of a row that one product takes: their numbers, and which of them there are."""

    at: Index
    exists: Mask
    size: int


def pieces_of(size: int, is_wide: bool) -> list[Piece]:
    """The pieces of a row."""
    found, start = list[Piece](), 0
    for width in pieces(size):
        at = start + arange(width).wide(is_wide)
        found.append(Piece(at, at < size, width))
        start += width
    return found


class AttentionWriter(Scores):
    """Writes one kernel.

    Attributes:
        workspace_bytes: the counters, and each part's sums; nothing where the keys are in one part.
    """

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, FEW, knobs.rows, knobs.keys)
        self.knobs, self.title = knobs, title
        spans = [kernel.src.span, kernel.dst.span, *(each.size for each in self.beside.values())]
        reach = max(spans) + knobs.rows * kernel.src.span // self.made.queries
        self.is_wide = kernel.open_axis is not None or reach >= WIDE
        self.exact = ', input_precision="ieee"' if kernel.src.dtype == "f32" else ""
        # Numbers of one part: each row's largest score, sum, and sums of features.
        self._share = knobs.rows * (2 + sum(pieces(self.made.features)))
        sums = 4 * self.tiles * self.heads.groups * knobs.parts * self._share
        self.workspace_bytes = COUNTER_BYTES + sums if knobs.parts > 1 else 0

    def source(self) -> Source:
        """The whole kernel."""
        slots = (
            Slot("src"),
            *(Slot("operand", each.key) for each in self.beside.values()),
            *self.epilogue.slots,
            Slot("dst"),
            *(Slot("result", each.key) for each in self.kernel.results),
            *((Slot("workspace"),) if self.knobs.parts > 1 else ()),
            *((Slot("extent"),) if self.kernel.open_axis is not None else ()),
        )
        shell = Shell(self.kernel, self.title, self.text, slots, entry="attention")
        with shell.body():
            self._tile()
            self._queries()
            self._loops()
            if self.knobs.parts > 1:
                self._meet()
            else:
                self._finish()
        options = (("num_warps", self.knobs.warps), ("num_stages", self.knobs.stages))
        programs = programs_of(self.kernel, self.heads.groups, 1, self.tiles)
        return shell.source(programs, options, workspace_bytes=self.workspace_bytes, parts=self.knobs.parts)

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
        text, src = self.text, self.kernel.src
        b, d, h, s = src.element_strides
        row = self.batch * b + self.head * h + self.query.wide(self.is_wide) * s
        row = text.index("src_row", row).at(DOWN)
        self.parts = []
        for piece in pieces_of(self.made.size, self.is_wide):
            mask = self.has_row.at(DOWN) & piece.exists.at(ACROSS)
            where = row + (piece.at * d).at(ACROSS)
            self.parts.append((text.let("queries", f"tl.load(src + {where}{mask.guard()})"), piece))
        text.line(f"top = tl.full([{self.knobs.rows}], {NOTHING}, tl.float32)")
        text.line(f"sums = tl.zeros([{self.knobs.rows}], tl.float32)")
        self.results = []
        for piece in pieces_of(self.made.features, self.is_wide):
            zeros = f"tl.zeros([{self.knobs.rows}, {piece.size}], tl.float32)"
            self.results.append((text.let("made", zeros), piece))

    # ---- the keys

    def _loops(self) -> None:
        """Blocks that some query of the tile sees.

        It is one loop: of two, ptxas makes the products wait for one another.
        """
        text, made, keys, parts = self.text, self.made, self.knobs.keys, self.knobs.parts
        limit = as_index(made.keys)
        if made.is_padded:
            length = f"tl.load({self.pointer('lengths')} + {self.batch})"
            text.line(f"length = tl.minimum(tl.maximum({length}, 0), {made.keys})")
            limit = Index("length", 0, made.keys)
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
        at, size = self._rows_of("key", key)
        for place, (query, piece) in enumerate(self.parts):
            mask = has_key.at(ACROSS) & piece.exists.at(DOWN)
            where = at.at(ACROSS) + (piece.at * size).at(DOWN)
            text.line(f"k = tl.load({self.pointer('key')} + {where}{mask.guard()})")
            text.line(f"scores = tl.dot({query}, k{', scores' if place else ''}{self.exact})")
        self._scores(key, has_key)
        self.hide(key, has_key, begin, end)
        self.weigh()
        factor = "weights" if self.exact else f"weights.to({named(self.kernel.src.dtype)})"
        at, size = self._rows_of("value", key)
        for result, piece in self.results:
            mask = has_key.at(DOWN) & piece.exists.at(ACROSS)
            where = at.at(DOWN) + (piece.at * size).at(ACROSS)
            text.line(f"v = tl.load({self.pointer('value')} + {where}{mask.guard()})")
            text.line(f"{result} = tl.dot({factor}, v, {result} * correction[:, None]{self.exact})")

    def _scores(self, key: Index, has_key: Mask) -> None:
        """What stands between the product and the exponential."""
        text, made = self.text, self.made
        exists = self.has_row.at(DOWN) & has_key.at(ACROSS)
        self.scale()
        if made.bias_axes:
            where, mask = self._spread("bias", key, exists)
            text.line(f"bias = tl.load({where}{mask.guard()})", f"scores += bias.to(tl.float32) * {LOG2_E!r}")
        if made.mask_axes:
            where, mask = self._spread("mask", key, exists)
            text.line(f"seen = tl.load({where}{mask.guard('0')})")
            text.line(f"scores = tl.where(seen != 0, scores, {NOTHING})")

    def _rows_of(self, role: str, key: Index) -> tuple[Index, int]:
        """Where the rows of key or value begin, and from one of their elements to the next."""
        b, h, t, step = self.beside[role].strides
        at = self.batch * b + self.key_head * h + key.wide(self.is_wide) * t
        return self.text.index(f"{role}_row", at), step

    def _spread(self, role: str, key: Index, exists: Mask) -> tuple[str, Mask]:
        """The addresses of a tensor with some axes of the scores, and which of them there are."""
        operand: KernelOperand = self.beside[role]
        axes = self.made.bias_axes if role == "bias" else self.made.mask_axes
        known = {"b": self.batch, "h": self.head.at(DOWN), "s": self.query.at(DOWN), "t": key.at(ACROSS)}
        where = total(known[axis] * step for axis, step in zip(axes, operand.strides, strict=True))
        is_row = "s" in axes or ("h" in axes and self.heads.members > 1)
        mask = (
            exists if is_row else Mask(tuple(term for term in exists.terms if ACROSS in term), exists.vectors)
        )
        return f"{self.pointer(role)} + {where}", mask

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
        text.line(
            "tl.debug_barrier()",
            f"arrived = tl.atomic_add({counter}, 1, sem='acq_rel', scope='gpu')",
        )
        with text.block(f"if arrived == {parts - 1}"):
            text.line("tl.debug_barrier()", f"tl.store({counter}, 0)")
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
        text, dst = self.text, self.kernel.dst
        text.line("divisor = tl.where(sums == 0, 1.0, sums)")
        steps = dst.element_strides
        inner = image_strides(dst.shape, steps)
        places = (self.head, self.query.wide(self.is_wide))
        row = self.batch * steps[0] + places[0] * steps[2] + places[1] * steps[3]
        row = text.index("dst_row", row).at(DOWN)
        within = (places[0] * inner[2] + places[1] * inner[3]).at(DOWN)
        for result, piece in self.results:
            made_of = text.let("result", f"{result} / divisor[:, None]")
            ends = piece.exists.at(ACROSS)
            mask = self.has_row.at(DOWN) & ends
            element = row + (piece.at * steps[1]).at(ACROSS)
            inside = within + (piece.at * inner[1]).at(ACROSS)
            channel = str(piece.at.at(ACROSS))
            place = Place(f"({element})", channel, f"({inside})", str(mask), str(ends))
            self.epilogue.store(made_of, place)
        self.store_sums(self.has_row)

"""The text of the gradients of attention: a tile of rows goes through blocks of the others.

Rows are queries for the gradient of src, and keys for those of key and value. Scores are computed again, in
units of log2, and their exponentials are weights by the saved sums. Blocks at the edges of a band, of a
length and at the end have masks.
"""

from __future__ import annotations

from contextlib import nullcontext

from fuseplan.backends.attending import SIDES
from fuseplan.backends.triton.elementwise import Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    condition,
    number,
    total,
)
from fuseplan.backends.triton.shell import Shell
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.attention_scores import LOG2_E, NOTHING, Scores
from fuseplan.backends.triton.templates.attention_writer import AttentionKnobs, Piece, pieces_of
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.layouts import image_strides
from fuseplan.scalar import fold

Strides = tuple[int, ...]
Tile = list[tuple[str, Piece]]  # the names of a tile's pieces


class GradientWriter(Scores):
    """Writes one kernel; `query` are the rows of a tile, which may be keys."""

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(kernel, 0, knobs.rows, knobs.keys)
        self.knobs, self.title = knobs, title
        self.is_key = self.heads.by == "key"
        # The tensors whose rows a tile has, and those whose rows it meets.
        self.own, self.across = SIDES[self.heads.by]
        reach = max(kernel.src.span, kernel.dst.span, *(each.size for each in self.beside.values()))
        self.is_wide = 2 * reach >= WIDE
        self.exact = ', input_precision="ieee"' if kernel.src.dtype == "f32" else ""

    def source(self) -> Source:
        """The whole kernel."""
        slots = (
            Slot("src"),
            *(Slot("operand", each.key) for each in self.beside.values()),
            *self.epilogue.slots,
            Slot("dst"),
            *(Slot("result", each.key) for each in self.kernel.results),
        )
        shell = Shell(self.kernel, self.title, self.text, slots, entry="attention_gradient")
        with shell.body():
            self._tile()
            self._loops()
            self._finish()
        options = (("num_warps", self.knobs.warps), ("num_stages", self.knobs.stages))
        return shell.source(self.heads.groups * self.tiles, options)

    # ---- where tensors lie

    def _lying(self, role: str) -> tuple[str, Strides, int]:
        """The pointer of a tensor of rows, its strides by image, head, row and element, and a row's size."""
        if role == "query":
            n, c, h, s = self.kernel.src.element_strides
            return "src", (n, h, s, c), self.made.size
        return self.pointer(role), self.beside[role].strides, self.beside[role].shape[-1]

    def _rows(self, role: str, name: str, head: Index, row: Index, exists: Mask) -> Tile:
        """Loads rows of a tensor, in pieces."""
        text, (pointer, (n, h, s, c), size) = self.text, self._lying(role)
        begin = self.batch * n + head * h + row.wide(self.is_wide) * s
        begin = text.index(f"{name}_row", begin).at(DOWN)
        tile: Tile = []
        for piece in pieces_of(size, self.is_wide):
            mask = text.both(exists.at(DOWN) & piece.exists.at(ACROSS))
            where = begin + (piece.at * c).at(ACROSS)
            tile.append((text.let(name, f"tl.load({pointer} + {where}{mask.guard()})"), piece))
        return tile

    def _sums(self, name: str, size: int) -> Tile:
        rows = self.knobs.rows
        return [
            (self.text.let(name, f"tl.zeros([{rows}, {piece.size}], tl.float32)"), piece)
            for piece in pieces_of(size, self.is_wide)
        ]

    def _statistics(self, head: Index, query: Index, exists: Mask, axes: str) -> None:
        """Of queries: the logarithms of the sums in units of log2, and delta, as an axis of the scores."""
        for name, other in (("lse", 'float("inf")'), ("delta", "0.0")):
            n, h, s = self.beside[name].strides
            at = self.batch * n + head * h + query * s
            self.text.line(f"{name} = tl.load({self.pointer(name)} + {at}{exists.guard(other)}){axes}")
        self.text.line(f"base = tl.where(lse == {NOTHING}, 0.0, lse) * {LOG2_E!r}")

    # ---- the tile

    def _tile(self) -> None:
        """Which rows a tile has, and their elements; the tiles that meet the most others begin first."""
        text, made, heads = self.text, self.made, self.heads
        program = text.index("program", number("tl.program_id(0)", heads.groups * self.tiles))
        tile = program % self.tiles
        tile = (self.tiles - 1) - tile if made.is_causal and not self.is_key else tile
        self.head = self.place_tile(tile, program // self.tiles).wide(self.is_wide)
        self.query = text.index("row", self.tile * self.rows + arange(self.rows))
        self.has_row = self.met = text.mask("has_row", self.query < heads.rows)
        self.limit = as_index(heads.others)
        if made.is_padded:
            length = f"tl.load({self.pointer('lengths')} + {self.batch})"
            text.line(f"length = tl.minimum(tl.maximum({length}, 0), {made.keys})")
            if self.is_key:
                self.met = text.mask("has_key", condition(f"({self.query} < length)"))
            else:
                self.limit = Index("length", 0, made.keys)
        self.tensors = [self._rows(role, role, self.head, self.query, self.met) for role in self.own]
        if not self.is_key:
            self._statistics(self.head, self.query, self.has_row, DOWN)
        sizes = (made.size, made.features) if self.is_key else (made.size,)
        self.sums = [self._sums("made", size) for size in sizes]

    # ---- the others

    def _loops(self) -> None:
        """The heads that read the same keys, one after another; blocks that some row of the tile meets."""
        text, through, names = self.text, self.heads.through, ("low", "high", "begin", "end")
        low, high, begin, end = map(text.index, names, self.seen(self.limit))
        inner = text.block(f"for member in range({through})") if through > 1 else nullcontext()
        with inner:
            head = text.index("other_head", self.key_head * through + number("member", through))
            with text.block(f"for start in range({low}, {high}, {self.keys})"):
                self._block(head, begin, end)

    def _block(self, head: Index, begin: Index, end: Index) -> None:
        """One block: scores and their slopes, and the products with these."""
        text, made = self.text, self.made
        other = text.index("other", Index("start", 0, self.heads.others) + arange(self.keys))
        exists = text.mask("has_other", self.has_key(other, self.limit))
        first, second = (self._rows(role, role, head, other, exists) for role in self.across)
        if self.is_key:
            self._statistics(head, other, exists, ACROSS)
        self._product("scores", self.tensors[0], first)
        self._product("products", self.tensors[1], second)
        steepness = fold(made.slope, {"x": "scores"}, self.table) if made.softcap else ""
        self.scale()
        self._beside(head, other, exists)
        self.hide(other, exists, begin, end)
        scaled = "" if self.factor == 1.0 else f" * {self.factor!r}"
        text.line(f"weights = tl.exp2(scores{scaled} - base)", "slopes = weights * (products - delta)")
        if steepness:
            text.line(f"slopes = slopes * {steepness}")
        for factor, others, sums in zip(("slopes", "weights"), (first, second), self.sums, strict=False):
            self._add(factor, others, sums)

    def _product(self, name: str, own: Tile, others: Tile) -> None:
        """The products of the tile's rows with the others."""
        for place, ((row, _), (other, _)) in enumerate(zip(own, others, strict=True)):
            more = f", {name}" if place else ""
            self.text.line(f"{name} = tl.dot({row}, tl.trans({other}){more}{self.exact})")

    def _add(self, factor: str, others: Tile, sums: Tile) -> None:
        """Adds the others, each times its factor."""
        factor = factor if self.exact else f"{factor}.to({named(self.kernel.src.dtype)})"
        for (other, _), (made, _) in zip(others, sums, strict=True):
            self.text.line(f"{made} = tl.dot({factor}, {other}, {made}{self.exact})")

    def _beside(self, head: Index, other: Index, exists: Mask) -> None:
        """Bias and mask of the scores."""
        text, made = self.text, self.made
        down, across = ("t", "s") if self.is_key else ("s", "t")
        known = {"b": self.batch, "h": head if self.is_key else self.head}
        known |= {down: self.query.at(DOWN), across: other.at(ACROSS)}
        for role, axes in (("bias", made.bias_axes), ("mask", made.mask_axes)):
            if not axes:
                continue
            steps = zip(axes, self.beside[role].strides, strict=True)
            where = f"{self.pointer(role)} + {total(known[axis] * step for axis, step in steps)}"
            mask = self.met.at(DOWN) if down in axes else ALL
            mask = mask & exists.at(ACROSS) if across in axes else mask
            text.line(f"beside = tl.load({where}{mask.guard('0')})")
            if role == "bias":
                text.line(f"scores += beside.to(tl.float32) * {LOG2_E!r}")
            else:
                text.line(f"scores = tl.where(beside != 0, scores, {NOTHING})")

    # ---- the end

    def _finish(self) -> None:
        """dst, through the epilogue, and the gradient of value; keys behind a length have none."""
        n, c, h, s = self.kernel.dst.element_strides
        inner = image_strides(self.kernel.dst.shape, (n, c, h, s))
        row = self.query.wide(self.is_wide)
        begin = self.text.index("dst_row", self.batch * n + self.head * h + row * s).at(DOWN)
        within = (self.head * inner[2] + row * inner[3]).at(DOWN)
        for name, piece in self.sums[0]:
            ends = piece.exists.at(ACROSS)
            mask = self.text.both(self.has_row.at(DOWN) & ends)
            element = begin + (piece.at * c).at(ACROSS)
            inside = within + (piece.at * inner[1]).at(ACROSS)
            place = Place(f"({element})", str(piece.at.at(ACROSS)), f"({inside})", str(mask), str(ends))
            scaled = name if self.made.softcap else f"{name} * {self.made.scale!r}"
            self.epilogue.store(self._met(scaled), place)
        for each in self.kernel.results:
            n, h, s, c = each.strides
            begin = self.text.index("result_row", self.batch * n + self.head * h + row * s).at(DOWN)
            for name, piece in self.sums[1]:
                mask = self.text.both(self.has_row.at(DOWN) & piece.exists.at(ACROSS))
                stored = self.epilogue.stored(self._met(name), each.dtype)
                where = f"{argument(Slot('result', each.key))} + {begin + (piece.at * c).at(ACROSS)}"
                self.text.line(f"tl.store({where}, {stored}{mask.guard(other='')})")

    def _met(self, sums: str) -> str:
        is_hidden = self.met != self.has_row
        return self.text.let("result", f"tl.where({self.met.at(DOWN)}, {sums}, 0.0)" if is_hidden else sums)

"""The text of the gradients of attention: a tile of rows goes through blocks of the others.

Rows are queries for the gradient of src, and keys for those of key and value. Scores are computed again, in
units of log2, and their exponentials are weights by the saved sums. Blocks at the edges of a band, of a
length and at the end have masks.
"""

from __future__ import annotations

from contextlib import nullcontext

from fuseplan.backends.attending import SIDES
from fuseplan.backends.triton.elementwise import argument
from fuseplan.backends.triton.index import (
    ACROSS,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    condition,
    number,
)
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.attention_rows import AttentionKnobs, Pieces, Rows, summed
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.scalar import fold


class GradientWriter(Rows):
    """Writes one kernel; `query` are the rows of a tile, which may be keys."""

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str) -> None:
        super().__init__(knobs, kernel, title, 0)
        self.is_key = self.heads.by == "key"
        # The tensors whose rows a tile has, and those whose rows it meets.
        self.own, self.across = SIDES[self.heads.by]
        reach = max(kernel.src.span, kernel.dst.span, *(each.size for each in self.beside.values()))
        self.is_wide = 2 * reach >= WIDE

    def write_body(self) -> None:
        self._tile()
        self._loops()
        self._finish()

    def joined(self, mask: Mask) -> Mask:
        return self.text.both(mask)

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
        length = self.length()
        self.limit = as_index(heads.others) if self.is_key else length
        if self.is_key and made.is_padded:
            self.met = text.mask("has_key", condition(f"({self.query} < {length})"))
        self.factors = [self._rows(role, self.head, self.query, self.met) for role in self.own]
        if not self.is_key:
            self.load_told(self.head, self.query, self.has_row, DOWN)
            self.write_base()
        sizes = (made.size, made.features) if self.is_key else (made.size,)
        self.sums = [self.zeros("made", size, self._widths(size)) for size in sizes]

    def _rows(self, role: str, head: Index, row: Index, exists: Mask) -> Pieces:
        size = self.made.size if role == "query" else self.beside[role].shape[-1]
        made = self.load(role, role, f"{role}_row", head, row, exists, self._widths(size))
        self.split(*(name for name, _ in made))
        return made

    def _widths(self, size: int) -> tuple[int, ...]:
        """Pieces of three products, whose sums are short; the usual ones of other arithmetic."""
        return summed(size) if self.knobs.arithmetic == "tf32x3" else ()

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
        first, second = (self._rows(role, head, other, exists) for role in self.across)
        if self.is_key:
            self.load_told(head, other, exists, ACROSS)
            self.write_base()
        self._product("scores", self.factors[0], first)
        self._product("products", self.factors[1], second)
        head = head if self.is_key else self.head
        known = self.known(head, other)
        steepness = "" if made.is_scaled else fold(made.slope, known, self.table)
        self.scale(known)
        self.load_beside(head, other, self.met, exists)
        self.add_beside()
        self.hide(other, exists, begin, end)
        scaled = "" if self.factor == 1.0 else f" * {self.factor!r}"
        text.line(f"weights = tl.exp2(scores{scaled} - base)", "slopes = weights * (products - delta)")
        if steepness:
            text.line(f"slopes = slopes * {steepness}")
        for factor, others, sums in zip(("slopes", "weights"), (first, second), self.sums, strict=False):
            self._add(factor, others, sums)

    def _product(self, name: str, own: Pieces, others: Pieces) -> None:
        """The products of the tile's rows with the others."""
        for place, ((row, _), (other, _)) in enumerate(zip(own, others, strict=True)):
            self.dot(name, row, other, name if place else "", "tl.trans({})")

    def _add(self, factor: str, others: Pieces, sums: Pieces) -> None:
        """Adds the others, each times its factor."""
        factor = factor if self.is_single else f"{factor}.to({named(self.kernel.src.dtype)})"
        self.split(factor)
        for (other, _), (made, _) in zip(others, sums, strict=True):
            self.dot(made, factor, other, made)

    # ---- the end

    def _finish(self) -> None:
        """dst, through the epilogue, and the gradient of value; keys behind a length have none."""
        scaled = "" if not self.made.is_scaled else f" * {self.made.scale!r}"
        self.store(self.sums[0], lambda name: self._met(f"{name}{scaled}"))
        row = self.query.wide(self.is_wide)
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

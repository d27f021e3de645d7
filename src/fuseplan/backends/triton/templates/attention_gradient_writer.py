"""The text of the gradients of attention: a tile of rows goes through blocks of the others.

Rows are queries for the gradient of src, and keys for those of key and value. Scores are computed again, in
units of log2, and their exponentials are weights by the saved sums. Blocks at the edges of a band, of a
length and at the end have masks.
"""

from __future__ import annotations

from fuseplan.backends.attending import SIDES, Heads
from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.elementwise import Elementwise, Place, argument
from fuseplan.backends.triton.index import (
    ACROSS,
    ALL,
    DOWN,
    WIDE,
    Index,
    Mask,
    arange,
    ceil_div,
    condition,
    number,
    total,
)
from fuseplan.backends.triton.shell import Shell
from fuseplan.backends.triton.storage import named
from fuseplan.backends.triton.templates.attention_scores import LOG2_E, NOTHING
from fuseplan.backends.triton.templates.attention_writer import AttentionKnobs, Piece, pieces_of
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.layouts import image_strides
from fuseplan.scalar import fold

Strides = tuple[int, ...]
Tile = list[tuple[str, Piece]]  # the names of a tile's pieces


class GradientWriter:
    """Writes one kernel."""

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str) -> None:
        self.knobs, self.kernel, self.title, self.made = knobs, kernel, title, kernel.attention
        self.text, self.heads = Text(), Heads.of(kernel, 0)
        self.is_key = self.heads.by == "key"
        # The sides of a tile's rows, and of the others, in scores.
        self.own, self.across = SIDES[self.heads.by]
        self.tiles = ceil_div(self.heads.rows, knobs.rows)
        self.epilogue = Elementwise(kernel, "epilogue", self.text)
        self.table = dialect.table(self.text, "tl", kernel.src.dtype, kernel.compute_dtype)
        self.beside = {each.role: each for each in kernel.operands if each.strides}
        reach = max(kernel.src.span, kernel.dst.span, *(each.size for each in self.beside.values()))
        self.is_wide = 2 * reach >= WIDE
        self.exact = ', input_precision="ieee"' if kernel.src.dtype == "f32" else ""
        # Without a softcap, the slope is a number, and a factor of the sums.
        self.scale = 1.0 if self.made.softcap else self.made.scale

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
        return self._pointer(role), self.beside[role].strides, self.beside[role].shape[-1]

    def _pointer(self, role: str) -> str:
        return argument(Slot("operand", self.beside[role].key))

    def _rows(self, role: str, name: str, head: Index, row: Index, exists: Mask) -> Tile:
        """Loads rows of a tensor, in pieces."""
        text, (pointer, (n, h, s, c), size) = self.text, self._lying(role)
        begin = self.batch * n + head * h + row.wide(self.is_wide) * s
        begin = text.index(f"{name}_row", begin).at(DOWN)
        tile: Tile = []
        for piece in pieces_of(size, self.is_wide):
            mask = exists.at(DOWN) & piece.exists.at(ACROSS)
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
            self.text.line(f"{name} = tl.load({self._pointer(name)} + {at}{exists.guard(other)}){axes}")
        self.text.line(f"base = tl.where(lse == {NOTHING}, 0.0, lse) * {LOG2_E!r}")

    # ---- the tile

    def _tile(self) -> None:
        """Which rows a tile has, and their elements; the tiles that meet the most others begin first."""
        text, made, heads, rows = self.text, self.made, self.heads, self.knobs.rows
        program = text.index("program", number("tl.program_id(0)", heads.groups * self.tiles))
        tile = program % self.tiles
        tile = (self.tiles - 1) - tile if made.is_causal and not self.is_key else tile
        self.tile, group = text.index("tile", tile), text.index("group", program // self.tiles)
        self.batch = text.index("batch", (group // heads.per_image).wide(self.is_wide))
        self.head = text.index("head", (group % heads.per_image).wide(self.is_wide))
        self.row = text.index("row", self.tile * rows + arange(rows))
        self.has_row = text.mask("has_row", self.row < heads.rows)
        self.limit = str(heads.others)
        seen = self.has_row
        if made.is_padded:
            length = f"tl.load({self._pointer('lengths')} + {self.batch})"
            text.line(f"length = tl.minimum(tl.maximum({length}, 0), {made.keys})")
        if made.is_padded and self.is_key:
            seen = text.mask("has_key", condition(f"({self.row} < length)"))
        elif made.is_padded:
            self.limit = "length"
        self.seen = seen
        self.tensors = [self._rows(role, role, self.head, self.row, seen) for role in self.own]
        if not self.is_key:
            self._statistics(self.head, self.row, self.has_row, DOWN)
        self.sums = [self._sums("made", made.size)]
        if self.is_key:
            self.sums.append(self._sums("made", made.features))

    # ---- the others

    def _loops(self) -> None:
        """The heads that read the same keys, one after another; blocks that some row of the tile meets."""
        text, heads, rows, keys = self.text, self.heads, self.knobs.rows, self.knobs.keys
        first = self.tile * rows + heads.offset
        text.line(f"first = {first}", f"last = tl.minimum({self.tile * rows + (rows - 1)}, {heads.rows - 1})")
        text.line(f"last = last + {heads.offset}")
        low, high, edges = "0", self.limit, [f"start + {keys} > {self.limit}"]
        if heads.front:
            high = f"tl.minimum({high}, last + {heads.front})"
            edges.append(f"start + {keys} > first + {heads.front}")
        if heads.back:
            low = f"tl.maximum(first - {heads.back - 1}, 0) // {keys} * {keys}"
            edges.append(f"start <= last - {heads.back}")
        text.line(f"low = {low}", f"high = {high}")
        head = self.head if self.is_key else self.head // self.made.group
        if heads.through == 1:
            self._blocks(head, edges)
            return
        with text.block(f"for member in range({heads.through})"):
            self._blocks(head * heads.through + Index("member", 0, heads.through - 1), edges)

    def _blocks(self, head: Index, edges: list[str]) -> None:
        text, keys = self.text, self.knobs.keys
        head = text.index("other_head", head)
        with text.block(f"for start in range(low, high, {keys})"):
            other = text.index("other", Index("start", 0, self.heads.others) + arange(keys))
            is_whole = self.limit.isdigit() and self.heads.others % keys == 0
            exists = ALL if is_whole else text.mask("has_other", condition(f"({other} < {self.limit})"))
            first, second = (self._rows(role, role, head, other, exists) for role in self.across)
            if self.is_key:
                self._statistics(head, other, exists, ACROSS)
            self._product("scores", self.tensors[0], first)
            self._product("products", self.tensors[1], second)
            if self.made.softcap:
                text.line(f"steepness = {fold(self.made.slope, {'x': 'scores'}, self.table)}")
            self._scores(head, other, exists)
            hidden = exists.at(ACROSS) & self._band(other)
            if hidden:
                with text.block(f"if {' or '.join(edges if exists else edges[1:])}"):
                    text.line(f"scores = tl.where({hidden}, scores, {NOTHING})")
            text.line("weights = tl.exp2(scores - base)", "slopes = weights * (products - delta)")
            if self.made.softcap:
                text.line("slopes = slopes * steepness")
            self._add("slopes", first, self.sums[0])
            if self.is_key:
                self._add("weights", second, self.sums[1])

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

    def _scores(self, head: Index, other: Index, exists: Mask) -> None:
        """What stands between the product and the exponential, in units of log2."""
        text, made = self.text, self.made
        if made.softcap:
            text.line(f"scores = {fold(made.score, {'x': 'scores'}, self.table)}")
        text.line(f"scores = scores * {self.scale * LOG2_E!r}")
        for role, axes in (("bias", made.bias_axes), ("mask", made.mask_axes)):
            if not axes:
                continue
            down, across = ("t", "s") if self.is_key else ("s", "t")
            own_head, at = (head, self.row) if self.is_key else (self.head, self.row)
            known = {"b": self.batch, "h": own_head, down: at.at(DOWN), across: other.at(ACROSS)}
            steps = zip(axes, self.beside[role].strides, strict=True)
            where = f"{self._pointer(role)} + {total(known[axis] * step for axis, step in steps)}"
            mask = self.seen.at(DOWN) if down in axes else ALL
            mask = mask & exists.at(ACROSS) if across in axes else mask
            text.line(f"beside = tl.load({where}{mask.guard('0')})")
            if role == "bias":
                text.line(f"scores += beside.to(tl.float32) * {LOG2_E!r}")
            else:
                text.line(f"scores = tl.where(beside != 0, scores, {NOTHING})")

    def _band(self, other: Index) -> Mask:
        """The others that a row's place lets it meet."""
        heads, band = self.heads, ALL
        place, across = (self.row + heads.offset).at(DOWN), other.at(ACROSS)
        if heads.front:
            band = condition(f"({across} < {place + heads.front})")
        if heads.back:
            band = band & condition(f"({across} > {place - heads.back})")
        return band

    # ---- the end

    def _finish(self) -> None:
        """dst, through the epilogue, and the gradient of value; keys behind a length have none."""
        n, c, h, s = self.kernel.dst.element_strides
        inner = image_strides(self.kernel.dst.shape, (n, c, h, s))
        row = self.row.wide(self.is_wide)
        begin = self.text.index("dst_row", self.batch * n + self.head * h + row * s).at(DOWN)
        within = (self.head * inner[2] + row * inner[3]).at(DOWN)
        for name, piece in self.sums[0]:
            ends = piece.exists.at(ACROSS)
            mask = self.has_row.at(DOWN) & ends
            element = begin + (piece.at * c).at(ACROSS)
            inside = within + (piece.at * inner[1]).at(ACROSS)
            place = Place(f"({element})", str(piece.at.at(ACROSS)), f"({inside})", str(mask), str(ends))
            self.epilogue.store(self._seen(f"{name} * {self.scale!r}"), place)
        for each in self.kernel.results:
            n, h, s, c = each.strides
            begin = self.text.index("result_row", self.batch * n + self.head * h + row * s).at(DOWN)
            for name, piece in self.sums[1]:
                mask = self.has_row.at(DOWN) & piece.exists.at(ACROSS)
                stored = self.epilogue.stored(self._seen(name), each.dtype)
                where = f"{argument(Slot('result', each.key))} + {begin + (piece.at * c).at(ACROSS)}"
                self.text.line(f"tl.store({where}, {stored}{mask.guard(other='')})")

    def _seen(self, sums: str) -> str:
        is_hidden = self.seen.at(DOWN) if self.seen != self.has_row else ALL
        return self.text.let("result", f"tl.where({is_hidden}, {sums}, 0.0)" if is_hidden else sums)

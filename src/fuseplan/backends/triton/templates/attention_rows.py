"""Rows of tensors in pieces: lines that attention and its gradients in Triton share.

A row of 96 elements is a piece of 64 and one of 32, each a factor of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import ACROSS, DOWN, Index, Mask, arange, power_of_two
from fuseplan.backends.triton.shell import programs_of
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.attention_scores import Scores
from fuseplan.backends.triton.templates.product_arithmetic import write_factors
from fuseplan.kernels.emit import Slot
from fuseplan.kernels.kernel import Kernel
from fuseplan.language.attend import Attend
from fuseplan.language.layouts import image_strides

LEAST = 16  # the smallest extent of a product's factor
# Of `ieee`. Triton makes sums that are added to a product the first of its summands, unless the number, which
# means something for fp8 alone, is not 0.
EXACT = ', input_precision="ieee", max_num_imprecise_acc=1'
SUMMED = 32  # elements of f32 whose products are summed in a row
HALVES = 8  # bytes of an f32 as the two numbers of `tf32x3`


@dataclass(frozen=True)
class AttentionKnobs(GpuTemplate):
    """The fields of `GpuAttention`, which says what they mean."""

    rows: int
    keys: int
    parts: int
    warps: int
    stages: int
    arithmetic: str = "native"


def pieces(size: int) -> tuple[int, ...]:
    """Powers of two that hold a row together: 96 as 64 and 32, where one would be padded to 128."""
    whole = power_of_two(max(size, LEAST))
    first = whole // 2
    rest = power_of_two(max(size - first, LEAST))
    return (whole,) if first < LEAST or rest >= first or first + rest >= whole else (first, rest)


def summed(size: int) -> tuple[int, ...]:
    """Pieces of f32: 32 products in a row, and then the sums of these, have less error than all in a row."""
    rest = range(size, 0, -SUMMED)
    return tuple(min(SUMMED, power_of_two(max(each, LEAST))) for each in rest)


def padded(size: int) -> int:
    """Elements of all pieces of a row."""
    return sum(pieces(size))


@dataclass(frozen=True)
class Piece:
    """Elements of a row that one product takes: their numbers, and which of them there are."""

    at: Index
    exists: Mask
    size: int


def pieces_of(size: int, is_wide: bool, widths: tuple[int, ...] = ()) -> list[Piece]:
    """The pieces of a row; those of `pieces` unless told."""
    found, start = list[Piece](), 0
    for width in widths or pieces(size):
        at = start + arange(width).wide(is_wide)
        found.append(Piece(at, at < size, width))
        start += width
    return found


@dataclass(frozen=True)
class Factor:
    """Elements of rows that are loaded together: a piece, or the first and the second elements of some pairs.

    Attributes:
        pair: the numbers of the pairs, which are turned; None of elements that are not.
    """

    pieces: tuple[Piece, ...]
    pair: Index | None = None


def factors_of(made: Attend, is_wide: bool, *, is_single: bool) -> list[Factor]:
    """The rows of queries and keys: turned pairs, and what is not turned."""

    def listed(size: int) -> list[Piece]:
        return pieces_of(size, is_wide, summed(size) if is_single else ())

    (step, apart), rest = made.pair_steps, made.size - made.rotary
    factors = [
        Factor(tuple(Piece(each.at * step + begin, each.exists, each.size) for begin in (0, apart)), each.at)
        for each in (listed(made.rotary // 2) if made.rotary else ())
    ]
    passing = listed(rest) if rest else []
    return factors + [Factor((Piece(each.at + made.rotary, each.exists, each.size),)) for each in passing]


Pieces = list[tuple[str, Piece]]  # the names of a tile's pieces


class Rows(Scores):
    """What kernels of attention in Triton share besides: rows in pieces, loaded and stored by pointers.

    `query` are the rows of a tile, and `has_row` says which of them there are; a template sets both.
    """

    has_row: Mask

    def __init__(self, knobs: AttentionKnobs, kernel: Kernel, title: str, few: int) -> None:
        super().__init__(kernel, title, few, knobs.rows, knobs.keys)
        self.knobs, self.entry, self.parts = knobs, knobs.name, knobs.parts
        self.options = (("num_warps", knobs.warps), ("num_stages", knobs.stages))
        self.programs = programs_of(kernel, self.heads.groups, 1, self.tiles)
        self.tensors = (
            Slot("src"),
            *(Slot("operand", each.key) for each in self.beside.values()),
            *self.epilogue.slots,
            Slot("dst"),
            *(Slot("result", each.key) for each in kernel.results),
        )
        self.is_single = kernel.src.dtype == "f32"

    def joined(self, mask: Mask) -> Mask:
        """A mask as loads and stores have it."""
        return mask

    def begin(self, role: str, name: str, head: Index, row: Index) -> tuple[Index, int]:
        """Writes where rows of a tensor begin; with the stride of their elements."""
        n, c, h, s = self.kernel.src.element_strides
        if role != "query":
            n, h, s, c = self.beside[role].strides
        return self.text.index(name, self.batch * n + head * h + row.wide(self.is_wide) * s), c

    def load(
        self,
        role: str,
        name: str,
        begin: str,
        head: Index,
        row: Index,
        exists: Mask,
        widths: tuple[int, ...] = (),
    ) -> Pieces:
        """Loads rows of a tensor, in pieces that have `name`; `begin` says where the rows do."""
        pointer, size = "src", self.made.size
        if role != "query":
            pointer, size = self.pointer(role), self.beside[role].shape[-1]
        at, step = self.begin(role, begin, head, row)
        tile: Pieces = []
        for piece in pieces_of(size, self.is_wide, widths):
            mask = self.joined(exists.at(DOWN) & piece.exists.at(ACROSS))
            where = at.at(DOWN) + (piece.at * step).at(ACROSS)
            tile.append((self.text.let(name, f"tl.load({pointer} + {where}{mask.guard()})"), piece))
        return tile

    def split(self, *names: str) -> None:
        """Writes the two numbers that a factor is in three products; nothing in other arithmetic."""
        for name in names if self.knobs.arithmetic == "tf32x3" else ():
            write_factors(self.text, name, name)

    def dot(self, name: str, first: str, second: str, sums: str, turn: str = "{}") -> None:
        """A product, added to sums where there are such; in f32 it is summed by itself.

        In three products the factors are `split`. `turn` is how the second one is turned.
        """
        added = f"{sums} + " if sums else ""
        if self.knobs.arithmetic == "tf32x3":
            high, left = turn.format(f"{second}_high"), turn.format(f"{second}_left")
            self.text.line(
                f'partial = tl.dot({first}_left, {high}, input_precision="tf32")',
                f'partial = tl.dot({first}_high, {left}, partial, input_precision="tf32")',
                f'{name} = {added}tl.dot({first}_high, {high}, partial, input_precision="tf32")',
            )
        elif self.is_single:
            self.text.line(f"{name} = {added}tl.dot({first}, {turn.format(second)}{EXACT})")
        else:
            product = f"{first}, {turn.format(second)}"
            self.text.line(f"{name} = tl.dot({product}{', ' if sums else ''}{sums})")

    def zeros(self, name: str, size: int, widths: tuple[int, ...] = ()) -> Pieces:
        """Sums of a tile's rows, in pieces."""
        return [
            (self.text.let(name, f"tl.zeros([{self.rows}, {piece.size}], tl.float32)"), piece)
            for piece in pieces_of(size, self.is_wide, widths)
        ]

    def store(self, sums: Pieces, made: Callable[[str], str]) -> None:
        """What is `made` of each piece of the sums, through the epilogue to dst."""
        n, c, h, s = self.kernel.dst.element_strides
        inner, row = image_strides(self.kernel.dst.shape, (n, c, h, s)), self.query.wide(self.is_wide)
        begin = self.text.index("dst_row", self.batch * n + self.head * h + row * s).at(DOWN)
        within = (self.head * inner[2] + row * inner[3]).at(DOWN)
        for name, piece in sums:
            ends = piece.exists.at(ACROSS)
            mask = self.joined(self.has_row.at(DOWN) & ends)
            element = begin + (piece.at * c).at(ACROSS)
            inside = within + (piece.at * inner[1]).at(ACROSS)
            place = Place(f"({element})", str(piece.at.at(ACROSS)), f"({inside})", str(mask), str(ends))
            self.epilogue.store(made(name), place)

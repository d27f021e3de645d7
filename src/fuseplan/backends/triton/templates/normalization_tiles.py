"""How the kernels with reductions cut their tensors: channels among groups of programs, positions in a group.

The elements of dst, in the order in which they are stored, are seen in one of two forms. `rows`: a matrix
whose columns are reduced one by one (channels last, or one image's places), or in segments of as many columns
as a plane has positions (channels first). `planes`: all positions of one channel, image after image.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Protocol

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.templates.pointwise_writer import (
    VECTOR,
    WIDE,
    ceil_div,
    merged,
    offset,
    power_of_two,
)
from fuseplan.backends.triton.text import Text
from fuseplan.kernel import Kernel


class Knobs(Protocol):
    """The template's fields."""

    @property
    def form(self) -> str:
        """`rows` or `planes`."""

    @property
    def rows(self) -> int:
        """Rows of a tile; 1 of planes."""

    @property
    def columns(self) -> int:
        """Columns of a tile, or positions."""

    @property
    def unrolled(self) -> int:
        """Tiles that a program reads at a time; 0: all, once, and they stay in its registers."""

    @property
    def programs(self) -> int:
        """Programs of a group."""

    @property
    def groups(self) -> int:
        """Groups of programs."""

    @property
    def warps(self) -> int:
        """Of a program."""

    @property
    def resident(self) -> int:
        """Programs that a processor has to hold at a time."""


@dataclass(frozen=True)
class Tile:
    """Where the elements of a tile are.

    Attributes:
        source: text of their offsets in src.
        place: how they lie in dst.
        exists: name of which of its rows or positions there are, broadcastable to the tile; "" for all.
    """

    source: str
    place: Place
    exists: str


class Cut:
    """A kernel's tensors, cut as the knobs say.

    Attributes:
        area: positions of a plane.
        segment: columns that make one number; 1 unless channels are first and the form is `rows`.
        extent: rows or positions over which is summed.
        row: columns of the matrix; 1 of planes.
        width: columns that a tile is for; no more than it has.
        numbers: channels (or places) of a tile, a power of two; 0 of planes, which have one.
        tiles: tiles side by side; a group has one at a time.
        block: rows or positions of a tile.
    """

    def __init__(self, kernel: Kernel, knobs: Knobs) -> None:
        self.kernel, self.knobs = kernel, knobs
        dst = kernel.dst
        self.batch, self.channels, self.area = dst.batch, dst.channels, prod(dst.spatial)
        self.is_last = dst.is_channels_last or self.area == 1
        self.per_place = kernel.reduced_per == "activation"
        self.is_planes = knobs.form == "planes"
        across = self.channels * self.area
        images = self.per_place or not self.is_last
        self.extent, self.row = (self.batch, across) if images else (self.batch * self.area, self.channels)
        self.segment = 1 if self.per_place or self.is_last or self.is_planes else self.area
        if self.is_planes:
            self.extent, self.row = self.batch * self.area, 1
        self.block = knobs.columns if self.is_planes else knobs.rows
        self.each = self._each()
        self.width = 1 if self.is_planes else self.each * self.segment
        self.numbers = 0 if self.is_planes else power_of_two(self.each)
        self.tiles = self.channels if self.is_planes else ceil_div(self.row, self.width)
        self.is_wide = max(kernel.src.span, dst.span) + 2 * knobs.rows * knobs.columns >= WIDE

    def _each(self) -> int:
        """Channels or places of a tile: so many that tiles begin at whole vectors, where that can be."""
        if self.is_planes:
            return 1
        fitting = self.knobs.columns // self.segment
        lot = VECTOR // self.kernel.dst.itemsize
        lot //= gcd(lot, self.segment)
        return fitting // lot * lot if self.segment > 1 and fitting >= lot else max(1, fitting)

    @property
    def is_kept(self) -> bool:
        """Whether a program holds all its tiles."""
        return not self.knobs.unrolled

    @property
    def blocks(self) -> int:
        """Blocks of rows or positions, of as many tiles as are read at a time."""
        return ceil_div(self.extent, self.block * max(1, self.knobs.unrolled))

    @property
    def steps(self) -> int:
        """Blocks of the program that has the most."""
        return ceil_div(self.blocks, self.knobs.programs)

    @property
    def is_even(self) -> bool:
        """Whether every block is whole."""
        return self.extent % (self.block * max(1, self.knobs.unrolled)) == 0

    @property
    def is_aligned(self) -> bool:
        """Whether rows, or planes, are whole vectors, and elements can be moved so."""
        return (self.area if self.is_planes else self.row) % (VECTOR // self.kernel.dst.itemsize) == 0

    @property
    def is_exact(self) -> bool:
        """Whether a tile has no more columns than it is for, wherever it lies."""
        return self.is_planes or (self.width == self.knobs.columns and self.row % self.width == 0)

    # ---- text

    def columns(self, text: Text) -> None:
        """Writes the names that all tiles of a column share: `channel`, `column` and what exists of them."""
        wide = ".to(tl.int64)" if self.is_wide else ""
        if self.is_planes:
            text.line(f"channel = tile{wide}")
            return
        count = self.knobs.columns
        text.line(f"lane = tl.arange(0, {count})", f"column = (tile * {self.width}){wide} + lane")
        masks = [f"(lane < {self.width})"] if self.width < count else []
        masks += [f"(column < {self.row})"] if self.row % self.width else []
        if masks:
            text.line(f"has_column = {' & '.join(masks)}")
        if self.segment > 1:
            text.line(f"which = tl.minimum(lane // {self.segment}, {self.numbers - 1})")
            text.line(f"each = tl.arange(0, {self.numbers})", f"channel = (tile * {self.each}){wide} + each")
            text.line(f"has_channel = (each < {self.each}) & (channel < {self.channels})")

    @property
    def channel(self) -> tuple[str, str]:
        """The channels of the tile's numbers, and which exist; of a tile per place, those of its columns."""
        if self.is_planes:
            return "channel", ""
        if self.segment > 1:
            return "channel", "has_channel"
        mask = "" if self.is_exact else "has_column"
        if not self.per_place or self.area == 1:
            return "column", mask
        return f"(column {f'% {self.channels}' if self.is_last else f'// {self.area}'})", mask

    @property
    def result(self) -> str:
        """Where the tile's numbers lie in a result: dense in logical order."""
        if self.per_place and self.is_last and self.area > 1:
            return f"(column % {self.channels}) * {self.area} + column // {self.channels}"
        return self.channel[0] if not self.per_place else "column"

    def tile(self, text: Text, block: str, is_cut: bool) -> Tile:
        """Writes where the tile is whose place among the blocks is `block`; `is_cut`: parts may not exist."""
        which = f"(tl.full((), 0, tl.int64) + {block})" if self.is_wide else block
        start = f"{which} * {self.block}"
        if self.is_crossing:
            return self._crossing(text, start, is_cut)
        at = text.let("position" if self.is_planes else "row", f"{start} + tl.arange(0, {self.block})")
        exists = text.let("exists", f"{at} < {self.extent}") if is_cut else ""
        return self._planes(text, at, exists) if self.is_planes else self._rows(text, at, exists)

    @property
    def is_crossing(self) -> bool:
        """Whether a tile meets two planes at most, and positions are counted one by one in any case.

        Where a plane is no multiple of a vector, no two positions are moved at once, and a division for each
        would take longer than the move.
        """
        is_dense = self.kernel.src.layout is not None
        return self.is_planes and not self.is_aligned and self.block <= self.area and is_dense

    def _crossing(self, text: Text, start: str, is_cut: bool) -> Tile:
        """A tile that begins in one plane and may end in the next image's."""
        first = text.let("first", start)
        text.line(f"image = {first} // {self.area}")
        spot = text.let("spot", f"({first} - image * {self.area}) + tl.arange(0, {self.block})")
        across = self.channels * self.area
        jump = f"tl.where({spot} < {self.area}, 0, {across - self.area})"
        element = text.let("at", f"(image * {across} + channel * {self.area}) + {spot} + {jump}")
        left = f"{self.extent} - {first}"
        exists = text.let("exists", f"tl.arange(0, {self.block}) < {left}") if is_cut else ""
        inside = f"channel * {self.area} + tl.where({spot} < {self.area}, {spot}, {spot} - {self.area})"
        return Tile(element, Place(element, "channel", inside, exists, ""), exists)

    def _planes(self, text: Text, position: str, exists: str) -> Tile:
        dst, src = (self._positions(position, strides) for strides in self._strides())
        element = text.let("at", dst)
        source = element if src == dst else text.let("at", src)
        inside = f"channel * {self.area} + {position} % {self.area}"
        return Tile(source, Place(element, "channel", inside, exists, ""), exists)

    def _strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.kernel.dst.element_strides, self.kernel.src.element_strides

    def _positions(self, position: str, strides: tuple[int, ...]) -> str:
        """The offset of a position of the channel."""
        shape = self.kernel.dst.shape
        axes = merged((shape[0], *shape[2:]), (strides[0], *strides[2:]))
        return f"channel * {strides[1]} + {offset(position, axes)}"

    def _rows(self, text: Text, row: str, exists: str) -> Tile:
        element = text.let("at", f"{row}[:, None] * {self.row} + column")
        below = self._matrix(row)
        source = text.let("at", below) if below else element
        masks = [f"{exists}[:, None]"] if exists else []
        masks += [] if self.is_exact else ["has_column"]
        mask = text.let("mask", " & ".join(masks)) if masks else ""
        inside = "column"
        if not self.per_place and self.is_last and self.area > 1:
            inside = f"({row} % {self.area})[:, None] * {self.channels} + column"
        channel, channel_mask = self.channel
        place = Place(element, channel, inside, mask, channel_mask)
        return Tile(source, place, text.let("exists", f"{exists}[:, None]") if exists else "")

    def _matrix(self, row: str) -> str:
        """The offsets in src where it does not lie as dst does, else ""."""
        shape, strides = self.kernel.dst.shape, self.kernel.src.element_strides
        order = sorted(
            range(len(shape)), key=lambda axis: (-self.kernel.dst.element_strides[axis], shape[axis])
        )
        order = [axis for axis in order if shape[axis] > 1]
        if self.per_place or not self.is_last:
            inner = [axis for axis in order if axis]
        else:
            inner = [axis for axis in order if axis == 1]
        outer = [axis for axis in order if axis not in inner]
        down, across = (
            merged([shape[i] for i in each], [strides[i] for i in each]) for each in (outer, inner)
        )
        if down in ([], [(self.extent, self.row)]) and across in ([], [(self.row, 1)]):
            return ""
        return f"({offset(row, down)})[:, None] + {offset('column', across)}"

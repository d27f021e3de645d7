"""How the kernels with reductions cut their tensors: channels among groups of programs, positions in a group.

The elements of dst, in the order in which they are stored, are seen in one of two forms. `rows`: a matrix
whose columns are reduced one by one (channels last, or one image's places), or in segments of as many columns
as a plane has positions (channels first). `planes`: all positions of one channel, image after image.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from fuseplan.backends.triton.elementwise import Place
from fuseplan.backends.triton.index import (
    ALL,
    DOWN,
    SUM,
    WIDE,
    Index,
    Mask,
    arange,
    as_index,
    ceil_div,
    divides,
    merged,
    offset,
    power_of_two,
)
from fuseplan.backends.triton.shell import of_launch
from fuseplan.backends.triton.templates.pointwise_writer import VECTOR
from fuseplan.backends.triton.text import Text
from fuseplan.kernels.kernel import Kernel


@dataclass(frozen=True)
class Knobs:
    """The fields of `GpuNormalization`, which says what they mean."""

    form: str
    rows: int
    columns: int
    unrolled: int
    programs: int
    groups: int
    warps: int
    resident: int


@dataclass(frozen=True)
class Tile:
    """Where the elements of a tile are.

    Attributes:
        source: their offsets in src.
        place: how they lie in dst.
        exists: which of its rows or positions there are, broadcastable to the tile.
        x: name of src's elements, as they are stored; "" where they are not read.
    """

    source: Index
    place: Place
    exists: Mask
    x: str = ""


class Cut:
    """A kernel's tensors, cut as the knobs say.

    Attributes:
        area: positions of a plane.
        segment: columns that make one number; 1 unless channels are first and the form is `rows`.
        extent: rows or positions over which is summed.
        count: columns of the matrix, or channels of planes.
        row: columns of the matrix, in a launch; 1 of planes.
        width: columns that a tile is for; no more than it has.
        numbers: channels (or places) of a tile, a power of two; 0 of planes, which have one.
        tiles, launched: tiles side by side, of the representative and of a launch; a group has one at a time.
        block: rows or positions of a tile.
        is_kept: whether a program holds all its tiles.
        blocks, is_even: blocks of rows or positions, of as many tiles as are read at a time; if all are
            whole.
        steps: blocks of the program that has the most.
        channel, has_channel: in the text, the channels of the tile's numbers, and which exist; of a tile per
            place, those of its columns.
        column, has_column: the tile's columns, and which exist; not of planes.
    """

    channel: Index
    has_channel: Mask
    column: Index
    has_column: Mask

    def __init__(self, kernel: Kernel, knobs: Knobs) -> None:
        self.kernel, self.knobs = kernel, knobs
        dst = kernel.dst
        self.batch, self.area = dst.batch, prod(dst.spatial)
        self.channels = of_launch(kernel, dst.channels)
        self.is_last = dst.is_channels_last or self.area == 1
        self.per_place = kernel.reduction.per == "activation"
        self.is_planes = knobs.form == "planes"
        across = dst.channels * self.area
        images = not self.is_planes and (self.per_place or not self.is_last)
        self.extent, self.count = (self.batch, across) if images else (self.batch * self.area, dst.channels)
        self.segment = self.area if images and not self.per_place else 1
        self.block = knobs.columns if self.is_planes else knobs.rows
        self.each = self._each()
        self.width = 1 if self.is_planes else self.each * self.segment
        self.numbers = 0 if self.is_planes else power_of_two(self.each)
        self.tiles = ceil_div(self.count, self.width)
        self.row = as_index(1) if self.is_planes else of_launch(kernel, self.count)
        self.is_kept, together = not knobs.unrolled, self.block * max(1, knobs.unrolled)
        self.blocks, self.is_even = ceil_div(self.extent, together), self.extent % together == 0
        self.steps = ceil_div(self.blocks, knobs.programs)

    @property
    def launched(self) -> Index:
        """Tiles side by side of a launch."""
        return ceil_div(of_launch(self.kernel, self.count), self.width)

    @property
    def is_wide(self) -> bool:
        """Whether offsets have 64 bits."""
        reach = max(self.kernel.src.span, self.kernel.dst.span) + 2 * self.knobs.rows * self.knobs.columns
        return self.kernel.open_axis is not None or reach >= WIDE

    def _each(self) -> int:
        """Channels or places of a tile: so many that tiles begin at whole vectors, where that can be."""
        if self.is_planes:
            return 1
        fitting = self.knobs.columns // self.segment
        lot = VECTOR // self.kernel.dst.itemsize
        lot //= gcd(lot, self.segment)
        return fitting // lot * lot if self.segment > 1 and fitting >= lot else max(1, fitting)

    @property
    def is_aligned(self) -> bool:
        """Whether rows, or planes, are whole vectors, and elements can be moved so."""
        return divides(VECTOR // self.kernel.dst.itemsize, self.area if self.is_planes else self.row)

    @property
    def spreads(self) -> bool:
        """Whether a tile of rows has numbers for several columns each, of which `which` tells a column's."""
        return self.segment > 1 and self.numbers > 1

    # ---- text

    def begin(self, text: Text, tile: Index) -> None:
        """Writes the names that all tiles of a column share: `channel`, `column` and what exists of them."""
        tile = tile.widened(self.is_wide)
        if self.is_planes:
            self.channel, self.has_channel = text.index("channel", tile), ALL
            return
        lane = text.index("lane", arange(self.knobs.columns))
        self.column = text.index("column", tile * self.width + lane)
        ends = ALL if divides(self.width, self.row) else self.column < self.row
        self.has_column = text.mask("has_column", (lane < self.width) & ends)
        if self.segment > 1:
            which = text.index("which", lane // self.segment)
            if which.high >= self.numbers:
                text.line(f"which = tl.minimum({which}, {self.numbers - 1})")
            each = text.index("each", arange(self.numbers))
            self.channel = text.index("channel", tile * self.each + each)
            has_channel = (each < self.each) & (self.channel < self.channels)
            self.has_channel = text.mask("has_channel", has_channel)
            return
        self.channel, self.has_channel = self.column, self.has_column
        if self.per_place:
            channels = self.kernel.dst.channels
            self.channel = self.column % channels if self.is_last else self.column // self.area

    @property
    def result(self) -> Index:
        """Where the tile's numbers lie in a result: dense in logical order."""
        if not self.per_place:
            return self.channel
        if not self.is_last:
            return self.column
        channels = self.kernel.dst.channels
        return self.column % channels * self.area + self.column // channels

    def tile(self, text: Text, block: Index) -> Tile:
        """Writes where the tile is whose place among the blocks is `block`."""
        start, spots = block * self.block, arange(self.block)
        if self.is_crossing:
            return self._crossing(text, text.index(text.name("first"), start), spots)
        at = text.index(text.name("position" if self.is_planes else "row"), start + spots)
        exists = text.mask(text.name("exists"), at < self.extent)
        return self._planes(text, at, exists) if self.is_planes else self._rows(text, at, exists)

    @property
    def is_crossing(self) -> bool:
        """Whether a tile meets two planes at most, and positions are counted one by one in any case.

        Where a plane is no multiple of a vector, no two positions are moved at once, and a division for each
        would take longer than the move.
        """
        is_dense = self.kernel.src.layout is not None
        return self.is_planes and not self.is_aligned and self.block <= self.area and is_dense

    def _crossing(self, text: Text, first: Index, spots: Index) -> Tile:
        """A tile that begins in one plane and may end in the next image's."""
        area, across = self.area, self.channels * self.area
        image = text.index("image", first // area)
        plane = self.channel * area
        spot = Index(f"{first.atom} - {image * area}", 0, area - 1, SUM) if image.constant != 0 else first
        spot = text.index(text.name("spot"), spot + spots)
        element, inside = image * across + plane + spot, plane + spot
        if spot.high >= area:
            jump = Index(f"tl.where({spot < area}, 0, {across - area})")
            element, inside = element + jump, plane + Index(f"tl.where({spot < area}, {spot}, {spot - area})")
        exists = text.mask(text.name("exists"), spots < self.extent - first)
        element = text.index(text.name("at"), element)
        return Tile(element, Place(str(element), str(self.channel), str(inside), str(exists), ""), exists)

    def _planes(self, text: Text, position: Index, exists: Mask) -> Tile:
        dst, src = (
            self._positions(position, each.element_strides) for each in (self.kernel.dst, self.kernel.src)
        )
        element = text.index(text.name("at"), dst)
        source = element if src == dst else text.index(text.name("at"), src)
        inside = self.channel * self.area + position % self.area
        return Tile(source, Place(str(element), str(self.channel), str(inside), str(exists), ""), exists)

    def _positions(self, position: Index, strides: tuple[int, ...]) -> Index:
        """The offset of a position of the channel."""
        shape = self.kernel.dst.shape
        axes = merged(zip((shape[0], *shape[2:]), (strides[0], *strides[2:]), strict=True))
        return self.channel * strides[1] + offset(position, axes)

    def _rows(self, text: Text, row: Index, exists: Mask) -> Tile:
        element = text.index(text.name("at"), row.at(DOWN) * self.row + self.column)
        below = self._matrix(row)
        source = text.index(text.name("at"), below) if below else element
        exists = exists.at(DOWN)
        mask = text.mask(text.name("mask"), exists & self.has_column)
        inside = self.column
        if not self.per_place and self.is_last:
            inside = (row % self.area).at(DOWN) * self.channels + self.column
        place = Place(str(element), str(self.channel), str(inside), str(mask), str(self.has_channel))
        return Tile(source, place, exists)

    def _matrix(self, row: Index) -> Index | None:
        """The offsets in src where it does not lie as dst does."""
        shape, strides = self.kernel.dst.shape, self.kernel.src.element_strides
        order = sorted(
            range(len(shape)), key=lambda axis: (-self.kernel.dst.element_strides[axis], shape[axis])
        )
        inner = range(1, len(shape)) if self.per_place or not self.is_last else (1,)
        down = merged((shape[axis], strides[axis]) for axis in order if axis not in inner)
        across = merged((shape[axis], strides[axis]) for axis in order if axis in inner)
        if down in ((), ((self.extent, self.count),)) and across in ((), ((self.count, 1),)):
            return None
        return offset(row, down).at(DOWN) + offset(self.column, across)

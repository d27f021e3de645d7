"""How tiles of output positions cover an image, and where in src the positions of a tile begin.

Positions are numbered along dst's spatial axes, the last one fastest. Where a tile lies inside one line, or
covers whole lines, its positions stand at constant distances in src: one address register serves all of them.
A tile that may begin anywhere needs an address for each position, and x86 has 15 registers for addresses: 14
positions then run at 0.8 of their speed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from operator import mul

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import I1
from fuseplan.backends.cpu.loops import ceil_div, offset_of, places
from fuseplan.backends.cpu.staging import Staged
from fuseplan.backends.cpu.sums import UNROLL
from fuseplan.kernels.kernel import Kernel

_ALIGN = 16  # elements: a thread's part of the workspace begins on a cache line
MOST_ADDRESSES = 8  # positions of a tile that may begin anywhere


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` positions over a sheet: the batch, an image, or some lines of one.

    Attributes:
        staged: how src is found.
        rows: positions in a tile.
        positions: positions in the sheet; of an open kernel that is being written, a value.
        kind: `run` (all positions of the sheet at one distance), `line` (a tile lies inside a line), `lines`
            (a tile is one or more whole lines), `scattered` (a tile begins anywhere).
    """

    staged: Staged
    rows: int
    positions: int
    kind: str

    @property
    def width(self) -> int:
        """Positions in a line."""
        return self.staged.convolution.dst_spatial[-1]

    @property
    def _parts(self) -> int:
        """Tiles in a line."""
        return -(-self.width // self.rows)

    @property
    def count(self) -> int:
        """Tiles in the sheet."""
        if self.kind == "line":
            return self.positions // self.width * self._parts
        found: int = ceil_div(self.positions, self.rows)
        return found

    @property
    def waste(self) -> float:
        """Positions computed over positions wanted."""
        return self.count * self.rows / self.positions

    def start(self, b: Builder, tile: Index) -> Index:
        """The first position of a tile; the last tile starts early instead of being shorter."""
        if self.kind != "line":
            first = tile * self.rows
            is_even = isinstance(self.positions, int) and self.positions % self.rows == 0
            return first if is_even else b.smaller(first, self.positions - self.rows)
        part = tile % self._parts * self.rows
        if self.width % self.rows:
            part = b.smaller(part, self.width - self.rows)
        return tile // self._parts * self.width + part

    def distances(self) -> list[int] | None:
        """Elements in src from the first position of a tile to each, or None where tiles differ."""
        conv, strides = self.staged.convolution, self.staged.strides
        if self.kind == "scattered":
            return None
        across = conv.stride[-1] * strides[-1]
        if self.kind == "lines":
            down = conv.stride[-2] * strides[-2]
            return [r // self.width * down + r % self.width * across for r in range(self.rows)]
        return [r * across for r in range(self.rows)]

    def offset(self, b: Builder, position: Index, image: Index | None) -> Index:
        """The element of src under the first tap of a position.

        `image` is given where positions are counted within one; without it they run on through the batch.
        """
        conv, strides = self.staged.convolution, self.staged.strides
        if self.kind == "run":
            first = position * conv.channels
            return first if image is None else image * self.staged.image + first
        steps = (self.staged.image, *map(mul, conv.stride, strides))
        if image is None:
            return offset_of(places(position, (conv.batch, *conv.dst_spatial)), steps)
        return offset_of([image, *places(position, conv.dst_spatial)], steps)


def tiling(
    staged: Staged, rows: int, positions: int, *, plain: bool = False, scattered: bool = True
) -> Tiling:
    """The covering whose tiles are cheapest to address, and waste little.

    Args:
        plain: positions are no run elsewhere, even where src is read as one.
        scattered: tiles may begin anywhere; else they are parts of lines, or whole ones.
    """
    if not scattered:
        is_part = rows <= staged.convolution.dst_spatial[-1]
        return Tiling(staged, rows, positions, "line" if is_part else "lines")
    if is_run(staged) and not plain:
        return Tiling(staged, rows, positions, "run")
    width = staged.convolution.dst_spatial[-1]
    anywhere = Tiling(staged, rows, positions, "scattered")
    if (
        rows % width == 0
        and positions >= rows
        and (rows == width or _lines_are_even(staged, rows, positions))
    ):
        return Tiling(staged, rows, positions, "lines" if rows > width else "line")
    if rows > width:
        return anywhere
    line = Tiling(staged, rows, positions, "line")
    few = rows <= MOST_ADDRESSES and line.waste > anywhere.waste + 0.02
    return anywhere if few else line


def sheet(kernel: Kernel) -> int:
    """Positions that one sequence of tiles runs over: the batch, or an image."""
    image = prod(kernel.dst.shape[2:])
    return image if is_per_image(kernel) else kernel.dst.batch * image


def is_per_image(kernel: Kernel) -> bool:
    """Whether tiles stay inside an image: its positions are innermost in dst, or its weight is its own."""
    return kernel.contraction.weight_per_batch or not model.features_innermost(kernel)


def room(plan: Staged, lines: int) -> int:
    """Elements of padded src under `lines` output lines of the first spatial axis."""
    needed = plan.lines_under(lines) * plan.line + 2 * UNROLL
    return -(-needed // _ALIGN) * _ALIGN


def serving(b: Builder, tiling: Tiling, image: int) -> list[tuple[Tiling, Value]]:
    """The tiling and, where an extent may have fewer positions than its tiles, smaller ones for these.

    With each, whether it serves the extent. `image` are the positions of the shortest extent.
    """
    positions, most = tiling.positions, tiling.rows
    if isinstance(positions, int) or image >= most:
        return [(tiling, Value(b, I1, "true"))]
    found = [(tiling, b.compare("sge", positions, most))]
    for fewer in (8, 4, 2, 1):
        if fewer < most:
            serves = [b.compare("sge", positions, fewer), b.compare("slt", positions, most)]
            found.append((replace(tiling, rows=fewer), b.both(serves)))
            most = fewer
    return found


def is_run(staged: Staged) -> bool:
    """Whether output position i is read at i times the channels: a plain matrix product."""
    conv = staged.convolution
    return conv.taps == 1 and set(conv.stride) == {1} and staged.extents == conv.dst_spatial


def _lines_are_even(staged: Staged, rows: int, positions: int) -> bool:
    """Whether whole lines of `rows` positions, tile after tile, never cross a step of an outer axis."""
    spatial = staged.convolution.dst_spatial
    if len(spatial) < 2:
        return False
    one_plane = len(spatial) == 2 and positions <= prod(spatial)
    return spatial[-2] % (rows // spatial[-1]) == 0 or one_plane

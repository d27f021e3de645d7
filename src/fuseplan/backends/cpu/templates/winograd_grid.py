"""How a Winograd kernel cuts its work, and where its data lie."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.loops import ceil_div, larger
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.transforms import Cost, Transforms, cost, transforms
from fuseplan.kernels.convolution import Convolution
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import lanes
from fuseplan.system.locks import cached_property

_LINE = 16  # elements: one cache line of float


@dataclass(frozen=True)
class WinogradKnobs(CpuTemplate):
    """The choice of `Winograd`.

    Attributes:
        tile: outputs along one side of a tile: 4 or 2 of a 3x3 kernel, 2 of a 5x5 one.
        rows: tiles in a register tile of the products.
        vectors: vectors of features in a register tile.
        block: tiles in a task, at most.
        panels: features in a task, counted in widths of a register tile.
    """

    tile: int
    rows: int
    vectors: int
    block: int
    panels: int


@dataclass(frozen=True)
class Image:
    """What tiles are read from: channels innermost, in the compute type.

    Attributes:
        start: its first element.
        extents: lines and columns of one picture.
        low: how far above and beside the first line and column the taps of output (0, 0) begin.
        line: elements from one line to the next.
        picture: elements from one picture to the next.
    """

    start: Value
    extents: tuple[int, int]
    low: tuple[int, int]
    line: int
    picture: int


@dataclass(frozen=True)
class Corner:
    """Where a run begins.

    Attributes:
        image, y, x: its first output in dst.
        picture, line: the same place in the `Image` that its tiles are read from; the column is `x`.
    """

    image: Value
    y: Value
    x: Value
    picture: Index
    line: Value


def padded(count: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-count // unit) * unit


def tiles_of(conv: Convolution, tile: int) -> int:
    """Tiles of tile x tile outputs over the batch."""
    height, width = conv.dst_spatial
    return conv.batch * -(-height // tile) * -(-width // tile)


class Grid:
    """The cut of one kernel's work.

    A task is a block of tiles times some panels of features. A block is a whole number of runs. A run is one
    tile where tiles are read from src and dst has its features innermost; else it is all tiles of a line,
    since a task then copies whole lines of src, padded and in the compute type, or writes whole lines of
    dst. Blocks differ by one run at most: threads get equal work, and no block has fewer tiles than a
    register tile.
    """

    def __init__(self, kernel: Kernel, target: Target, knobs: WinogradKnobs) -> None:
        conv = kernel.contraction
        self.kernel, self.knobs, self.conv = kernel, knobs, conv
        self.lanes = lanes(kernel, target)
        self.tile, self.taps = knobs.tile, conv.kernel[0]
        self.size = self.tile + self.taps - 1
        self.positions = self.size**2
        self.height, self.width = conv.dst_spatial
        self.tile_rows, self.tile_cols = -(-self.height // self.tile), -(-self.width // self.tile)
        self.features_innermost = model.features_innermost(kernel)
        self.run = 1 if self.reads_src and self.features_innermost else self.tile_cols
        self.runs_per_line = self.tile_cols // self.run
        self.runs = conv.batch * self.tile_rows * self.runs_per_line
        self.blocks = min(self.runs, -(-self.runs * self.run // knobs.block))
        self.fewest_tiles = self.runs // self.blocks * self.run
        self.most_tiles = -(-self.runs // self.blocks) * self.run
        if kernel.open_axis is not None:  # other extents fill their blocks, or no register tile
            self.most_tiles = padded(max(knobs.block, knobs.rows), self.run)
        self.panel = knobs.vectors * self.lanes
        self.panels = -(-conv.features // self.panel)
        self.task_panels = min(knobs.panels, self.panels)
        self.splits = -(-self.panels // self.task_panels)

    @property
    def transforms(self) -> Transforms:
        """The matrices."""
        return transforms(self.tile, self.taps)

    @property
    def cost(self) -> Cost:
        """What the matrices' evaluation costs."""
        return cost(self.tile, self.taps)

    def cut(self, frame: Frame) -> tuple[Index, Index]:
        """Runs and blocks; of an open kernel those of a call, with blocks for all threads."""
        if self.kernel.open_axis is None:
            return self.runs, self.blocks
        b, each = frame.body, self.tile_rows * self.runs_per_line
        runs = frame.kernel.contraction.batch * each
        shared = b.smaller(ceil_div(frame.threads, self.splits), runs * self.run // self.knobs.rows)
        fewest = ceil_div(runs * self.run, self.knobs.block)
        return runs, b.smaller(runs, larger(b, fewest, shared))

    def corner(self, b: Builder, run: Value, first: Value) -> Corner:
        """Where a run of the block that begins with run `first` lies."""
        piece, rest = run % self.runs_per_line, run // self.runs_per_line
        image, y = rest // self.tile_rows, rest % self.tile_rows * self.tile
        x = piece * (self.run * self.tile)
        if not self.reads_src:
            behind = (image - first // self.tile_rows) * (self.taps - 1)
            return Corner(image, y, x, 0, (run - first) * self.tile + behind)
        return Corner(image, y, x, image, y)

    @property
    def reads_src(self) -> bool:
        """Whether tiles are read from src itself: dense, channels innermost, float, nothing to apply."""
        kernel = self.kernel
        plain = kernel.src.dtype == kernel.compute_dtype and not kernel.prologue
        return plain and staging.channels_last(kernel)

    @cached_property
    def staged(self) -> staging.Staged:
        """How src is copied where tiles are not read from it: padded to whole tiles."""
        extents = [count * self.tile + self.taps - 1 for count in (self.tile_rows, self.tile_cols)]
        return staging.staged(self.kernel, always=True, extents=extents)

    # ---- a thread's own memory, in elements

    @property
    def depth(self) -> int:
        """From one transformed tile to the next: the channels, in whole vectors."""
        return padded(self.conv.channels, self.lanes)

    @property
    def columns(self) -> int:
        """From one row of products to the next: the features of a task."""
        return self.task_panels * self.panel

    @property
    def inputs_plane(self) -> int:
        """From one position of transformed src to the next; an odd line keeps them apart in the cache."""
        return padded(self.most_tiles * self.depth, _LINE) + _LINE

    @property
    def products_plane(self) -> int:
        """From one position of products to the next."""
        return padded(self.most_tiles * self.columns, _LINE) + _LINE

    @property
    def patch(self) -> int:
        """Room for one tile of src with its padding, and for a last vector's unused lanes."""
        return padded(self.positions * self.conv.channels, _LINE) + _LINE if self.reads_src else 0

    @property
    def copied_lines(self) -> int:
        """Lines of src under the tallest block, each image's with its padding."""
        runs = self.most_tiles // self.run
        images = -(-(runs - 1) // self.tile_rows) + 1
        return runs * self.tile + images * (self.taps - 1)

    @property
    def copied(self) -> int:
        """Room for them, where tasks copy them."""
        return 0 if self.reads_src else padded(self.copied_lines * self.staged.line, _LINE)

    @property
    def strip(self) -> int:
        """Room for one vector of features of a run's outputs, where positions are innermost in dst."""
        return 0 if self.features_innermost else self.run * self.tile**2 * self.lanes

    @property
    def own_elements(self) -> int:
        """All of it."""
        planes = self.positions * (self.inputs_plane + self.products_plane)
        return padded(planes + self.patch + self.copied + self.strip, _LINE)

    # ---- packed weights, in elements

    @property
    def weight_panel(self) -> int:
        """One panel of one position."""
        return self.conv.channels * self.panel

    @property
    def weight_plane(self) -> int:
        """One position."""
        return self.panels * self.weight_panel

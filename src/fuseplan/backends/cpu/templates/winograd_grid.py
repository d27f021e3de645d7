"""How a Winograd kernel cuts its work, and where its data lie."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.cpu import dots, model, staging
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import is_floating, vector
from fuseplan.backends.cpu.loops import ceil_div, larger
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.transforms import cost, transforms, whole
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import lanes

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


def tiles_of(conv: Contraction, tile: int) -> int:
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

    Attributes:
        transforms, cost: the matrices, and what their evaluation costs.
        reads_src: whether tiles are read from src itself: dense, channels innermost, float, nothing to apply.
        staged: how src is copied where tiles are not read from it: padded to whole tiles.
        weight_panel, weight_plane: elements of packed weights: one panel of one position, and one position.

    Where integers are multiplied, `dot` says how; `element` is the type of transformed src then, and `each`
    of its elements fill a word of 4 bytes, as many as a step of the products adds.

    Of a thread's own memory, in words:
        depth: from one transformed tile to the next: the channels, in whole vectors.
        columns: from one row of products to the next: the features of a task.
        inputs_plane, products_plane: from one position of transformed src, or of products, to the next; an
            odd line keeps them apart in the cache.
        patch: room for one tile of src with its padding, and for a last vector's unused lanes.
        copied_lines, copied: lines of src under the tallest block, each image's with its padding; room for
            them, where tasks copy them.
        strip: room for one vector of features of a run's outputs, where positions are innermost in dst.
        own_elements: all of it.
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
        self.dot = dots.pairs(kernel, target)
        made = whole if self.dot else transforms
        self.transforms = made(self.tile, self.taps)
        self.cost = cost(self.tile, self.taps, self.dot is not None)
        held = dots.held(self.dot, kernel) if self.dot else None
        self.element = held.element if held else None
        self.each = self.dot.channels if self.dot else 1
        self.steps = -(-conv.channels // self.each)
        self.features_innermost = model.features_innermost(kernel)
        plain = kernel.src.dtype == kernel.compute_dtype and not kernel.prologue and not held
        self.reads_src = plain and staging.channels_last(kernel)
        extents = [count * self.tile + self.taps - 1 for count in (self.tile_rows, self.tile_cols)]
        self.staged = staging.staged(kernel, always=True, extents=extents, held=held)
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
        self.weight_panel = self.steps * self.panel
        self.weight_plane = self.panels * self.weight_panel
        self._measure()

    def _measure(self) -> None:
        """A thread's own memory."""
        channels, tiles = self.conv.channels, self.most_tiles
        self.depth, self.columns = padded(self.steps, self.lanes), self.task_panels * self.panel
        self.inputs_plane = padded(tiles * self.depth, _LINE) + _LINE
        self.products_plane = padded(tiles * self.columns, _LINE) + _LINE
        self.patch = padded(self.positions * channels, _LINE) + _LINE if self.reads_src else 0
        runs = tiles // self.run
        images = -(-(runs - 1) // self.tile_rows) + 1
        self.copied_lines = runs * self.tile + images * (self.taps - 1)
        self.copied = 0 if self.reads_src else padded(self.copied_lines * self.staged.line, _LINE)
        self.strip = 0 if self.features_innermost else self.run * self.tile**2 * self.lanes
        planes = self.positions * (self.inputs_plane + self.products_plane)
        self.own_elements = padded(planes + self.patch + self.copied + self.strip, _LINE)

    @property
    def sums(self) -> str:
        """LLVM's type of a vector of products' sums."""
        return vector(self.lanes, self.dot.sums if self.dot else "float")

    @staticmethod
    def fma(x: Value, factor: float, y: Value) -> Value:
        """x * factor + y, rounded once where they are no integers."""
        b = x.builder
        return b.fma(x, b.number(factor), y) if is_floating(x.type) else x * factor + y

    def cut(self, frame: Frame) -> tuple[Index, Index]:
        """Runs and blocks; of an open kernel those of a call, with blocks for all threads."""
        if self.kernel.open_axis is None:
            return self.runs, self.blocks
        b, each = frame.body, self.tile_rows * self.runs_per_line
        runs = frame.kernel.contraction.batch * each
        shared = b.smaller(ceil_div(frame.threads, self.splits), runs * self.run // self.knobs.rows)
        fewest = ceil_div(runs * self.run, self.knobs.block)
        return runs, b.smaller(runs, larger(b, fewest, shared))

    def corner(self, run: Value, first: Value) -> Corner:
        """Where a run of the block that begins with run `first` lies."""
        piece, rest = run % self.runs_per_line, run // self.runs_per_line
        image, y = rest // self.tile_rows, rest % self.tile_rows * self.tile
        x = piece * (self.run * self.tile)
        if not self.reads_src:
            behind = (image - first // self.tile_rows) * (self.taps - 1)
            return Corner(image, y, x, 0, (run - first) * self.tile + behind)
        return Corner(image, y, x, image, y)

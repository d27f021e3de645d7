"""Writes the kernel of a Winograd convolution: transforms of src and products; results are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fuseplan.backends.cpu import dots, staging
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import I64, PTR, element_of, vector
from fuseplan.backends.cpu.loops import ceil_div, larger, pieces
from fuseplan.backends.cpu.sums import UNROLL, Operands, Sums, add_products
from fuseplan.backends.cpu.templates.winograd_grid import Corner, Grid, Image
from fuseplan.backends.cpu.templates.winograd_results import Results
from fuseplan.backends.cpu.transforms import rows_of
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target


class Writer:
    """Writes one kernel: one phase of tasks, none of which needs the work of another."""

    def __init__(self, grid: Grid, target: Target) -> None:
        self.grid, self.conv, kernel = grid, grid.conv, grid.kernel
        self.frame = Frame(grid.knobs, kernel, target, workspace=True)
        self.b, self.lanes = self.frame.body, grid.lanes
        self.weight = self.frame.pointer("operand", kernel.weight.key)
        self.groups = _groups(grid.size, target.vector_registers)

    def source(self) -> Source:
        """One phase of tasks: none needs what another does."""
        grid, b = self.grid, self.b
        self.inputs = b.at(self.frame.pointer("workspace"), self.frame.thread * grid.own_elements)
        self.products = b.at(self.inputs, grid.positions * grid.inputs_plane)
        self.patch = b.at(self.products, grid.positions * grid.products_plane)
        self.copied = b.at(self.patch, grid.patch)
        self.image = self._image()
        results = Results(self.frame, grid, self.image, self.products, b.at(self.copied, grid.copied))
        runs, blocks = grid.cut(self.frame)
        with self.frame.tasks(blocks * grid.splits) as task:
            split, block = task % grid.splits, task // grid.splits
            first = block * runs // blocks
            last = (block + 1) * runs // blocks
            begin = split * grid.task_panels
            end = b.smaller(begin + grid.task_panels, grid.panels)
            self._transform_src(first, last)
            self._multiply((last - first) * grid.run, begin, end)
            results.emit(first, last, begin, end)
        return self.frame.source(per_thread=grid.own_elements * 4)

    def _image(self) -> Image:
        """What tiles are read from: src itself, or the lines that a task has copied."""
        conv, grid = self.conv, self.grid
        if not grid.reads_src:
            self.stager = staging.Stager(self.frame, grid.staged)
            return Image(
                self.copied, (grid.copied_lines, grid.staged.extents[1]), (0, 0), grid.staged.line, 0
            )
        (above, _), (beside, _) = conv.padding
        height, width = conv.src_spatial
        line = width * conv.channels
        return Image(self.frame.pointer("src"), (height, width), (above, beside), line, height * line)

    # ---- src

    def _transform_src(self, first: Value, last: Value) -> None:
        b, grid = self.b, self.grid
        with b.loop(first, last, name="run") as run:
            corner = grid.corner(run, first)
            if not grid.reads_src:
                self._copy_lines(corner)
            with b.loop(0, grid.run, name="tile") as tile:
                start, line = self._tile(corner, corner.x + tile * grid.tile)
                into = b.at(self.inputs, ((run - first) * grid.run + tile) * grid.depth)
                for rows in self.groups:
                    self._transform_tile(start, line, into, rows)

    def _copy_lines(self, corner: Corner) -> None:
        """Copies the lines under a run, padded; some are there where the run before is the one above."""
        b, grid = self.b, self.grid
        new = b.compare("eq", corner.line * corner.y, 0)
        skipped = b.select(new, b.const(0, I64), grid.taps - 1)
        number = corner.image * grid.staged.extents[0] + corner.y + skipped
        into = self.stager.at(self.copied, (corner.line + skipped) * self.image.line)
        self.stager.copy_lines(number, grid.size - skipped, into)

    def _tile(self, corner: Corner, x: Value) -> tuple[Value, Index]:
        """Where a tile of src begins, and the elements from one of its lines to the next.

        Where tiles are read from src, those that hang over an edge are copied first, zeros where there is
        none.
        """
        b, grid, image, channels = self.b, self.grid, self.image, self.conv.channels
        top, left = corner.line - image.low[0], x - image.low[1]
        at = corner.picture * image.picture + top * image.line + left * channels
        inner = b.at(image.start, at, grid.element)
        if not grid.reads_src:
            return inner, image.line
        start, step = b.variable(PTR, self.patch), b.variable(I64, grid.size * channels)
        fits = [max(0, extent - grid.size + 1) for extent in image.extents]
        with b.when(b.compare("ult", top, fits[0])), b.when(b.compare("ult", left, fits[1])):
            start.set(inner)
            step.set(image.line)
        with b.when(b.compare("eq", start.get(), self.patch)):
            self._fill_patch(corner.picture, top, left)
        return start.get(), step.get()

    def _fill_patch(self, picture: Index, top: Value, left: Value) -> None:
        b, grid, image, channels = self.b, self.grid, self.image, self.conv.channels
        with b.loop(0, grid.positions * channels, self.lanes, name="zero") as element:
            b.store(b.number(0.0), b.at(self.patch, element))
        with b.loop(0, grid.size, name="i") as i, b.loop(0, grid.size, name="j") as j:
            row, column = top + i, left + j
            pixel = b.at(image.start, picture * image.picture + row * image.line + column * channels)
            into = b.at(self.patch, (i * grid.size + j) * channels)

            def copy(channel: Index, count: int, pixel: Value = pixel, into: Value = into) -> None:
                b.store_first(b.load_first(b.at(pixel, channel), count, b.vector), b.at(into, channel), count)

            height, width = image.extents
            with b.when(b.compare("ult", row, height)), b.when(b.compare("ult", column, width)):
                self._vectors(copy)

    def _transform_tile(self, tile: Value, line: Index, into: Value, rows: Sequence[int]) -> None:
        self._vectors(partial(self._transform_vector, tile, line, into, rows))

    def _vectors(self, part: Callable[[Index, int], None]) -> None:
        """part(first channel, how many) for every vector of channels."""
        pieces(self.b, self.conv.channels, self.lanes * self.grid.each, part, name="channel")

    def _transform_vector(
        self, tile: Value, line: Index, into: Value, rows: Sequence[int], channel: Index, count: int
    ) -> None:
        """The given rows of one vector's transform: down the columns, then along the lines."""
        b, grid, matrix, element = self.b, self.grid, self.grid.transforms.src, self.grid.element
        needed = [bool(matrix[list(rows), i].any()) for i in range(grid.size)]
        lines = [b.at(tile, channel + i * line, element) if needed[i] else None for i in range(grid.size)]
        between: list[list[Value]] = []
        for j in range(grid.size):
            places = [start and b.at(start, j * self.conv.channels, element) for start in lines]
            column = [place and self._loaded(place, count) for place in places]
            between.append(rows_of(matrix, column, rows, grid.fma))
        for i, made in zip(rows, zip(*between, strict=True), strict=True):
            for j, value in enumerate(rows_of(matrix, made, range(grid.size), grid.fma)):
                plane = b.at(into, (i * grid.size + j) * grid.inputs_plane)
                b.store(value, b.at(plane, channel, element))

    def _loaded(self, place: Value, count: int) -> Value:
        """Channels side by side; integers behind them, of the thread's own memory, meet weights of 0."""
        if self.grid.element is None:
            return self.b.load_first(place, count, self.b.vector)
        return self.b.load(place, vector(self.lanes * self.grid.each, self.grid.element))

    # ---- products

    def _multiply(self, tiles: Value, begin: Index, end: Index) -> None:
        """A matrix product for each position: tiles x channels times channels x features."""
        b, grid = self.b, self.grid
        with b.loop(0, grid.positions, name="position") as position:
            inputs = b.at(self.inputs, position * grid.inputs_plane)
            weight = b.at(self.weight, position * grid.weight_plane)
            products = b.at(self.products, position * grid.products_plane - begin * grid.panel)
            following = b.at(weight, begin * grid.weight_panel + grid.weight_plane)

            def part(panel: Index, count: int) -> None:
                ahead = following
                if count == grid.panel:
                    more = b.compare("slt", b.const(panel + 1, I64), end)
                    ahead = b.select(more, b.at(weight, (panel + 1) * grid.weight_panel), following)
                vectors = -(-count // self.lanes)
                self._panel(tiles, inputs, weight, ahead, products, panel, vectors)

            task = (begin, end)
            pieces(b, self.conv.features, grid.panel, part, name="panel", within=task, numbered=True)

    def _panel(
        self,
        tiles: Value,
        inputs: Value,
        weight: Value,
        ahead: Value,
        products: Value,
        panel: Index,
        vectors: int,
    ) -> None:
        """All tiles of the block times one panel of weights.

        Those at `ahead` come next, from the last cache or from memory, faster than the processor guesses:
        without fetching them, 512 channels at 28x28 take 1.3 times as long. Each pass fetches a part: of 256
        channels at 14x14 in the first alone took 925 us of a Xeon, in all 797.
        """
        b, grid, rows = self.b, self.grid, self.grid.knobs.rows
        weight = b.at(weight, panel * grid.weight_panel)
        fetched = ceil_div(UNROLL * vectors, max(1, grid.fewest_tiles // rows))
        with b.loop(0, tiles, rows, name="row") as start:
            part = b.at(ahead, start // rows * (fetched * self.lanes))
            # The last register tile starts early and computes some rows twice: no second shape is needed. Of
            # fewer rows, those behind them are of no use.
            row = b.smaller(start, tiles - rows)
            row = larger(b, row, 0) if grid.kernel.open_axis is not None else row
            sums = Sums(b, rows, vectors, kind=grid.sums)
            here = b.at(inputs, row * grid.depth)
            operands = partial(self._operands, here, weight, vectors, part, fetched)
            if grid.dot:
                dots.add_whole(grid.dot, sums, grid.steps, operands)
            else:
                add_products(sums, grid.steps, operands)
            into = b.at(products, row * grid.columns + panel * grid.panel)
            for r, line in enumerate(sums.values()):
                for j, value in enumerate(line):
                    b.store(value, b.at(into, r * grid.columns + j * self.lanes))

    def _operands(
        self, inputs: Value, weight: Value, vectors: int, ahead: Value, fetched: int, k: Index
    ) -> Operands:
        """Weights of neighbouring features, and an element of each transformed tile."""
        b, grid = self.b, self.grid
        xs, here, there = b.at(inputs, k), b.at(weight, k * grid.panel), b.at(ahead, k * grid.panel)

        def weights(step: int) -> list[Value]:
            for line in range(step, fetched, UNROLL):
                b.prefetch(b.at(there, line * self.lanes))
            places = (b.at(here, step * grid.panel + j * self.lanes) for j in range(vectors))
            return [b.load(place, grid.sums) for place in places]

        def spread(step: int, row: int) -> Value:
            return b.splat(b.load(b.at(xs, row * grid.depth + step), element_of(grid.sums)))

        return weights, spread


def _groups(size: int, registers: int) -> list[list[int]]:
    """Rows of a transformed tile that are made together: what is between the passes fits the registers.

    Rows of opposite points stay together. Reading src once a group costs less than spilling what lies
    between.
    """
    pairs = [[row, row + 1] for row in range(1, size - 1, 2)]
    if registers < 32:
        return [*pairs, [0, size - 1]]
    if len(pairs) == 1:
        return [[0, *pairs[0], size - 1]]
    return [[0, *pairs[0]], [*pairs[1], size - 1]]

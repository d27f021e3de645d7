"""How the depthwise and grouped templates go about it: where src is read, and which of its axes are tiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.grouping import grouping
from fuseplan.backends.cpu.taps import NO_AXIS, Axis, axes
from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import lanes
from fuseplan.messages.reasons import Claim, Reason
from fuseplan.scalar import functions
from fuseplan.system.locks import cached_property

_UNROLLED_TAPS = 64  # of the last two axes; a larger kernel loops over its rows
_UNROLLED_COLUMNS = 64  # taps along the last axis; a longer row of taps is a loop
_UNROLLED_EDGES = 80  # outputs along the last axis that read padding; a copy has more of it written out
_MOST_SUMS, _MOST_PLANE_SUMS = 24, 16  # in a tile
_FEW_TAPS = 9  # whose weights leave the registers to the sums
_MOST_PRODUCTS = 800  # that a tile writes out
_WHOLE = 520  # products of the plane that is written out as straight code
_TASK_CYCLES = 20_000
_PROLOGUE = 6  # functions of a prologue that cost less applied at each read than a copy of src


def depthwise_claims(kernel: Kernel) -> Iterator[Claim]:
    """What both depthwise templates ask of a convolution."""
    conv = kernel.contraction
    got, want = f"groups={conv.groups}", f"groups={conv.channels}"
    yield model.about(kernel, conv.groups == conv.channels, Reason.NOT_DEPTHWISE, got, want)
    yield model.about(kernel, bool(conv.kernel), Reason.NOT_DEPTHWISE, conv.text, "spatial axes")
    yield model.about(kernel, not conv.weight_per_batch, Reason.WEIGHT_PER_BATCH)
    counts = bool(conv.kernel) and axes(conv)[-1].counted is not None
    got, want = f"kernel={conv.kernel}, padding={conv.padding}", "fewer along the last axis"
    yield model.about(kernel, not (counts and _needs_padding(conv)), Reason.MANY_TAPS, got, want)


def _split(conv: Contraction, every: Sequence[Axis]) -> tuple[tuple[Axis, ...], Axis, Axis]:
    """Far axes, whose taps are loops; then rows and columns, whose taps are written out.

    A row of taps too long to be written out becomes a far axis with one output, and leaves columns with
    one tap: this needs columns without padding.
    """
    if _loops_over_taps(conv):
        last = every[-1]
        taps = replace(last, out=1, size=last.reach(1), stride=1, low=0)
        return (*every[:-1], taps), NO_AXIS, replace(last, kernel=1, dilation=1)
    near = min(len(every), 2 if prod(conv.kernel[-2:]) <= _UNROLLED_TAPS else 1)
    row, column = [NO_AXIS, *every[len(every) - near :]][-2:]
    return tuple(every[: len(every) - near]), row, column


def _loops_over_taps(conv: Contraction) -> bool:
    return conv.kernel[-1] > _UNROLLED_COLUMNS


def _needs_padding(conv: Contraction) -> bool:
    """Whether the last axis is read from a copy with padding: taps are a loop, or many outputs read padding.

    Each tile with padding has code of its own, whose length must not grow with the padding.
    """
    return _loops_over_taps(conv) or axes(conv)[-1].edges > _UNROLLED_EDGES


class Plan:
    """What follows from the kernel alone: where src is read, and which axes are tiled."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.conv = kernel, target, kernel.contraction
        self.grouping = grouping(self.conv, lanes(kernel, target))
        self.staged = staging.staged(kernel, always=True)
        self.staged = replace(self.staged, copies=not self._is_read_in_place())
        every = axes(self.conv)
        if self.staged.copies:
            extents = zip(every, self.staged.extents, strict=True)
            every = tuple(axis.padded(extent) for axis, extent in extents)
        self.far, self.row, self.column = _split(self.conv, every)

    def _is_read_in_place(self) -> bool:
        """Whether reading src at each tap, with the prologue, costs less than a copy of it."""
        cost = sum(functions(stage.expression) for stage in self.kernel.prologue)
        early = (each for each in self.kernel.operands if each.role == "prologue")
        element = any(each.is_inside or each.is_scattered or not each.packed for each in early)
        if _needs_padding(self.conv) or self.kernel.src.element_strides[1] != 1:
            return False
        return cost <= (_PROLOGUE if self.grouping.products == 1 else 0) and not element

    @cached_property
    def strides(self) -> tuple[int, tuple[int, ...], int, int]:
        """Elements of what is read between neighbours: images, each far axis, rows, columns."""
        if self.staged.copies:
            image, spatial = self.staged.image, self.staged.strides
        else:
            image, spatial = self.kernel.src.element_strides[0], self.kernel.src.element_strides[2:]
        steps = [*spatial, spatial[-1]] if _loops_over_taps(self.conv) else list(spatial)
        row, column = [0, *steps[len(self.far) :]][-2:]
        return image, tuple(steps[: len(self.far)]), row, column

    def tiles(self) -> list[tuple[int, int]]:
        """Tiles whose sums fit the registers and whose code is not too long, the best first."""
        sums = min(_MOST_SUMS, self.target.vector_registers - 2)
        most = min(sums, _MOST_PRODUCTS // (self.row.kernel * self.column.kernel * self.grouping.products))
        found = [
            (rows, columns)
            for rows in range(1, min(4, self.row.out) + 1)
            for columns in range(1, min(8, self.column.out) + 1)
            if rows * columns <= max(most, 1)
        ]
        tail = sum(functions(stage.expression) for stage in self.kernel.epilogue)
        code = 0.008 + 0.001 * tail  # what a sum more may cost: among tiles as quick the smaller one wins
        return sorted(found, key=lambda tile: (self.waste(*tile) * (1 + code * prod(tile)), -tile[0]))

    def held(self, rows: int, columns: int) -> int:
        """How many columns of src one test guards: those of a line, if the registers hold as many."""
        line, vectors = len(self.column.users(columns)), -(-self.grouping.channels // self.grouping.lanes)
        room = self.target.vector_registers - 2 - rows * columns
        return max(1, min(line, room // (vectors if self.grouping.products == 1 else vectors + 1)))

    def waste(self, rows: int, columns: int) -> float:
        """Time of the tiles over time of the products alone."""
        row, column, each = self.row, self.column, self.grouping.products
        edges = row.tiles(rows) * rows / row.out * column.tiles(columns) * columns / column.out
        taps = row.kernel * column.kernel * each
        elements = len(row.users(rows)) * len(column.users(columns))
        shuffles = 0 if self.conv.features_per_group == 1 else elements * each
        loads = elements + taps * (rows if each > 1 else 1)
        latency = max(1.0, 8 / (rows * columns))
        extra = (0.5 * loads + 0.3 * shuffles) / (rows * columns * taps)
        return self.grouping.waste * edges * latency * (1 + extra)

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Output rows and blocks of channels of a task.

        What a tile reads fits half the first cache: with 5x5 taps over 240 channels of 28x28 that takes 0.75
        of the time of tasks whose tiles read more than it holds. The next block of channels finds the lines
        in the second: pools of 544 channels of 85x85 take 1.5 times as long by tasks of 42 rows as of 6.
        Every thread has several tasks.
        """
        pack, threads = self.grouping, self.target.threads
        taps = self.row.kernel * self.column.kernel * pack.products * pack.parts * pack.lanes
        each = self.row.reach(rows) * self.column.reach(columns) * pack.channels + taps
        block = max(1, min(pack.blocks, self.target.l1_bytes // 2 // (each * model.itemsize(self.kernel))))
        block = -(-pack.blocks // -(-pack.blocks // block))
        sheets = self.conv.batch * prod(axis.out for axis in self.far) * -(-pack.blocks // block)
        wanted = -(-4 * threads // sheets)
        line = max(1, self.strides[2] * model.itemsize(self.kernel))
        fitting = (self.target.l2_bytes // line - self.row.reach(rows)) // (rows * self.row.stride) + 1
        return max(1, min(self.row.tiles(rows) // wanted, fitting)) * rows, block


class PlanePlan:
    """The same for pixels innermost: tiles lie within one plane."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.conv = kernel, target, kernel.contraction
        self.lanes = lanes(kernel, target)
        plain = kernel.src.dtype == kernel.compute_dtype and not kernel.prologue
        step = kernel.src.element_strides[-1]
        self.pads = _needs_padding(self.conv)
        self.copies = not plain or self.pads or (step != 1 and self.conv.src_spatial[-1] > 1)
        every = axes(self.conv)
        if self.pads:
            last = every[-1]
            every = (*every[:-1], last.padded(max(last.reach(last.out), last.low + last.size)))
        self.far, self.row, self.column = _split(self.conv, every)
        # Axes of src outside its rows: taps that became a far axis are none, the channels of a group are one.
        self.volume = self.far[:-1] if _loops_over_taps(self.conv) else self.far
        each = self.conv.channels_per_group
        if each > 1:
            channels = Axis(out=1, size=each, kernel=each, stride=1, dilation=1, low=0)
            self.far, self.volume = (channels, *self.far), (channels, *self.volume)

    @property
    def strides(self) -> tuple[tuple[int, ...], int]:
        """Elements of src between neighbours: each axis of the volume, rows."""
        steps = self.kernel.src.element_strides[1 if self.conv.channels_per_group > 1 else 2 :]
        far = len(self.volume)
        return tuple(steps[:far]), [0, *steps[far:]][-2]

    @property
    def rows_a_vector(self) -> int:
        """Whole rows of results in one vector."""
        return max(1, self.lanes // self.column.out)

    def fits_whole(self, features: int) -> bool:
        """Whether straight code for the whole plane is short enough."""
        if self.column.out > self.lanes or any(axis.out > 1 or axis.is_padded for axis in self.far):
            return False
        taps = self.row.kernel * self.column.kernel
        return -(-self.row.out // self.rows_a_vector) * taps * features <= _WHOLE

    def _fits(self, tile: tuple[int, int, int]) -> bool:
        """Whether the registers hold the sums; of several features or of many taps, with weights beside them.

        With 16 registers, 5x5 kernels of 3 channels take 1.1 ms of a Zen 3 by 8 sums, 1.8 by 12, 2.4 by 16;
        depthwise 7x7 kernels 82 us by 8, 144 by 16; depthwise 3x3 kernels 66 by 8, 60 by 16.
        """
        is_crowded = tile[2] > 1 or self.row.kernel * self.column.kernel > _FEW_TAPS
        most = self.target.vector_registers // 2 if is_crowded else _MOST_PLANE_SUMS
        return prod(tile) <= min(most, _MOST_PLANE_SUMS)

    def tiles(self) -> list[tuple[int, int, int]]:
        """Rows, vectors and features of tiles, the best first; 0 rows are whole planes."""
        features = [number for number in (1, 2, 4, 8) if number <= self.conv.features_per_group]
        vectors = -(-self.row.out // self.rows_a_vector)
        most = -(-self.column.out // self.lanes)
        tiles = [(0, min(vectors, _MOST_PLANE_SUMS // number), number) for number in features]
        tiles = [tile for tile in tiles if self.fits_whole(tile[2])]
        if not tiles:
            every = product(range(1, min(8, self.row.out) + 1), range(1, min(8, most) + 1), features)
            tiles = list(filter(self._fits, every))
        return sorted(tiles, key=lambda tile: self.waste(*tile))

    def waste(self, rows: int, vectors: int, features: int) -> float:
        """Time of the tiles over time of the same products without a loss."""
        row, column, many = self.row, self.column, self.conv.features_per_group
        again = -(-many // features) * features / many
        # Weights that several rows use are kept, and where they exceed the registers they are spilled.
        spills = rows != 1 and features * row.kernel * column.kernel > 20 and features > 1
        if not rows:
            used = -(-row.out // self.rows_a_vector) * self.lanes / (row.out * column.out)
            return again * used * (1 + 0.2 / features + 0.3 * spills)
        width = min(self.lanes, column.out)
        edges = row.tiles(rows) * rows / row.out * column.tiles(width) * self.lanes / column.out
        lines = len(row.users(rows)) / rows
        latency = max(1.0, 4 / (rows * vectors * features))
        elements = (0.3 * lines * min(column.stride, 4) / row.kernel + 0.1 * lines / vectors) / features
        return again * edges * latency * (1 + elements + (0.2 + 0.5 * spills) / vectors)

    def blocks(self, rows: int, vectors: int, features: int) -> tuple[int, int]:
        """Groups and output rows of a task: every thread has several, of a microsecond or more."""
        conv, row = self.conv, self.row
        planes, step = conv.batch * conv.groups, max(rows, 1)
        wanted = 4 * self.target.threads
        work = conv.flops * self.waste(rows, vectors, features) / planes / self.lanes / 4  # cycles a group
        if planes >= wanted or not rows:
            return max(1, min(planes // wanted, int(_TASK_CYCLES / work) + 1)), max(1, row.out)
        tiles = row.tiles(step)
        parts = min(tiles, -(-wanted // planes), max(1, int(work / _TASK_CYCLES)))
        return 1, -(-tiles // parts) * step

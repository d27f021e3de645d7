"""How the depthwise templates go about a convolution: where src is read, and which of its axes are tiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.windows import NO_AXIS, Axis, axes
from fuseplan.kernel import Convolution, Kernel, functions
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target

_UNROLLED_TAPS = 64  # of the last two axes; a larger kernel loops over its rows
_UNROLLED_COLUMNS = 64  # taps along the last axis; a longer row of taps is a loop
_MOST_SUMS, _MOST_PLANE_SUMS = 24, 16  # in a tile: with more, 32 registers spill
_WHOLE = 520  # products of the plane that is written out as straight code
_TASK_CYCLES = 20_000
_PROLOGUE = 6  # functions of a prologue that cost less applied at each read than a copy of src


def convolution_of(kernel: Kernel) -> Convolution:
    """The kernel's convolution; `limits` has seen to it that there is one."""
    if kernel.convolution is None:
        raise ValueError("a kernel without a contraction has no convolution")
    return kernel.convolution


def depthwise_claims(kernel: Kernel) -> Iterator[Claim]:
    """What both depthwise templates ask of a convolution."""
    yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
    conv = convolution_of(kernel)
    depthwise = conv.groups == conv.channels
    yield claim(
        depthwise,
        Reason.NOT_DEPTHWISE,
        got=f"groups={conv.groups}",
        want=f"groups={conv.channels}",
        operator=kernel.contraction_step,
    )


def _split(conv: Convolution, every: Sequence[Axis]) -> tuple[tuple[Axis, ...], Axis, Axis]:
    """Far axes, whose taps are loops; then rows and columns, whose taps are written out.

    A row of taps too long to be written out becomes a far axis with one output, and leaves columns with
    one tap: this needs columns without padding.
    """
    if conv.kernel[-1] > _UNROLLED_COLUMNS:
        last = every[-1]
        taps = replace(last, out=1, size=last.reach(1), stride=1, low=0)
        return (*every[:-1], taps), NO_AXIS, replace(last, kernel=1, dilation=1)
    near = min(len(every), 2 if prod(conv.kernel[-2:]) <= _UNROLLED_TAPS else 1)
    row, column = [NO_AXIS, *every[len(every) - near :]][-2:]
    return tuple(every[: len(every) - near]), row, column


class Plan:
    """What follows from the kernel alone: where src is read, and which axes are tiled."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.conv = kernel, convolution_of(kernel)
        self.staged = staging.staged(kernel, always=True)
        self.staged = replace(self.staged, copies=not self._is_read_in_place())
        every = axes(self.conv)
        if self.staged.copies:
            extents = zip(every, self.staged.extents, strict=True)
            every = tuple(replace(axis, size=extent, low=0) for axis, extent in extents)
        self.far, self.row, self.column = _split(self.conv, every)

    def _is_read_in_place(self) -> bool:
        """Whether reading src at each tap, with the prologue, costs less than a copy of it."""
        cost = sum(functions(stage.expression) for stage in self.kernel.prologue)
        element = any(
            op.role == "prologue" and op.per in ("element", "activation") for op in self.kernel.operands
        )
        is_short = self.conv.kernel[-1] <= _UNROLLED_COLUMNS
        return self.kernel.src.element_strides[1] == 1 and cost <= _PROLOGUE and not element and is_short

    @cached_property
    def strides(self) -> tuple[int, tuple[int, ...], int, int]:
        """Elements of what is read between neighbours: images, each far axis, rows, columns."""
        if self.staged.copies:
            image, spatial = self.staged.image, self.staged.strides
        else:
            image, spatial = self.kernel.src.element_strides[0], self.kernel.src.element_strides[2:]
        steps = [*spatial, spatial[-1]] if self.conv.kernel[-1] > _UNROLLED_COLUMNS else list(spatial)
        row, column = [0, *steps[len(self.far) :]][-2:]
        return image, tuple(steps[: len(self.far)]), row, column

    def tiles(self, target: Target) -> list[tuple[int, int]]:
        """Tiles whose sums fit the registers, the best first."""
        found = [
            (rows, columns)
            for rows in range(1, min(4, self.row.out) + 1)
            for columns in range(1, min(8, self.column.out) + 1)
            if rows * columns <= min(_MOST_SUMS, target.vector_registers - 2)
        ]
        return sorted(found, key=lambda tile: (self.waste(*tile), -tile[0]))

    def held(self, target: Target, rows: int, columns: int) -> int:
        """How many vectors of src one test guards: those of a line, if the registers hold as many."""
        line = len(self.column.users(columns))
        return max(1, min(line, target.vector_registers - 2 - rows * columns))

    def waste(self, rows: int, columns: int) -> float:
        """Time of the tiles over time of the products alone; a little more for more code."""
        row, column = self.row, self.column
        edges = len(row.tiles(rows)) * rows / row.out * len(column.tiles(columns)) * columns / column.out
        products = rows * columns * row.kernel * column.kernel
        loads = len(row.users(rows)) * len(column.users(columns)) + row.kernel * column.kernel
        latency = max(1.0, 8 / (rows * columns))
        tail = sum(functions(stage.expression) for stage in self.kernel.epilogue)
        return edges * latency * (1 + 0.5 * loads / products) * (1 + (0.008 + 0.001 * tail) * rows * columns)

    def blocks(self, target: Target, rows: int, columns: int) -> tuple[int, int]:
        """Rows and vectors of channels of a task.

        What a tile reads fits half the first cache: with 5x5 taps over 240 channels of 28x28 that takes 0.75
        of the time of tasks whose tiles read more than it holds. Every thread has several tasks.
        """
        width = target.vector_bytes // model.itemsize(self.kernel)
        vectors = -(-self.conv.channels // width)
        taps = self.row.kernel * self.column.kernel
        each = (self.row.reach(rows) * self.column.reach(columns) + taps) * target.vector_bytes
        block = max(1, min(vectors, target.l1_bytes // 2 // each))
        block = -(-vectors // -(-vectors // block))
        sheets = self.conv.batch * prod(axis.out for axis in self.far) * -(-vectors // block)
        wanted = -(-4 * target.threads // sheets)
        tiles = len(self.row.tiles(rows))
        return max(1, tiles // wanted) * rows, block


class PlanePlan:
    """The same for pixels innermost: tiles lie within one plane."""

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.conv = kernel, target, convolution_of(kernel)
        self.lanes = target.vector_bytes // model.itemsize(kernel)
        plain = storage.is_stored_as_computed(kernel.src.dtype) and not kernel.prologue
        step = kernel.src.element_strides[-1]
        self.pads = self.conv.kernel[-1] > _UNROLLED_COLUMNS
        self.copies = not plain or self.pads or (step != 1 and self.conv.src_spatial[-1] > 1)
        every = axes(self.conv)
        if self.pads:
            last = every[-1]
            every = (*every[:-1], replace(last, size=max(last.reach(last.out), last.low + last.size), low=0))
        self.far, self.row, self.column = _split(self.conv, every)
        # Where src has rows and planes: a row of taps that became a far axis is none of them.
        self.volume = self.far[:-1] if self.pads else self.far

    @property
    def strides(self) -> tuple[tuple[int, ...], int]:
        """Elements of src between neighbours: each axis of the volume, rows."""
        spatial = self.kernel.src.element_strides[2:]
        far = len(self.volume)
        return tuple(spatial[:far]), [0, *spatial[far:]][-2]

    @property
    def rows_a_vector(self) -> int:
        """Whole rows of results in one vector."""
        return max(1, self.lanes // self.column.out)

    @property
    def fits_whole(self) -> bool:
        """Whether straight code for the whole plane is short enough."""
        vectors = -(-self.row.out // self.rows_a_vector)
        return not self.far and self.column.out <= self.lanes and vectors * self.conv.taps <= _WHOLE

    def tiles(self) -> list[tuple[int, int]]:
        """Tiles that fit the registers, the best first; (0, vectors) is the whole plane in one."""
        room = self.target.vector_registers
        if self.fits_whole:
            return [(0, min(-(-self.row.out // self.rows_a_vector), room // 2))]
        most = -(-self.column.out // self.lanes)
        found = [
            (rows, vectors)
            for rows in range(1, min(8, self.row.out) + 1)
            for vectors in range(1, min(8, most) + 1)
            if rows * vectors <= min(_MOST_PLANE_SUMS, room - 2)
        ]
        return sorted(found, key=lambda tile: self.waste(*tile))

    def waste(self, rows: int, vectors: int) -> float:
        """Time of the tiles over time of the same products without a loss."""
        row, column = self.row, self.column
        if not rows:
            used = -(-row.out // self.rows_a_vector) * self.lanes / (row.out * column.out)
            return used * 1.5
        width = min(self.lanes, column.out)
        edges = len(row.tiles(rows)) * rows / row.out * len(column.tiles(width)) * self.lanes / column.out
        lines = len(row.users(rows)) / rows
        latency = max(1.0, 4 / (rows * vectors))
        return (
            edges * latency * (1 + 0.3 * lines * min(column.stride, 4) / row.kernel + 0.1 * lines / vectors)
        )

    def blocks(self, rows: int) -> tuple[int, int]:
        """Planes and output rows of a task: every thread has several, of a microsecond or more."""
        conv, row = self.conv, self.row
        planes, step = conv.batch * conv.channels, max(rows, 1)
        wanted = 4 * self.target.threads
        work = conv.flops * self.waste(rows, 1) / planes / self.lanes / 4  # cycles a plane
        if planes >= wanted or not rows:
            return max(1, min(planes // wanted, int(_TASK_CYCLES / work) + 1)), max(1, row.out)
        tiles = len(row.tiles(step))
        parts = min(tiles, -(-wanted // planes), max(1, int(work / _TASK_CYCLES)))
        return 1, -(-tiles // parts) * step

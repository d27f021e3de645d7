"""How the depthwise templates go about a convolution: where src is read, and which of its axes are tiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from math import prod

from fuseplan.backends.cpu import model, staging, storage
from fuseplan.backends.cpu.windows import NO_AXIS, Axis, axes
from fuseplan.kernel import Convolution, Kernel, functions
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target

_UNROLLED_TAPS = 64  # of the last two axes; a larger kernel loops over its rows
_UNROLLED_COLUMNS = 64
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


class Plan:
    """What follows from the kernel alone: where src is read, and which axes are tiled."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.conv = kernel, convolution_of(kernel)
        self.staged = staging.staged(kernel, always=True)
        if self._is_read_in_place():
            self.staged = replace(self.staged, copies=False)
        every = list(axes(self.conv))
        if self.staged.copies:
            extents = self.staged.extents
            every = [replace(axis, size=extent, low=0) for axis, extent in zip(every, extents, strict=True)]
        near = 2 if self.conv.taps <= _UNROLLED_TAPS or prod(self.conv.kernel[-2:]) <= _UNROLLED_TAPS else 1
        if self.conv.kernel[-1] > _UNROLLED_COLUMNS:
            near = 0
        near = min(near, len(every))
        self.far: tuple[Axis, ...] = tuple(every[: len(every) - near])
        self.row, self.column = [NO_AXIS, NO_AXIS, *every[len(every) - near :]][-2:]

    def _is_read_in_place(self) -> bool:
        """Whether reading src at each tap, with the prologue, costs less than a copy of it."""
        cost = sum(functions(stage.expression) for stage in self.kernel.prologue)
        element = any(
            op.role == "prologue" and op.per in ("element", "activation") for op in self.kernel.operands
        )
        return self.kernel.src.element_strides[1] == 1 and cost <= _PROLOGUE and not element

    @cached_property
    def strides(self) -> tuple[int, tuple[int, ...], int, int]:
        """Elements of what is read between neighbours: images, each far axis, rows, columns."""
        if self.staged.copies:
            image, spatial = self.staged.image, self.staged.strides
        else:
            image, spatial = self.kernel.src.element_strides[0], self.kernel.src.element_strides[2:]
        near = len(self.far)
        row, column = [0, 0, *spatial[near:]][-2:]
        return image, tuple(spatial[:near]), row, column

    def tiles(self, target: Target) -> list[tuple[int, int]]:
        """Tiles that leave room in the registers for a line of src, the best first."""
        room = target.vector_registers - 2
        found = [
            (rows, columns)
            for rows in range(1, min(4, self.row.out) + 1)
            for columns in range(1, min(8, self.column.out) + 1)
            if rows * columns + min(self.column.reach(columns), self.column.kernel * columns) <= room
        ]
        return sorted(found or [(1, 1)], key=lambda tile: self.waste(*tile))

    def waste(self, rows: int, columns: int) -> float:
        """Time of the tiles over time of the same products without a loss."""
        row, column = self.row, self.column
        edges = len(row.tiles(rows)) * rows / row.out * len(column.tiles(columns)) * columns / column.out
        products = rows * columns * row.kernel * column.kernel
        loads = len(row.users(rows)) * len(column.users(columns)) + row.kernel * column.kernel
        latency = max(1.0, 8 / (rows * columns))
        return edges * latency * (1 + loads / products)

    def blocks(self, target: Target, rows: int, columns: int) -> tuple[int, int]:
        """Rows and vectors of channels of a task: a tile fits the first cache, every thread has several."""
        width = target.vector_bytes // model.itemsize(self.kernel)
        vectors = -(-self.conv.channels // width)
        line = self.row.reach(rows) * self.column.reach(columns) * target.vector_bytes
        block = max(1, min(vectors, target.l1_bytes * 3 // 4 // line))
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
        every = axes(self.conv)
        near = min(len(every), 2 if prod(self.conv.kernel[-2:]) <= _UNROLLED_TAPS else 1)
        self.far = every[: len(every) - near]
        self.row, self.column = [NO_AXIS, *every[len(every) - near :]][-2:]
        plain = storage.is_stored_as_computed(kernel.src.dtype) and not kernel.prologue
        step = kernel.src.element_strides[-1]
        self.copies = not plain or (step != 1 and self.column.size > 1)

    @property
    def strides(self) -> tuple[tuple[int, ...], int]:
        """Elements of src between neighbours: each far axis, rows."""
        spatial = self.kernel.src.element_strides[2:]
        far = len(self.far)
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
        room, column = self.target.vector_registers, self.column
        if self.fits_whole:
            return [(0, min(-(-self.row.out // self.rows_a_vector), room // 2))]
        most = -(-column.out // self.lanes)
        found = [
            (rows, vectors)
            for rows in range(1, min(8, self.row.out) + 1)
            for vectors in range(1, min(8, most) + 1)
            if rows * vectors + min(6, column.kernel * vectors) + 2 <= room
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
        loads = len(row.users(rows)) * min(column.stride, 4) / (rows * row.kernel)
        latency = max(1.0, 8 / (rows * vectors))
        return edges * latency * (1 + loads)

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

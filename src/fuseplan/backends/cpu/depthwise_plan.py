"""How the depthwise templates go about a convolution: where src is read, and which of its axes are tiled."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import prod

from fuseplan.backends.cpu import model, staging
from fuseplan.backends.cpu.windows import NO_AXIS, Axis, axes
from fuseplan.kernel import Convolution, Kernel, functions
from fuseplan.target import Target

_UNROLLED_TAPS = 64  # of the last two axes; a larger kernel loops over its rows
_UNROLLED_COLUMNS = 64
_PROLOGUE = 6  # functions of a prologue that cost less applied at each read than a copy of src


def convolution_of(kernel: Kernel) -> Convolution:
    """The kernel's convolution; `limits` has seen to it that there is one."""
    if kernel.convolution is None:
        raise ValueError("a kernel without a contraction has no convolution")
    return kernel.convolution


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

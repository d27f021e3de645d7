"""Operators with statistics over any axes: softmax, sums, means and maxima."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.loops import STREAMED_RUN, line_elements
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.templates.reduction_loops import CHUNK, ROWS, Cut, chunking
from fuseplan.backends.cpu.templates.reduction_sums import ROWS as SUM_ROWS
from fuseplan.backends.cpu.templates.reduction_writer import ReductionWriter
from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    block_claim,
    lanes,
    result_claim,
    unit_roundoff,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import functions

SUM_TASK = 1 << 14  # elements of a task with sums of its own, at least
_TASK = 2048  # elements: fewer are not worth another thread
_WIDEST = 1024  # columns of a task: their states stay in the first cache
_NARROWEST = 64  # bytes of a row that are worth fetching alone
_SHORT = 128  # elements: a run of fewer is better columns, where there are rows of them
_FOLDED = 8  # times the run: with fewer rows, gathering the columns of cells costs more than it saves


@dataclass(frozen=True)
class Reduction(CpuTemplate):
    """Statistics over any axes, then one element for each cell, or all elements once more.

    reads:  src and operands once for each statistic, and once more where dst has src's axes; once in all
            where a unit's elements stay in the second cache
    writes: dst once
    chosen: for every plan with statistics over other axes than a normalization's

    Attributes:
        cells: cells of a task, or columns where src's innermost axis is kept.
        parts: parts of the elements of a cell, each a task of its own; their states are gathered.
        near: the elements of a cell, or of the columns of a task, stay in the second cache: each level of a
            statistic's parts has a pass of its own.
        stream: writes go past the caches.
        folded: lanes are columns of which several belong to a cell; otherwise, elements of one cell or cells.
    """

    cells: int
    parts: int
    near: bool = False
    stream: bool = False
    folded: bool = False

    name: ClassVar[str] = "reduction"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas; for a sum, the sum of |terms|"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.has_cells and not isinstance(kernel.centre, Summary), Reason.NO_REDUCTION)
        yield block_claim(kernel)
        lattice = Lattice(kernel)
        is_outer = kernel.open_axis is None or lattice.is_along or bool(lattice.outer_cells)
        yield claim(is_outer, Reason.KNOWN_EXTENTS, operator=kernel.centre_step)
        told = f"blocks of {lattice.inner_extent}" if lattice.inner else None
        yield claim(not lattice.inner, Reason.RUNS, got=told, operator=lattice.inner_step)
        is_row = lattice.is_along and lattice.run.extent == lattice.element_count
        told = None if is_row or not kernel.sums else str(kernel.src)
        yield claim(told is None, Reason.SUMMED_ROWS, got=told, operator=kernel.centre_step)
        yield result_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        lattice, width = Lattice(kernel), lanes(kernel, target)
        is_short = (
            lattice.is_along
            and lattice.run.extent < _SHORT
            and lattice.element_count >= _FOLDED * lattice.run.extent
        )
        folded = is_short and lattice.can_fold and kernel.open_axis is None and not kernel.sums
        lattice = Lattice(kernel, folded=True) if folded else lattice
        wanted = max(1, min(4 * target.threads, kernel.src.size // _TASK))
        if lattice.is_along:
            # Two threads that take turns at blocks of 64 KB of a large tensor need 1.3 of the time.
            held = max(1, kernel.minimum_bytes // lattice.cell_count)
            cells = max(1, min(lattice.cell_count // wanted, 3 * target.l2_bytes // 4 // held))
            if kernel.sums:
                cells = max(-(-lattice.cell_count // SUM_ROWS), SUM_TASK // lattice.element_count, 1)
            blocks = -(-lattice.cell_count // cells)
        else:
            run, least = lattice.run.extent, _NARROWEST // kernel.src.itemsize
            outer = lattice.cell_count * lattice.fold // run
            cells = min(run, _WIDEST, max(least, run * outer // wanted))
            blocks = outer * -(-run // cells)
        _, size, pieces = chunking(lattice, width)
        is_split = blocks < target.threads and kernel.open_axis is None and not kernel.sums
        parts = max(1, min(wanted // blocks, -(-pieces // size))) if is_split else 1
        near = parts == 1 and not folded and _held(kernel, cells) <= target.l2_bytes // 2
        if _can_stream(kernel, target) and parts == 1 and not folded and not kernel.sums:
            yield cls(cells, parts, near, stream=True)
        yield cls(cells, parts, near, folded=folded)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        passes = kernel.passes - Lattice(kernel).is_reduced
        is_near = _held(kernel, self.cells) <= target.l2_bytes // 2
        again = 0 if is_near else kernel.src.nbytes * (passes - 1)
        read = kernel.minimum_bytes - kernel.dst.nbytes
        return Traffic(read + again, kernel.dst.nbytes)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        phases = 1 if self.parts == 1 else kernel.passes
        paid = model.paid(self.traffic(kernel, target), target, stream=self.stream)
        return model.seconds(kernel, target, flops=kernel.flops, traffic=paid, efficiency=0.2, phases=phases)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, and those of a sum: of a lane's chunk, of the chunks, and of the lanes.

        Lanes are those of the narrowest vectors.
        """
        made = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        made += [part.term for each in kernel.statistics for part in each.parts]
        count = kernel.reduced_count
        narrowest = 16 // dtype_of(kernel.compute_dtype).itemsize
        chunk = max(min(count / narrowest, CHUNK), min(count, ROWS))
        rounded = chunk + count / min(CHUNK, ROWS) + log2(narrowest)
        return (sum(map(functions, made)) + rounded) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        line = line_elements(kernel.dst.itemsize) if self.stream else 0
        cut = Cut(self.cells, self.parts, self.parts == 1, self.folded, line, self.near)
        return ReductionWriter(self, cut, kernel, target).source()


def _held(kernel: Kernel, cells: int) -> int:
    """Bytes of src that are gone through together: a cell's, or those of a task's columns."""
    lattice = Lattice(kernel)
    elements = lattice.element_count * len(lattice.starts)
    return elements * (1 if lattice.is_along else cells) * kernel.src.itemsize


def _can_stream(kernel: Kernel, target: Target) -> bool:
    """Whether the tensors exceed the last cache, and dst is written in long runs, or in whole cache lines."""
    lattice = Lattice(kernel)
    if kernel.open_axis is not None or kernel.parts or not lattice.is_along or lattice.is_reduced:
        return False
    is_large = kernel.minimum_bytes > target.l3_bytes
    place, line = lattice.tensors.index("dst"), line_elements(kernel.dst.itemsize)
    around = [axis.steps[place] for axis in (*lattice.outer_elements, *lattice.cells)]
    has_lines = all(begin % line == 0 for begin in (*around, lattice.run.extent))
    least = 4 * line if has_lines else STREAMED_RUN * lanes(kernel, target)
    return is_large and lattice.run.steps[place] == 1 and lattice.run.extent >= least

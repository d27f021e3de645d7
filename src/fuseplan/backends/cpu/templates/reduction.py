"""Operators with statistics over any axes: softmax, sums, means and maxima."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log2
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates.reduction_loops import CHUNK, ROWS
from fuseplan.backends.cpu.templates.reduction_writer import ReductionKnobs, ReductionWriter
from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    block_claim,
    result_claim,
    unit_roundoff,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import functions

_TASK = 16384  # elements: fewer are not worth another thread
_WIDEST = 1024  # columns of a task: their states stay in the first cache
_NARROWEST = 64  # bytes of a row that are worth fetching alone


@dataclass(frozen=True)
class Reduction(ReductionKnobs):
    """Statistics over any axes, then one element for each cell, or all elements once more.

    reads:  src and operands once for each statistic, and once more where dst has src's axes; a cell's
            elements stay in the caches where they fit
    writes: dst once
    chosen: for every plan with statistics over other axes than a normalization's

    Attributes:
        cells: cells of a task, or columns where src's innermost axis is kept.
        parts: parts of the elements of a cell, each a task of its own; their states are merged.
    """

    name: ClassVar[str] = "reduction"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas; for a sum, the sum of |terms|"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.has_cells, Reason.NO_REDUCTION)
        yield block_claim(kernel)
        lattice = Lattice(kernel)
        is_outer = kernel.open_axis is None or lattice.is_along or bool(lattice.outer_cells)
        yield claim(is_outer, Reason.KNOWN_EXTENTS, operator=kernel.centre_step)
        yield result_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        lattice = Lattice(kernel)
        wanted = max(1, min(4 * target.threads, kernel.src.size // _TASK))
        if lattice.is_along:
            cells = max(1, min(lattice.cell_count // wanted, -(-_TASK // lattice.element_count)))
            blocks = -(-lattice.cell_count // cells)
        else:
            run, least = lattice.run.extent, _NARROWEST // kernel.src.itemsize
            outer = lattice.cell_count // run
            cells = min(run, _WIDEST, max(least, run * outer // wanted))
            blocks = outer * -(-run // cells)
        chunks = ReductionWriter(cls(cells, 1), kernel, target).loops.chunk_count
        is_split = blocks < target.threads and kernel.open_axis is None
        yield cls(cells, max(1, min(wanted // blocks, chunks)) if is_split else 1)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        passes = kernel.passes - Lattice(kernel).is_reduced
        cell = kernel.src.nbytes // Lattice(kernel).cell_count * self.cells
        again = 0 if cell <= target.l2_bytes // 2 else kernel.src.nbytes * (passes - 1)
        read = kernel.minimum_bytes - kernel.dst.nbytes
        return Traffic(read + again, kernel.dst.nbytes)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        phases = 1 if self.parts == 1 else kernel.passes
        moved = self.traffic(kernel, target)
        return model.seconds(kernel, target, flops=kernel.flops, traffic=moved, efficiency=0.2, phases=phases)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, and those of a sum: of a lane's chunk, of the chunks, and of the lanes.

        Lanes are those of the narrowest vectors.
        """
        lanes = 16 // dtype_of(kernel.compute_dtype).itemsize
        made = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        made += [part.term for each in kernel.statistics for part in each.parts]
        count = kernel.reduced_count
        chunk = max(min(count, CHUNK) / lanes, min(count, ROWS))
        rounded = chunk + count / min(CHUNK, ROWS) + log2(lanes)
        return (sum(map(functions, made)) + rounded) * unit_roundoff(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ReductionWriter(self, kernel, target).source()

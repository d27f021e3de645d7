"""Operators with statistics over any axes: softmax, sums, means and maxima."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import dialect, model
from fuseplan.backends.triton.index import ceil_div, power_of_two
from fuseplan.backends.triton.templates.reduction_writer import ReductionKnobs, ReductionWriter
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, accuracy_claim, block_claim, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls

WARPS = (4, 8, 16)
LANES = 32  # cells side by side in a tile, at least, where src's innermost axis is kept
HELD = 32  # registers of a thread for the elements of a tile in the compute dtype
MEETING = 3e-6  # seconds for a merge of the states of several programs
GROUPS = COUNTER_BYTES // 4  # that may meet


@dataclass(frozen=True)
class GpuReduction(ReductionKnobs):
    """Statistics over any axes, then one element for each cell, or all elements once more.

    reads:  src and operands once where the registers of a cell's programs hold its elements, and where dst
            has one element for each cell; else once for each statistic and once for dst
    writes: dst once
    chosen: for every plan with statistics over other axes than a normalization's

    Attributes:
        cells: cells of a tile.
        elements: elements of each in a tile.
        programs: programs that share the elements of a tile's cells, and meet to merge their states.
        warps: warps of a program.
    """

    name: ClassVar[str] = "reduction"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = (
        "the sum of |terms| of a reduction, and the result of each function of the formulas"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.has_cells, Reason.NO_REDUCTION)
        yield block_claim(kernel)
        if not isinstance(accuracy, str):
            least = min(each.error_bound(kernel) for each in cls._made(kernel, target))
            yield accuracy_claim(least, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        made = dict.fromkeys(cls._made(kernel, target))
        if not isinstance(accuracy, str):
            made = dict.fromkeys(each for each in made if each.error_bound(kernel) <= accuracy)
        yield from sorted(made, key=lambda each: each.seconds(kernel, target))

    @classmethod
    def _made(cls, kernel: Kernel, target: Target) -> Iterator[GpuReduction]:
        """Tiles that fill the registers, with as many programs for each as fill the GPU."""
        lattice = Lattice(kernel)
        count, cells, parts = lattice.element_count, lattice.cell_count, len(lattice.starts)
        side = 1 if lattice.is_along else min(LANES, power_of_two(lattice.run.extent))
        for warps in WARPS:
            held = HELD // 2 if kernel.compute_dtype == "f64" else HELD
            tile = target.warp * warps * max(1, held // power_of_two(parts))
            for share in (tile, tile // 2, tile // 4):
                elements = min(power_of_two(count), share // side)
                rows = min(power_of_two(cells), max(side, share // elements))
                rows = min(rows, max(side, power_of_two(ceil_div(cells, 2 * target.processors))))
                groups, blocks = ceil_div(cells, rows), ceil_div(count, elements)
                # Of an open axis, a launch may have any number of groups: no counters for all of them.
                may_meet = groups <= GROUPS and kernel.open_axis is None
                most = min(target.processors // groups, blocks) if may_meet else 1
                for programs in {1, 1 << max(0, most.bit_length() - 1)}:
                    yield cls(rows, elements, programs, warps)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        written = kernel.written_bytes
        is_held = self.elements * self.programs >= Lattice(kernel).element_count
        passes = 1 if is_held else kernel.passes - Lattice(kernel).is_reduced
        again = kernel.src.nbytes * (passes - 1)
        return Traffic(kernel.minimum_bytes - written + again, written)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        lattice = Lattice(kernel)
        programs = ceil_div(lattice.cell_count, self.cells) * self.programs
        tiles = ceil_div(lattice.cell_count, self.cells) * self.cells
        tiles *= ceil_div(lattice.element_count, self.elements) * self.elements
        used = min(1.0, programs / target.processors) * kernel.src.size / (tiles * len(lattice.starts))
        estimate = model.seconds(target, self.traffic(kernel, target), used=used)
        meeting = MEETING * len(kernel.statistics) if self.programs > 1 else 0.0
        return round(estimate + meeting, 7)

    def error_bound(self, kernel: Kernel) -> float:
        """One rounding for each addition that a term goes through, and the errors of the functions.

        Elements of a tile are added in pairs, tiles one by one, and programs in pairs.
        """
        blocks = ceil_div(kernel.reduced_count, self.elements * self.programs)
        added = blocks + ceil(log2(self.elements)) + ceil(log2(self.programs))
        formulas = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        formulas += [part.term for each in kernel.statistics for part in each.parts]
        names = (name for formula in formulas for name in calls(formula))
        functions = sum(dialect.relative_error(name, kernel.dst.dtype) for name in names)
        return 2 * (added + 2) * unit_roundoff(kernel) + functions

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ReductionWriter(self, kernel, self.text).source()

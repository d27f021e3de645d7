"""Operators with statistics: per channel or activation, or over any axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2, prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.templates import reduction_cuts as cuts
from fuseplan.backends.cpu.templates.reduction_loops import CHUNK, ROWS, Cut
from fuseplan.backends.cpu.templates.reduction_writer import ReductionWriter
from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing
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

_TILE_SECONDS = 1.0e-8  # to add up the lanes of one tile
# To go on at another place of a tensor: a Zen 4 core took 7 to 12 ns, about 2 where half of the last cache
# holds all tensors.
_JUMP_SECONDS, _NEAR_JUMP_SECONDS = 8.0e-9, 2.0e-9


@dataclass(frozen=True)
class Reduction(Cut):
    """Statistics of all elements of each cell, then one element for each cell, or all elements once more.

    A cell is a channel, an activation, or a place along the axes that are kept.

    reads:  src and operands once for each statistic, and once more where dst has src's axes; once in all
            where the elements of a task stay in the second cache
    writes: dst and the results once
    chosen: for every plan with statistics but those of a product's rows
    """

    name: ClassVar[str] = "reduction"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas; for a sum, the sum of |terms|"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        is_summary = isinstance(kernel.centre, Summary)
        yield claim(kernel.reductions is not None and not is_summary, Reason.NO_REDUCTION)
        if kernel.has_cells:
            yield block_claim(kernel)
        lattice = Lattice(kernel)
        is_outer = lattice.is_along or (kernel.has_cells and bool(lattice.outer_cells))
        yield claim(kernel.open_axis is None or is_outer, Reason.KNOWN_EXTENTS, operator=kernel.centre_step)
        told = f"blocks of {lattice.inner_extent}" if lattice.inner else None
        yield claim(not lattice.inner, Reason.RUNS, got=told, operator=lattice.inner_step)
        is_row = lattice.is_along and lattice.run.extent == lattice.element_count
        told = None if is_row or not kernel.sums else str(kernel.src)
        yield claim(told is None, Reason.SUMMED_ROWS, got=told, operator=kernel.centre_step)
        yield result_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = cuts.of_cells if kernel.has_cells else cuts.of_channels
        yield from found(cls, kernel, target)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        lattice, written = self._lattice(kernel), kernel.written_bytes
        small = kernel.minimum_bytes - kernel.src.nbytes - written
        small -= sum(each.nbytes for each in kernel.operands if not each.packed)
        passes = sum(sum(read.values()) for read in kernel.read_in_passes)
        is_kept = not self.split and cuts.held(kernel, lattice, self.cells) <= cuts.kept_bytes(
            kernel, lattice, target
        )
        states = sum(len(each.parts) for each in kernel.statistics) * self.parts if self.split else 0
        columns = lattice.cell_count * lattice.fold
        return Traffic((cuts.moved(kernel) if is_kept else passes) + small, written, states * columns * 8)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        lattice = self._lattice(kernel)
        held = kernel.minimum_bytes
        paid = model.paid(self.traffic(kernel, target), target, stream=self.stream, held=held)
        blocks = -(-cuts.extent(lattice) // self.cells)
        tasks = cuts.segments(lattice) * blocks * (self.parts if self.split else 1)
        longest = self.greatest(lattice, lanes(kernel, target)) * self.cells / cuts.extent(lattice)
        idle = target.threads * max(-(-tasks // target.threads) / tasks, longest / cuts.segments(lattice))
        rows = prod(axis.extent for axis in lattice.outer_elements)
        runs = rows * (lattice.cell_count if lattice.is_along else blocks)
        tiles = len(kernel.statistics) * runs if lattice.is_along else 0
        is_whole = rows == 1 or (blocks == 1 and not lattice.is_along)
        jumps = 0 if is_whole else runs * (sum(map(len, kernel.read_in_passes)) + 1)
        jump = _NEAR_JUMP_SECONDS if 2 * held < target.l3_bytes else _JUMP_SECONDS
        work = model.seconds(
            kernel, target, flops=kernel.flops, traffic=paid, efficiency=0.5, phases=0, held=held
        )
        work += (tiles * _TILE_SECONDS + jumps * jump) / target.threads
        return idle * work + (2 * kernel.passes - 1 if self.split else 1) * model.PHASE_SECONDS

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, and those of a sum: of a lane's chunk, of the chunks, and of the lanes.

        Lanes are those of the narrowest vectors. Chunks of a channel or an activation are added in float64,
        and four vectors or rows of a chunk, or more, by pairs.
        """
        made = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        made += [part.term for each in kernel.statistics for part in each.parts]
        count = kernel.reduced_count
        narrowest = 16 // dtype_of(kernel.compute_dtype).itemsize
        rounded = CHUNK / 4 + log2(4 * narrowest) + 1
        if kernel.has_cells:
            chunk = max(min(count / narrowest, CHUNK), min(count, ROWS))
            rounded = chunk + count / min(CHUNK, ROWS) + log2(narrowest)
        return (sum(map(functions, made)) + rounded) * unit_roundoff(kernel)

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        # Beside channels and activations, operators have the shape of dst, and loops are over its places.
        placed = operand if kernel.has_cells else replace(operand, role="epilogue")
        return super().packing(kernel, target, placed)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        if self.stream and not cuts.can_stream(kernel, self._lattice(kernel), target):
            raise ValueError(f"{self.text}: rows written past the caches begin at whole vectors")
        return ReductionWriter(self, kernel, target).source()

    def _lattice(self, kernel: Kernel) -> Lattice:
        return Lattice(kernel, folded=self.folded)

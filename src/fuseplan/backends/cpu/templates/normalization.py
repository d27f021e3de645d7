"""Operators with statistics: sums over a channel's or a place's elements, then one pass over these again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm, log2, prod
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.loops import STREAMED_RUN, line_elements
from fuseplan.backends.cpu.template import CpuTemplate
from fuseplan.backends.cpu.templates.reduction_loops import CHUNK, Cut, rounded, usual_parts
from fuseplan.backends.cpu.templates.reduction_writer import ReductionWriter
from fuseplan.backends.lattice import Lattice
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    Traffic,
    accuracy_claim,
    lanes,
    result_claim,
    unit_roundoff,
)
from fuseplan.language.dtypes import dtype_of
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import functions

_TASK_BYTES = 48 * 1024  # less is not worth another thread
_WIDEST = 4096  # columns in a task: their partial sums go through the first cache
_NARROWEST = 256  # bytes of a row that are worth fetching alone
_TILE = 8  # images of fewer are no columns of their own
_FOLDED = 256  # elements: in shorter runs the sums of lanes cost more than columns of their own
_TILE_SECONDS = 1.0e-8  # to add up the lanes of one tile


@dataclass(frozen=True)
class Normalization(CpuTemplate):
    """Statistics of all elements of a channel or a place, then the elementwise operators behind them.

    reads:  src and operands once for each reduction and once for dst; once in all, where the data of
            a task fits the second cache
    writes: dst and the results once
    chosen: for every plan with a normalization

    Attributes:
        folded: the lanes of a vector are channels or places with sums of their own; otherwise they are
            positions of one channel.
        whole: a task computes all of its sums and then its part of dst; otherwise tasks compute parts of
            sums, and all tasks wait for all parts.
        block: columns or channels in a task.
        stream: writes go past the caches.
    """

    folded: bool
    whole: bool
    block: int
    stream: bool

    name: ClassVar[str] = "normalization"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas; for a sum, the sum of |terms|"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(bool(kernel.statistics) and not kernel.has_cells, Reason.NO_NORMALIZATION)
        is_row = kernel.open_axis is None or Lattice(kernel).is_along
        yield claim(is_row, Reason.KNOWN_EXTENTS, operator=kernel.centre_step)
        yield result_claim(kernel)
        yield accuracy_claim(cls.bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        large = _moved(kernel) + kernel.dst.nbytes > target.l3_bytes
        alone = (True,) if kernel.open_axis is not None else (True, False)
        knobs = product(_foldings(kernel), alone, (True, False) if large else (False,))
        for folded, whole, stream in knobs:
            made = _blocked(kernel, target, folded=folded, whole=whole)
            if made is not None and (not stream or _can_stream(kernel, made._lattice(kernel), target)):
                yield replace(made, stream=stream)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        kept = self.whole and _held(self, kernel) <= _kept_bytes(kernel, self._lattice(kernel), target)
        written = kernel.written_bytes
        operands = kernel.minimum_bytes - kernel.src.nbytes - written
        small = operands - sum(each.nbytes for each in kernel.operands if not each.packed)
        passes = sum(sum(read.values()) for read in kernel.read_in_passes)
        lattice = self._lattice(kernel)
        states = sum(len(each.parts) for each in kernel.statistics) * usual_parts(
            lattice, lanes(kernel, target)
        )
        partial = 0 if self.whole else states * lattice.cell_count * lattice.fold * 8
        return Traffic((_moved(kernel) if kept else passes) + small, written, partial)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        lattice = self._lattice(kernel)
        paid = model.paid(self.traffic(kernel, target), target, stream=self.stream)
        tasks = _tasks(self, lattice, lanes(kernel, target))
        idle = -(-tasks // target.threads) * target.threads / tasks
        phases = 1 if self.whole else 2 * kernel.passes - 1
        rows = prod(axis.extent for axis in lattice.outer_elements)
        tiles = len(kernel.statistics) * lattice.cell_count * rows if lattice.is_along else 0
        return idle * (
            model.seconds(kernel, target, flops=kernel.flops, traffic=paid, efficiency=0.2, phases=phases)
            + tiles * _TILE_SECONDS / target.threads
        )

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, and the roundings of a chunk's sum. Chunks are added in float64.

        A chunk is summed by four vectors or rows and more at a time, those by pairs; then its lanes are.
        """
        stages = (*kernel.prologue, *kernel.epilogue)
        made = [stage.expression for stage in stages]
        made += [each for reduction in kernel.statistics for each in reduction.expressions]
        narrowest = 4 * 16 // dtype_of(kernel.compute_dtype).itemsize  # four vectors of the narrowest kind
        roundings = CHUNK / 4 + log2(narrowest) + 1
        return (sum(map(functions, made)) + roundings) * unit_roundoff(kernel)

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        # All operators have the shape of dst, and all loops are over places of dst.
        return super().packing(kernel, target, replace(operand, role="epilogue"))

    def emit(self, kernel: Kernel, target: Target) -> Source:
        lattice = self._lattice(kernel)
        if self.stream and not _can_stream(kernel, lattice, target):
            raise ValueError(f"{self.text}: rows written past the caches begin at whole vectors")
        parts = usual_parts(lattice, lanes(kernel, target))
        line = line_elements(kernel.dst.itemsize) if self.stream else 0
        cut = Cut(self.block, parts, self.whole, self.folded, line)
        return ReductionWriter(self, cut, kernel, target).source()

    def _lattice(self, kernel: Kernel) -> Lattice:
        return Lattice(kernel, folded=self.folded)


def _moved(kernel: Kernel) -> int:
    """Bytes of the tensors as large as src, each read once."""
    together: dict[str, int] = {}
    for read in kernel.read_in_passes:
        together |= read
    return sum(together.values())


def _foldings(kernel: Kernel) -> tuple[bool, ...]:
    """Whether short runs become columns, the better first; of as many images as are a tile."""
    lattice = Lattice(kernel)
    if not lattice.can_fold or lattice.run.extent >= 2 * _FOLDED or kernel.dst.batch < _TILE:
        return (False,)
    return (True, False) if lattice.run.extent < _FOLDED else (False, True)


def _blocked(kernel: Kernel, target: Target, *, folded: bool, whole: bool) -> Normalization | None:
    """Knobs: blocks that the second cache holds, and some for each thread; None where there are none."""
    width, lattice = lanes(kernel, target), Lattice(kernel, folded=folded)
    extent, moved, segments = _extent(lattice), _moved(kernel), _segments(lattice)
    wanted = max(1, min(4 * target.threads, moved // _TASK_BYTES))
    step = 1 if lattice.is_along else lcm(lattice.fold, width)  # whole vectors, of whole channels
    if kernel.open_axis is not None:
        return Normalization(folded, whole, rounded(_TASK_BYTES * extent, moved) // moved, stream=False)
    if not whole:
        parts = max(1, wanted // usual_parts(lattice, width)) if lattice.is_along else 1
        block = min(rounded(-(-extent // parts), step), max(step, _WIDEST // step * step))
        return Normalization(folded, whole, min(block, extent), stream=False)
    column = moved / (segments * extent)  # bytes that belong to one column, or channel
    least = 1 if lattice.is_along else rounded(min(_NARROWEST // kernel.src.itemsize, extent), step)
    if not lattice.is_along and least * column > _kept_bytes(kernel, lattice, target):
        return None
    fitting = min(int(3 / 4 * target.l2_bytes / column), _WIDEST) // step * step
    shared = rounded(-(-extent * segments // wanted), step)
    return Normalization(folded, whole, min(max(least, min(fitting, shared)), extent), stream=False)


def _kept_bytes(kernel: Kernel, lattice: Lattice, target: Target) -> int:
    """Of how many bytes a later pass need not go to memory: long rows also come fast from the last cache."""
    own, share = 3 * target.l2_bytes // 4, target.l3_bytes // (4 * target.threads)
    is_long = lattice.is_along or lattice.fold > 1 or kernel.reduction.per == "activation"
    return max(own, share) if is_long else own


def _extent(lattice: Lattice) -> int:
    """Of what a block is a part: columns of a run, or channels."""
    return lattice.cell_count if lattice.is_along else lattice.run.extent


def _segments(lattice: Lattice) -> int:
    """Runs of columns."""
    return 1 if lattice.is_along else prod(axis.extent for axis in lattice.outer_cells)


def _tasks(knobs: Normalization, lattice: Lattice, width: int) -> int:
    blocks = _segments(lattice) * -(-_extent(lattice) // knobs.block)
    return blocks * (1 if knobs.whole else usual_parts(lattice, width))


def _held(knobs: Normalization, kernel: Kernel) -> float:
    """Bytes of what a task goes through at a time: a block of columns, or one channel."""
    lattice = Lattice(kernel, folded=knobs.folded)
    block = 1 if lattice.is_along else knobs.block
    return _moved(kernel) * block / (_extent(lattice) * _segments(lattice))


def _can_stream(kernel: Kernel, lattice: Lattice, target: Target) -> bool:
    """Whether rows of columns begin at whole cache lines if the first does, or runs are long."""
    line, dst = line_elements(kernel.dst.itemsize), lattice.tensors.index("dst")
    if lattice.run.steps[dst] != 1:
        return False
    if lattice.is_along:
        return lattice.run.extent >= STREAMED_RUN * lanes(kernel, target) and lattice.run.steps[0] == 1
    around = [axis.steps[dst] for axis in (*lattice.elements, *lattice.outer_cells)]
    return all(begin % line == 0 for begin in (*around, lattice.run.extent))

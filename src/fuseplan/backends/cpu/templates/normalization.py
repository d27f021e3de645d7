"""Operators with statistics: sums over a channel's or a place's elements, then one pass over these again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import lcm, log2
from typing import ClassVar

from fuseplan.backends.cpu import model
from fuseplan.backends.cpu.loops import STREAMED_RUN
from fuseplan.backends.cpu.templates.normalization_columns import ColumnWriter
from fuseplan.backends.cpu.templates.normalization_runs import RunWriter
from fuseplan.backends.cpu.templates.normalization_shape import (
    CHUNK,
    TILE,
    NormalizationKnobs,
    Shape,
    can_fold,
    shape_of,
)
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
_FOLDED = 256  # elements: in shorter runs the sums of lanes cost more than columns of their own
_TILE_SECONDS = 1.0e-8  # to add up the lanes of one tile


@dataclass(frozen=True)
class Normalization(NormalizationKnobs):
    """Statistics of all elements of a channel or a place, then the elementwise operators behind them.

    reads:  src and operands once for each reduction and once for dst; once in all, where the data of
            a task fits the second cache
    writes: dst and the results once
    chosen: for every plan with a normalization
    """

    name: ClassVar[str] = "normalization"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = "the result of each function of the formulas; for a sum, the sum of |terms|"

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(bool(kernel.statistics) and not kernel.has_cells, Reason.NO_NORMALIZATION)
        is_row = kernel.open_axis is None or not shape_of(kernel, False, lanes(kernel, target)).columns
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
            if made is not None and (not stream or _can_stream(made, kernel, target)):
                yield replace(made, stream=stream)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        kept = self.whole and _held(self, kernel, target) <= _kept_bytes(self._shape(kernel, target), target)
        written = kernel.written_bytes
        operands = kernel.minimum_bytes - kernel.src.nbytes - written
        small = operands - sum(each.nbytes for each in kernel.operands if not each.packed)
        passes = sum(sum(read.values()) for read in kernel.read_in_passes)
        partial = 0 if self.whole else self._partial_bytes(kernel, target)
        return Traffic((_moved(kernel) if kept else passes) + small, written, partial)

    def _partial_bytes(self, kernel: Kernel, target: Target) -> int:
        shape = self._shape(kernel, target)
        return sum(len(each.names) for each in kernel.statistics) * shape.parts * shape.width * 8

    def seconds(self, kernel: Kernel, target: Target) -> float:
        moved, shape = self.traffic(kernel, target), self._shape(kernel, target)
        # A plain store reads its line before it writes it.
        fetched = 0 if self.stream or moved.total < target.l3_bytes else moved.written
        paid = Traffic(moved.read + fetched, moved.written, moved.workspace)
        tasks = _tasks(self, shape)
        idle = -(-tasks // target.threads) * target.threads / tasks
        phases = 1 if self.whole else 2 * kernel.passes - 1
        tiles = 0 if shape.columns else len(kernel.statistics) * shape.cells * shape.row_count
        return idle * (
            model.seconds(kernel, target, flops=kernel.flops, traffic=paid, efficiency=0.2, phases=phases)
            + tiles * _TILE_SECONDS / target.threads
        )

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """One rounding per function, and the roundings of a tile's sum. Tiles are added in float64.

        A tile of a run is summed by four vectors of lanes, one of columns by pairs: no element is rounded
        more often than the longer of these.
        """
        stages = (*kernel.prologue, *kernel.epilogue)
        made = [stage.expression for stage in stages]
        made += [each for reduction in kernel.statistics for each in reduction.expressions]
        narrowest = 4 * 16 // dtype_of(kernel.compute_dtype).itemsize  # four vectors of the narrowest kind
        rounded = CHUNK / narrowest + log2(narrowest) + 1
        return (sum(map(functions, made)) + rounded) * unit_roundoff(kernel)

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        # All operators have the shape of dst, and all loops are over places of dst.
        return super().packing(kernel, target, replace(operand, role="epilogue"))

    def emit(self, kernel: Kernel, target: Target) -> Source:
        shape = self._shape(kernel, target)
        if self.stream and shape.columns and not _can_stream(self, kernel, target):
            raise ValueError(f"{self.text}: rows written past the caches begin at whole vectors")
        writer = ColumnWriter if shape.columns else RunWriter
        return writer(self, kernel, target, shape).source()

    def _shape(self, kernel: Kernel, target: Target) -> Shape:
        return shape_of(kernel, self.folded, lanes(kernel, target))


def _moved(kernel: Kernel) -> int:
    """Bytes of the tensors as large as src, each read once."""
    together: dict[str, int] = {}
    for read in kernel.read_in_passes:
        together |= read
    return sum(together.values())


def _foldings(kernel: Kernel) -> tuple[bool, ...]:
    """Whether short runs become columns, the better first; of as many images as are a tile."""
    run = kernel.dst.size // (kernel.dst.batch * kernel.dst.channels)
    if not can_fold(kernel) or run >= 2 * _FOLDED or kernel.dst.batch < TILE:
        return (False,)
    return (True, False) if run < _FOLDED else (False, True)


def _blocked(kernel: Kernel, target: Target, *, folded: bool, whole: bool) -> Normalization | None:
    """Knobs: blocks that the second cache holds, and some for each thread; None where there are none."""
    width, shape = lanes(kernel, target), shape_of(kernel, folded, lanes(kernel, target))
    extent = shape.run.extent if shape.columns else shape.cells
    moved = _moved(kernel)
    wanted = max(1, min(4 * target.threads, moved // _TASK_BYTES))
    step = _step(shape, width)
    if kernel.open_axis is not None:
        return Normalization(folded, whole, _rounded(_TASK_BYTES * extent, moved) // moved, stream=False)
    if not whole:
        parts = 1 if shape.columns else max(1, wanted // shape.parts)
        block = min(_rounded(-(-extent // parts), step), max(step, _WIDEST // step * step))
        return Normalization(folded, whole, min(block, extent), stream=False)
    column = moved / (shape.segments * extent)  # bytes that belong to one column, or channel
    least = _rounded(min(_NARROWEST // kernel.src.itemsize, extent), step) if shape.columns else 1
    if shape.columns and least * column > _kept_bytes(shape, target):
        return None
    fitting = min(int(3 / 4 * target.l2_bytes / column), _WIDEST) // step * step
    shared = _rounded(-(-extent * shape.segments // wanted), step)
    return Normalization(folded, whole, min(max(least, min(fitting, shared)), extent), stream=False)


def _kept_bytes(shape: Shape, target: Target) -> int:
    """Of how many bytes a later pass need not go to memory: long rows also come fast from the last cache."""
    own, share = 3 * target.l2_bytes // 4, target.l3_bytes // (4 * target.threads)
    return max(own, share) if shape.images or not shape.columns else own


def _step(shape: Shape, width: int) -> int:
    """Of what a block is a multiple: whole vectors, of whole channels where columns are folded."""
    if not shape.columns:
        return 1
    return lcm(shape.fold, width)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _tasks(knobs: Normalization, shape: Shape) -> int:
    extent = shape.run.extent if shape.columns else shape.cells
    return shape.segments * -(-extent // knobs.block) * (1 if knobs.whole else shape.parts)


def _held(knobs: Normalization, kernel: Kernel, target: Target) -> float:
    """Bytes of what a task goes through at a time: a block of columns, or one channel."""
    shape = knobs._shape(kernel, target)
    share = knobs.block / (shape.run.extent * shape.segments) if shape.columns else 1 / shape.cells
    return _moved(kernel) * share


def _can_stream(knobs: Normalization, kernel: Kernel, target: Target) -> bool:
    """Whether rows of columns begin at whole vectors, as the first does, or runs are long."""
    shape, width = knobs._shape(kernel, target), lanes(kernel, target)
    if not shape.columns:
        return shape.run.extent >= STREAMED_RUN * width and shape.run.src == 1
    begins = [*(axis.dst for axis in (*shape.rows, *shape.outer)), shape.run.extent]
    return all(begin % width == 0 for begin in begins)

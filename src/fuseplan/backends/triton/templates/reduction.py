"""Operators with statistics over any axes: softmax, sums, means and maxima."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log2
from typing import ClassVar

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import dialect
from fuseplan.backends.triton.index import ceil_div, power_of_two
from fuseplan.backends.triton.templates.reduction_cost import LANES, Cost
from fuseplan.backends.triton.templates.reduction_tiles import ReductionKnobs
from fuseplan.backends.triton.templates.reduction_writer import ReductionWriter
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.emit import COUNTER_BYTES, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, Traffic, accuracy_claim, block_claim, unit_roundoff
from fuseplan.messages.reasons import Claim, Reason, claim

WARPS = (1, 2, 4, 8, 16, 32)
HELD = (8, 16, 32, 64)  # elements of a tile for each thread
LOOPING, LOOPED = 4, 32  # fewest warps of a program that loops over blocks; most elements of its threads
THREADS = 1024  # of a program, at most
CELLS = 64  # of a tile, at most, or `LANES`
GROUPS = COUNTER_BYTES // 4  # that may meet
# Warps and elements of a thread where nobody waits: 257 us on an H200, and 279 for half the elements.
ALONE_EACH = (4, 16)
TWO = 2  # cells that read a block of the operands they share together: 338 us, and not 369, on an H200
MERGED = 16  # programs whose states a warp merges
CANDIDATES = 26
SPARE = 0.7  # of a tile that holds a row, at most, where the row is rather cut into pieces
PARTS = 2  # of states that many elements of a thread may have
RESIDENT, AHEAD = (1, 2, 3, 4, 6, 8, 16), (0, 3)  # of programs that go through all tiles
COLUMNS = (4, 8, 16), (8, 16)  # warps of tiles of columns, and elements of a thread
MEETING = (1, 2, 4, 8)  # programs that share a tile's columns
ALONE = 512  # elements of a row that is a tile by itself there
PIECE, PIECES = (8, 16), 16  # elements of each thread in a piece of a row; pieces, at most
TURNS = 2  # of a program that goes through all tiles, at least
MOST_ROWS, CUT_ROWS = 16, (1, 2, 4, 8)  # of a tile there; of one that has not all elements of a cell


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
        lanes: in a loop over blocks, each lane has a state of its own.
        resident: of a kernel with sums over all cells, programs of a processor, which go through all tiles;
            0: a program, or `programs`, for each tile.
        ahead: tiles that are read at a time meanwhile; 0: one; 1: one, whose pieces stay in registers.
    """

    name: ClassVar[str] = "reduction"
    opens: ClassVar[bool] = True
    error_scale: ClassVar[str] = (
        "the sum of |terms| of a reduction, and the result of each function of the formulas"
    )

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.has_cells and not isinstance(kernel.centre, Summary), Reason.NO_REDUCTION)
        yield block_claim(kernel)
        yield from _run_claims(kernel)
        if not isinstance(accuracy, str):
            least = min(each.error_bound(kernel) for each in cls._made(Cost(kernel, target)))
            yield accuracy_claim(least, accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        cost = Cost(kernel, target)
        made = dict.fromkeys(cls._made(cost))
        if not isinstance(accuracy, str):
            made = dict.fromkeys(each for each in made if each.error_bound(kernel) <= accuracy)
        yield from sorted(made, key=lambda each: round(cost.seconds(each), 7))[:CANDIDATES]

    @classmethod
    def _made(cls, cost: Cost) -> Iterator[GpuReduction]:
        """Tiles that fit into the registers, with as many programs for each as fill the GPU."""
        yield from cls._cut(cost)
        if cost.has_columns:
            yield from cls._columns(cost)
        if cost.kernel.sums:
            yield from cls._summing(cost)
            return
        kernel, target, lattice = cost.kernel, cost.target, cost.lattice
        count, cells = lattice.element_count, lattice.cell_count
        side = 1 if lattice.is_along else min(LANES, power_of_two(lattice.run.extent))
        most = min(max(CELLS, side), max(side, power_of_two(ceil_div(cells, 2 * target.processors))))
        for warps, each in product(WARPS, HELD):
            threads = warps * target.warp
            elements = max(1, min(power_of_two(count), threads * each // side))
            rows = min(power_of_two(cells), max(side, min(most, threads * each // elements)))
            fits = cost.fits(threads, rows * elements, is_whole=elements >= count)
            if threads > THREADS or not fits or elements < lattice.inner_extent:
                continue
            groups, blocks = ceil_div(cells, rows), ceil_div(count, elements)
            if blocks == 1 and groups >= TURNS * target.processors:
                yield from cls._sharing(cost, cls(rows, elements, 1, warps))
            # Of an open axis, a launch may have any number of groups: no counters for all of them.
            may_meet = groups <= GROUPS and kernel.open_axis is None
            # ptxas spilled 31 KB of a single warp that merged the states of 32 programs.
            shared = min(target.processors // groups, blocks, MERGED * warps) if may_meet else 1
            counts = {1, 1 << max(0, shared.bit_length() - 1)}
            if not kernel.statistics:
                counts = {blocks} if (warps, each) == ALONE_EACH else set()
            for programs in counts:
                for lanes in _ways(cost, warps, each) if programs < blocks else (False,):
                    yield cls(rows, elements, programs, warps, lanes)
            is_piece = rows == 1 < blocks and warps >= LOOPING and each <= LOOPED
            # With masks for a last block, two rows spill: 4,692 bytes at 70001 elements, 120 at 80000.
            is_full = is_piece and count % (elements // TWO) == 0
            if is_full and cells > 1 and cost.passed and not lattice.inner:
                yield cls(TWO, elements // TWO, 1, warps, lanes=True)

    @classmethod
    def _columns(cls, cost: Cost) -> Iterator[GpuReduction]:
        """Tiles of columns, of programs that meet or are alone.

        Sums of columns of f32[24149x8776] took 338 us on an H200, and 235 in wider tiles of 8 programs.
        """
        groups = ceil_div(cost.cells, LANES)
        counts = MEETING if groups <= GROUPS and cost.kernel.open_axis is None else (1,)
        for side, warps, each, programs in product((LANES, CELLS), *COLUMNS, counts):
            made = cls(side, warps * cost.target.warp * each // side, programs, warps, lanes=True)
            is_loop = made.elements * programs < cost.count and side <= power_of_two(cost.cells)
            if is_loop and cost.fits_columns(made) and not cost.chooses_places:
                yield made

    @classmethod
    def _sharing(cls, cost: Cost, tile: GpuReduction) -> Iterator[GpuReduction]:
        """Programs that go through all tiles, which are on their way while those before are computed."""
        for resident, ahead in product(RESIDENT, AHEAD):
            made = replace(tile, resident=resident, ahead=ahead)
            if ahead and cost.fits_beside(made):
                yield made

    @classmethod
    def _cut(cls, cost: Cost) -> Iterator[GpuReduction]:
        """Rows in pieces that all stay in registers, where whole ones do not fit, or not well.

        Gradients of norms with sums of 16384 rows of 8192 took 222 us whole, and 326 in pieces, which spill.
        """
        kernel, lattice, count = cost.kernel, cost.lattice, cost.count
        is_whole = count > SPARE * power_of_two(count)
        if kernel.sums:
            is_whole = any(each.elements >= count for each in cls._summing(cost))
        if is_whole or lattice.is_reduced or lattice.inner or not lattice.is_along or cost.chooses_places:
            return
        for warps, each, resident in product(WARPS, PIECE, RESIDENT if kernel.sums else (0,)):
            elements = warps * cost.target.warp * each
            made = cls(1, elements, 1, warps, lanes=True, resident=resident, ahead=1)
            pieces = ceil_div(count, elements)
            if kernel.statistics and 1 < pieces <= PIECES and cost.fits_in_pieces(made):
                yield made

    @classmethod
    def _summing(cls, cost: Cost) -> Iterator[GpuReduction]:
        """Tiles of programs that go through all of them with sums of their own."""
        lattice, warp = cost.lattice, cost.target.warp
        count, cells = power_of_two(lattice.element_count), power_of_two(lattice.cell_count)
        for warps, each, resident, ahead in product(WARPS, HELD, RESIDENT, AHEAD):
            tile = warps * warp * each
            is_cut = tile < count
            if warps * warp > THREADS or (is_cut and (ahead or each > LOOPED)):
                continue
            for each_time in CUT_ROWS if is_cut else (tile // count if count < ALONE else 1,):
                rows = min(cells, MOST_ROWS, each_time)
                elements = min(count, tile // rows)
                made = cls(rows, elements, 1, warps, is_cut and lattice.is_along, resident, ahead)
                is_least = (rows, warps, each, resident, ahead) == (1, LOOPING, HELD[0], 1, 0)
                if is_least or cost.fits_beside(made):
                    yield made

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        """Every pass counts as a read, although a cache may serve it."""
        written = kernel.written_bytes
        again = kernel.src.nbytes * (Cost(kernel, target).passes(self) - 1)
        return Traffic(kernel.minimum_bytes - written + again, written)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return round(Cost(kernel, target).seconds(self), 7)

    def error_bound(self, kernel: Kernel) -> float:
        """One rounding for each addition that a term goes through, and the errors of the functions.

        Elements of a tile are added in pairs, tiles one by one, and programs in pairs.
        """
        blocks = ceil_div(kernel.reduced_count, self.elements * self.programs)
        added = blocks + ceil(log2(self.elements)) + ceil(log2(self.programs))
        formulas = [stage.expression for stage in (*kernel.prologue, *kernel.epilogue)]
        formulas += [part.term for each in kernel.statistics for part in each.parts]
        functions = dialect.relative_errors(formulas, kernel.dst.dtype)
        return 2 * (added + 2) * unit_roundoff(kernel) + functions

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return ReductionWriter(self, kernel, target, self.text).source(target)


def _run_claims(kernel: Kernel) -> Iterator[Claim]:
    """Runs that have statistics are as many elements as an axis of a tile may have, side by side."""
    if kernel.has_cells and not isinstance(kernel.centre, Summary):
        lattice = Lattice(kernel)
        each = lattice.inner_extent
        is_even = each == power_of_two(max(1, each)) and lattice.is_along
        told = f"blocks of {each}" if each else None
        yield claim(not each or is_even, Reason.RUNS, got=told, operator=lattice.inner_step)


def _ways(cost: Cost, warps: int, each: int) -> Iterator[bool]:
    """Whether lanes have states in a loop over blocks: the ways of which measurements have found one fastest.

    Lanes that choose between places take more registers than there are: 7 KB were spilled. So do means and
    variances of many elements, for rows of 9,896 in f32 12 times the best, and lanes side by side, 1.5 times.
    """
    if cost.lattice.inner or cost.chooses_places:
        yield bool(cost.lattice.inner)
    elif warps >= LOOPING and each <= LOOPED // (1 + (cost.parts > PARTS or cost.is_across)):
        yield True
        if cost.lattice.is_along and each == LOOPED:
            yield False

"""What a kernel with statistics over any axes takes: memory's time, instructions', and programs' in turn.

The constants are a fit to 1,091 measurements of 56 plans on an H200, of programs that keep sums to 104 of 8.
The candidate that they choose takes 1.04 of the best one's time, in the mean. The plans are norms, softmax,
cross-entropy, their gradients and dynamic quantization of rows of 200 to 131,072 elements.
"""

from __future__ import annotations

from math import ceil

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.resources import REGISTERS
from fuseplan.backends.triton.templates.reduction_picks import picks
from fuseplan.backends.triton.templates.reduction_sums import holds_sums, shared_columns, shares
from fuseplan.backends.triton.templates.reduction_tiles import VECTOR, ReductionKnobs
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import Scalar, calls, const, leaves_of

LAUNCH = 4.74e-6  # seconds of a launch besides what follows
WARP = 0.036e-6  # of a program, for each of its warps
ELEMENT, LANED = 0.0356e-6, 0.143  # for each element that a thread visits; of that, where lanes have states
BLOCK = 0.16e-6  # for each visit of a block after the first
LANE = 0.075e-6  # for each part of a lane's state that a vector of elements joins
WAIT = 0.278e-6  # for warps to join their numbers
MEETING = 1.4e-6  # for programs to merge their states
# Of a processor: for a visit of an element, each function of it, and each number of a warp that is joined.
VISIT, FUNCTION, NUMBER = 7.8e-12, 3.4e-12, 2.34e-9
# Of a program that goes through tiles: of each, for each element that a thread has of it, and for each number
# that a warp joins; and the share of the first tile's time that none hides.
TILE, NEXT, JOINS, FIRST = 0.342e-6, 0.0037e-6, 0.0042e-6, 0.174
# Memory's time over that of a copy; over this, of these programs, and where tiles have not all of a cell.
MOVED, STREAMED, CUT = 1.04, 1.046, 1.03
PIECES = 0.5e-6  # more, where registers hold a row in pieces
SERVED = 0.607  # of the second cache holds rows that are read again
BEYOND = 4.29  # times that share more, and it holds none of them
# Bytes of the first cache, and the share of a byte's time for a byte that each tile reads past it: layer
# norms of rows of 65,536 take 366 to 382 us on an H200, and 339 where two rows share a tile; RMS norms 297.
FIRST_CACHE, PASSED = 256 << 10, 0.15
PASSING = 1.4  # bytes that are read again lose their place to one that is read or written once
STEEP = 2.67  # of the norm of these times
# Registers of a thread for all else, for an element of src, and for one of an operand: of the cell; that all
# cells share, in formulas behind the statistics, and in these. Where a tile has whole cells, or pieces.
WHOLE, PIECE = (17, 1.0, 1.0, 0.25, 0.6), (26, 0.4, 0.5, 0.3, 0.3)
# Of a row in pieces: registers for all else; the share of a thread's registers that may be asked for. The
# share grows with 16-bit elements, which the compiler keeps in pairs: once beside operands of the cell, and
# once beside sums in so few warps.
BESIDE, ROOM, HALVED, FEW = 24, 0.95, 0.2, 8
PLACED = 2  # for an element's place, and for the one that is chosen
MOST = 255  # registers of a thread
PROGRAMS, THREADS = 32, 2048  # of a processor
PARTS, LOT = 4, 256  # of its registers; each part has warps of its own, which take such lots
ONE = const(1)
# Of programs that keep sums: gradients of norms of 16384 rows of 768 to 8192 elements in bf16, 10 % off.
TURN = (0.93e-6, 0.05e-6)  # seconds of a tile beside what follows; where later ones are read ahead
PASS = 0.6e-6  # of each block of a tile after the first
SUMMED = 0.032e-6  # for each element that a thread has
JOIN, JOINED = 0.016e-6, 0.0103e-6  # for warps to join a number; and for each warp and cell
ISSUE, ISSUED = 0.00286e-6, 0.0106e-6  # of a processor: for an element of each of a warp's threads; a number
KEPT, KEPT_BEYOND = 0.42, 0.1  # of the second cache, as `SERVED` and `BEYOND`
CACHED, MET = 0.4, 1.67  # of a byte's time, through the second cache; of what programs leave there
POWER = 3.66  # of the norm of these times
# For programs to meet at the end, and for each pair of programs, since a waiting program asks repeatedly: of
# 26213 rows of 192 elements, 54.6 us with 2,112 programs, and 21.5 with 792.
LAST, ARRIVAL = 3e-6, 4e-12
OF_CELL = (12, 20)  # registers for the numbers of a cell beside the sums; of one whose elements are held
OWN, SHARED = 8.65, 0.35  # for all else, and for an element of an operand that all cells share
OWN_BYTES, SHARED_BYTES = 3 << 10, 220 << 10  # shared memory of a program without tiles; of a processor


class Cost:
    """What the launches of a kernel take, by their knobs.

    Attributes:
        lattice: the kernel's loops.
        passed: bytes of operands that all cells share, where the first cache does not hold them.
    """

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.lattice = kernel, target, Lattice(kernel)
        self.count, self.cells = self.lattice.element_count, self.lattice.cell_count
        self.memory = model.rates(target).memory
        picked = picks(kernel, self.lattice)
        parts = [part for each in kernel.statistics for part in each.parts if part not in picked]
        terms = [part.term for part in parts]
        later = [stage.expression for stage in kernel.epilogue]
        before = [formula for stage in kernel.prologue for formula in stage.expressions]
        self.parts, self.numbers = len(parts), sum(term != ONE for term in terms)
        self.functions = sum(len(list(calls(each))) for each in (*terms, *later))
        chosen = (part for part in parts if part.moved is not None)
        self.chooses_places = any(INDEX in leaves_of(part.term) for part in chosen)
        in_terms, used = _leaves(terms), _leaves([*terms, *later])
        read = _leaves([*before, *terms])
        self.repeated, self.whole, self.own, self.before = kernel.src.itemsize, kernel.src.itemsize, 0, 0
        self.own_first = 0
        self.shared = [0, 0]  # operands of all cells in formulas behind the statistics, and in these
        for each in kernel.operands:
            place, size = self.lattice.tensors.index(each.key), dtype_of(each.dtype).itemsize
            if not any(axis.steps[place] for axis in self.lattice.elements):
                continue
            if any(axis.steps[place] for axis in self.lattice.cells):
                self.whole += size
                self.repeated += size * (each.key in read)
                self.own += each.key in used
                self.own_first += each.key in in_terms
                self.before += each.key not in used
            elif each.key in used:
                self.shared[each.key in in_terms] += 1
        self.columns = len(shared_columns(kernel, self.lattice))
        shared = self.columns * dtype_of(kernel.compute_dtype).itemsize * self.count
        self.passed = shared if shared > FIRST_CACHE else 0
        self.words = dtype_of(kernel.compute_dtype).itemsize / 4 * len(self.lattice.starts)

    def passes(self, knobs: ReductionKnobs) -> int:
        """How often src is read."""
        return 1 if knobs.holds(self.count) else self.kernel.passes - self.lattice.is_reduced

    def registers(self, each: float, *, is_whole: bool) -> float:
        """What a thread needs for so many elements of a tile, nearly."""
        beside, src, own, later, first = WHOLE if is_whole else PIECE
        # Pieces hold operands of the prologue too: a tile chosen without took 717 us, not 655.
        held = src + PLACED * self.chooses_places + own * (self.own if is_whole else self.own + self.before)
        held += later * self.shared[False] + first * self.shared[True]
        return beside + each * held * self.words

    def fits(self, threads: int, elements: int, *, is_whole: bool) -> bool:
        """Whether a thread has registers for its share of a tile."""
        return self.registers(elements / threads, is_whole=is_whole) <= min(MOST, REGISTERS // threads)

    def fits_beside(self, knobs: ReductionKnobs) -> bool:
        """Whether a processor holds programs that go through all tiles: registers, and tiles ahead."""
        threads = knobs.warps * self.target.warp
        each = knobs.cells * knobs.elements / threads
        is_held = knobs.elements >= self.count
        held = 1.0 + PLACED * self.chooses_places + self.own + SHARED * sum(self.shared)
        needed = OWN + each * held * self.words + OF_CELL[is_held] * min(knobs.cells, each)
        if is_held:
            needed += each * (len(self.kernel.sums) + self.columns * (1 - SHARED))
        ahead = max(0, knobs.ahead - 1) * knobs.cells * knobs.elements * self.whole * len(self.lattice.starts)
        room = min(MOST, REGISTERS // (threads * knobs.resident))
        fits_there = threads * knobs.resident <= THREADS and needed <= room
        return fits_there and (ahead + OWN_BYTES) * knobs.resident <= SHARED_BYTES

    def fits_in_pieces(self, knobs: ReductionKnobs) -> bool:
        """Whether registers hold the pieces of a row."""
        threads = knobs.warps * self.target.warp * max(1, knobs.resident)
        is_half, has_few = self.kernel.src.itemsize < 4, knobs.warps <= FEW
        room = ROOM + HALVED * is_half * (bool(self.own_first) + (bool(self.kernel.sums) and has_few))
        return threads <= THREADS and self.in_pieces(knobs) <= room * min(MOST, REGISTERS // threads)

    def in_pieces(self, knobs: ReductionKnobs) -> float:
        """The registers of a thread that holds its share of a row in pieces, nearly."""
        count = ceil_div(self.count, knobs.elements) * knobs.elements / (knobs.warps * self.target.warp)
        held = 1 + self.own_first + self.shared[True] + len(self.kernel.sums)
        return BESIDE + count * held * self.words

    def seconds(self, knobs: ReductionKnobs) -> float:
        """The estimate for one launch."""
        if self.kernel.sums:
            return self._of_sums(knobs)
        turns = ceil_div(self.count, knobs.elements * knobs.programs)
        groups, processors = ceil_div(self.cells, knobs.cells), self.target.processors
        each = knobs.cells * knobs.elements / (knobs.warps * self.target.warp)
        is_cut = knobs.ahead > 0 and turns > 1
        needed = self.in_pieces(knobs) if is_cut else self.registers(each, is_whole=turns == 1)
        places = knobs.resident or self._places(knobs.warps, needed)
        joined = self.numbers * (1 if knobs.lanes else turns)
        memory = self._memory(knobs, min(places * processors, groups) * knobs.cells)
        chain = self._chain(knobs, turns, each, joined)
        waits = chain * max(1.0, groups * knobs.programs / (places * processors))
        if knobs.resident:
            turn = TILE + NEXT * each * len(self.lattice.starts) + JOINS * joined * knobs.warps
            waits = ceil_div(groups, places * processors) * turn
            memory *= STREAMED
        elif turns > 1:
            memory *= CUT
        padded = self.cells * knobs.elements * knobs.programs * turns
        issued = padded * (VISIT * self.passes(knobs) + FUNCTION * self.functions)
        issued += groups * knobs.programs * knobs.warps * NUMBER * joined
        taken: float = sum(each**STEEP for each in (memory, waits, issued / processors)) ** (1 / STEEP)
        taken += PIECES * (turns > 1 and knobs.ahead > 0)
        return LAUNCH + taken + FIRST * chain * (knobs.resident > 0)

    def _places(self, warps: int, needed: float) -> int:
        """Programs of a processor at a time."""
        most = min(MOST, REGISTERS // (warps * self.target.warp))
        needed = min(most, needed) * self.target.warp
        held = REGISTERS // PARTS // (ceil(needed / LOT) * LOT) * PARTS
        return max(1, min(PROGRAMS, THREADS // (warps * self.target.warp), held // warps))

    def _memory(self, knobs: ReductionKnobs, cells: int) -> float:
        """Memory's time, with so many cells at a time, which the second cache may not hold."""
        passing = self.kernel.minimum_bytes / self.cells - self.repeated * self.count
        in_flight = cells * (self.repeated * self.count + PASSING * max(0.0, passing))
        missed = min(1.0, max(0.0, in_flight / (SERVED * self.target.l2_bytes) - 1) / BEYOND)
        again = (self.passes(knobs) - 1) * missed * self.repeated * self.count * self.cells
        tiles = 0 if knobs.resident else ceil_div(self.cells, knobs.cells)
        return MOVED * (self.kernel.minimum_bytes + again + PASSED * self.passed * tiles) / self.memory

    def _chain(self, knobs: ReductionKnobs, turns: int, each: float, joined: int) -> float:
        """A program from its start to its end, where a thread has so many elements of a block."""
        moved = each * len(self.lattice.starts) * turns * self.passes(knobs)
        lanes = LANE * self.parts * turns * each * self.kernel.src.itemsize / VECTOR
        return (
            WARP * knobs.warps
            + BLOCK * (turns * self.passes(knobs) - 1)
            + ELEMENT * moved * (LANED if knobs.lanes else 1)
            + WAIT * joined * (knobs.warps > 1)
            + MEETING * len(self.kernel.statistics) * (knobs.programs > 1)
            + lanes * knobs.lanes
        )

    def _of_sums(self, knobs: ReductionKnobs) -> float:
        """The time of programs that keep sums, and of these sums' way through the second cache.

        A program waits for loads, unless they are ahead, and for its warps; a processor issues for all.
        """
        kernel, programs = self.kernel, shares(self.kernel, self.target, knobs)
        blocks = ceil_div(self.count, knobs.elements)
        passes, is_kept = self.passes(knobs), holds_sums(kernel, knobs, self.target.warp)
        visited = blocks * (passes - is_kept) + is_kept  # the last pass is one block where sums are kept
        each = knobs.cells * knobs.elements / (knobs.warps * self.target.warp) * blocks * passes
        joined = self.numbers * (1 if knobs.lanes else blocks)
        tiles = ceil_div(self.cells, knobs.cells)
        turn = TURN[knobs.ahead > 1] + PASS * (visited - 1) + joined * JOIN * (knobs.warps > 1)
        turn += SUMMED * each + joined * JOINED * knobs.warps * knobs.cells
        issued = knobs.resident * knobs.warps * (ISSUE * each + ISSUED * joined * knobs.cells)
        column = len(kernel.sums) * self.count * dtype_of(kernel.compute_dtype).itemsize
        kept = 0.0 if is_kept else 2 * column * tiles
        repeated = self.repeated * self.count
        in_flight = programs * knobs.cells * repeated
        missed = min(1.0, max(0.0, in_flight / (KEPT * self.target.l2_bytes) - 1) / KEPT_BEYOND)
        again = (passes - 1) * repeated * self.cells
        cached = CACHED * (kept + (1 - missed) * again) + MET * 2 * programs * column
        memory = (kernel.minimum_bytes + missed * again + cached) / self.memory
        turns = ceil_div(tiles, programs)
        total: float = sum(each**POWER for each in (turns * turn, turns * issued, memory)) ** (1 / POWER)
        return model.LAUNCH_SECONDS + LAST + ARRIVAL * programs**2 + total


def _leaves(formulas: list[Scalar]) -> frozenset[str]:
    return frozenset[str]().union(*map(leaves_of, formulas))

"""What a kernel with statistics over any axes takes: memory's time, instructions', and programs' in turn.

The constants are a fit to 4,112 measurements of 423 plans on an H200, of programs that keep sums to 104 of 8.
Of 100 other plans, their choice takes 1.055 of the best one's time in the mean, of 80 at most 1.1. These are
norms, softmax, cross-entropy, gradients, quantization, rotary heads; of rows of 64 to 131,072 elements.
"""

from __future__ import annotations

from math import ceil, gcd

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.resources import REGISTERS, share
from fuseplan.backends.triton.templates.reduction_picks import picks
from fuseplan.backends.triton.templates.reduction_sums import holds_sums, shared_columns, shares
from fuseplan.backends.triton.templates.reduction_tiles import VECTOR, ReductionKnobs, neighbours
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.parts import part_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import Scalar, const, leaves_of

LAUNCH = 3.83e-6  # seconds of a launch besides what follows
DISPATCH = 0.53e-9  # for each program: 27344 rows of 64 took 8.3 us in 6,836 programs, and 5.8 in 855
# Of a program: for the loads of each block that it visits, or piece in registers; for operands that all cells
# share; the share of its bytes' time that none hides.
LATENCY, SHARED_LATENCY, UNHIDDEN = 0.103e-6, 1.25e-6, 0.15
STEP, MEETING = 2.29e-9, (1.6e-6, 4e-6)  # for a thread's element, an instruction; to meet, of a cell or more
WAIT, WARP = 0.76e-6, 0.0223e-6  # for warps to join a number; for each of them
# Of a program that goes through tiles: for each of them, for each instruction of each element that a thread
# has, and for each number that a warp joins; memory's time over that of other programs.
TILE, NEXT, JOINS, STREAMED = 0.3e-6, 0.28e-9, 0.042e-6, 1.1
# Of a processor: for an instruction of an element, an access to memory, and an element that lanes read alone.
# Two or four that lanes read together take no more: bf16[8866x28444] -> rms_norm took 360 us, now 279.
SLOT, ACCESS, SINGLE = 1.96e-12, 91e-12, 70e-12
# Instructions to merge a part of a lane's state with a vector's; for a mask; to store a whole number.
MERGED, MASK, WHOLE_NUMBER = (55, 250), 1.3, 9
SERVED, BEYOND = 1.17, 1.46  # of the second cache, for rows that are read again; more, and it holds none
HELD_THERE = 0.37  # of a byte's time, for one that it holds
# Bytes of the first cache, and the share of a byte's time for a byte that each tile reads past it: layer
# norms of rows of 65,536 take 366 to 382 us on an H200, and 339 where two rows share a tile; RMS norms 297.
FIRST_CACHE, PASSED = 256 << 10, 0.066
LANES = 32  # cells side by side in a tile, at least, where src's innermost axis is kept
PASSING = 1.4  # bytes that are read again lose their place to one that is read or written once
STEEP = (3.3, 1.86)  # of the norm of these times; where programs go through tiles
# Registers of a thread for all else, for an element of src, and for one of an operand: of the cell; that all
# cells share, in formulas behind the statistics, and in these. Where a tile has whole cells, or pieces.
WHOLE, PIECE = (17, 1.0, 1.0, 0.25, 0.6), (24, 0.5, 0.5, 0.3, 0.3)
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
# Of columns, such as sums over the outermost axis: a fit to 430 measurements of 8 plans on an H200; fitted to
# 7 of them, the choice for the other takes 1.10 of the best one's time. Memory's time over a copy's, and by
# the bytes of a tile that lie side by side; more where processors have unequal numbers of programs. Of 16
# bytes that a thread loads, of a warp, to meet, as `UNHIDDEN`; the power of the norm.
STREAM, SEGMENT, UNEQUAL = 1.18, 10.2, 0.112
LOADED, WARPED, ALL_MEET, LATE, BLEND = 0.144e-6, 0.095e-6, 4.94e-6, 0.105, 2.3
MEETING_THREADS, MEETING_PROGRAMS = 1536, 16  # of a processor of any kind, whose programs wait for others


class Cost:
    """What the launches of a kernel take, by their knobs.

    Attributes:
        lattice: the kernel's loops.
        passed: bytes of operands that all cells share, where the first cache does not hold them.
        is_apart, is_across: of uneven rows, a lane reads elements one by one, or lanes lie side by side.
        has_columns: cells lie side by side, and dst has one element for each.
    """

    def __init__(self, kernel: Kernel, target: Target) -> None:
        self.kernel, self.target, self.lattice = kernel, target, Lattice(kernel)
        self.count, self.cells = self.lattice.element_count, self.lattice.cell_count
        self.memory = model.rates(target).memory
        is_reduced = self.lattice.is_reduced and not (self.lattice.is_along or self.lattice.inner)
        self.has_columns = is_reduced and bool(kernel.statistics) and self.lattice.run.extent >= LANES
        picked = picks(kernel, self.lattice)
        parts = [part for each in kernel.statistics for part in each.parts if part not in picked]
        terms = [part.term for part in parts]
        later = [stage.expression for stage in kernel.epilogue]
        before = [formula for stage in kernel.prologue for formula in stage.expressions]
        self.parts, self.numbers = len(parts), sum(term != ONE for term in terms)
        chosen = (part for part in parts if part.moved is not None)
        self.chooses_places = any(INDEX in leaves_of(part.term) for part in chosen)
        in_terms, used = _leaves(terms), _leaves([*terms, *later])
        read = _leaves([*before, *terms])
        self.repeated, self.whole, self.own, self.before = kernel.src.itemsize, kernel.src.itemsize, 0, 0
        self.own_first = 0
        self.elements = {"x", INDEX}  # leaves of which each element has its own
        self.shared = [0, 0]  # operands of all cells in formulas behind the statistics, and in these
        for each in kernel.operands:
            place, size = self.lattice.tensors.index(each.key), dtype_of(each.dtype).itemsize
            if not any(axis.steps[place] for axis in self.lattice.elements):
                continue
            self.elements.add(each.key)
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
        access = gcd(self.count * kernel.src.itemsize, VECTOR) if self.lattice.is_along else VECTOR  # bytes
        self.vector, is_uneven = max(1, access // kernel.src.itemsize), access < VECTOR
        self.is_apart, self.is_across = is_uneven and any(self.shared), is_uneven and not any(self.shared)
        joined = VECTOR // kernel.src.itemsize
        self.neighbours = neighbours(joined, self.count) if self.is_across else joined
        self.is_exact = not dtype_of(kernel.dst.dtype).is_narrow
        # Instructions of an element in each pass, with loads and what widens them; and in one pass.
        self.again = self._instructions(before) + (kernel.src.itemsize < 4) + 0.75 * (len(self.elements) - 2)
        of_dst = self._instructions(later) + (1 if dtype_of(kernel.dst.dtype).is_float else WHOLE_NUMBER)
        self.once = self._instructions(terms) + len(terms) + of_dst * (not self.lattice.is_reduced)

    def passes(self, knobs: ReductionKnobs) -> int:
        """How often src is read."""
        return 1 if knobs.holds(self.count) else self.kernel.passes - self.lattice.is_reduced

    def together(self, knobs: ReductionKnobs) -> int:
        """Programs that a processor has to run at a time: those that meet, or that go through tiles."""
        meets = knobs.programs > 1 and bool(self.kernel.statistics)
        programs = ceil_div(self.cells, knobs.cells) * knobs.programs * meets
        return knobs.resident or ceil_div(programs, self.target.processors)

    def room(self, knobs: ReductionKnobs) -> tuple[tuple[str, int], ...]:
        """The option that gives them registers; a program alone has as many as it needs."""
        each = self.together(knobs)
        return tuple(share(self.target, knobs.warps, each)) if each > (not knobs.resident) else ()

    def fits_columns(self, knobs: ReductionKnobs) -> bool:
        """Whether threads have registers for their blocks, where programs meet in all that run at a time."""
        threads = knobs.warps * self.target.warp
        each = max(1, self.together(knobs))
        has_room = threads * each <= MEETING_THREADS and each <= MEETING_PROGRAMS
        return has_room and self.fits(threads * each, each * knobs.cells * knobs.elements, is_whole=False)

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

    def _instructions(self, formulas: list[Scalar]) -> int:
        """Those of each element; what the elements of a cell share is not counted."""
        met: set[Scalar] = set()

        def of(node: Scalar) -> int:
            own = any(part_of(leaf)[0] in self.elements for leaf in leaves_of(node))
            if node.fn == "leaf" or node in met or not own:
                return 0
            met.add(node)
            return model.HEAVY.get(node.fn, (1, 1))[self.is_exact] + sum(map(of, node.args))

        return sum(map(of, formulas))

    def seconds(self, knobs: ReductionKnobs) -> float:
        """The estimate for one launch."""
        if self.kernel.sums:
            return self._of_sums(knobs)
        if self.has_columns:
            return self._of_columns(knobs)
        turns = ceil_div(self.count, knobs.elements * knobs.programs)
        groups, processors = ceil_div(self.cells, knobs.cells), self.target.processors
        programs, passes = groups * knobs.programs, self.passes(knobs)
        each = self._each(knobs)
        is_cut = knobs.ahead > 0 and turns > 1
        needed = self.in_pieces(knobs) if is_cut else self.registers(each, is_whole=turns == 1)
        places = (knobs.resident or self._places(knobs.warps, needed)) * processors
        joined = self.numbers * (1 if knobs.lanes and not self.lattice.inner else turns)
        work = self.again * passes + self.once + MASK * self.parts * (self.count % knobs.elements > 0)
        if knobs.lanes and not is_cut:
            work += (self.parts - 1) * MERGED[self.is_exact] / self.neighbours
        visited = each * turns * len(self.lattice.starts) * work
        memory = self._memory(knobs, min(places, groups) * knobs.cells)
        chain = LATENCY * turns * passes + STEP * visited
        chain += joined * (WAIT + WARP * knobs.warps) * (knobs.warps > 1)
        chain += MEETING[knobs.cells > 1] * len(self.kernel.statistics) * (knobs.programs > 1)
        chain += UNHIDDEN * self.kernel.minimum_bytes / self.memory * processors / programs
        waves = ceil_div(programs, places)
        if knobs.resident:
            waits = chain + waves * (TILE + NEXT * visited + JOINS * joined * knobs.warps)
            memory *= STREAMED
        else:
            late = (self.shared[False] > 0) + (self.shared[True] > 0 and not self.own + self.before)
            waits = waves * (chain + SHARED_LATENCY * late)
        accesses = self.cells * self.count * passes * self.whole / self.kernel.src.itemsize / self.vector
        issued = accesses * (ACCESS + SINGLE * (knobs.lanes and self.is_apart and self.vector == 1))
        issued += SLOT * visited * programs * knobs.warps * self.target.warp
        power = STEEP[knobs.resident > 0]
        times = (memory, waits, issued / processors, DISPATCH * programs)
        return LAUNCH + float(sum(each**power for each in times) ** (1 / power))

    def _each(self, knobs: ReductionKnobs) -> float:
        """A thread's elements of a tile; the code for whole rows leaves out elements that no row has.

        Cross-entropy of rows of 2,150 elements in tiles of 4,096: 86 us on an H200, 205 by all of them.
        """
        threads = knobs.warps * self.target.warp
        each = knobs.cells * knobs.elements / threads
        if not knobs.holds(self.count):
            return each
        step = max(1, threads // knobs.cells) * self.neighbours
        return each * min(1.0, ceil_div(self.count, step) * step / knobs.elements)

    def _of_columns(self, knobs: ReductionKnobs) -> float:
        """The time of programs that go down columns: they wait for each block of loads."""
        turns, passes = ceil_div(self.count, knobs.elements * knobs.programs), self.passes(knobs)
        groups, processors = ceil_div(self.cells, knobs.cells), self.target.processors
        programs, threads = groups * knobs.programs, knobs.warps * self.target.warp
        each, size = knobs.cells * knobs.elements / threads, self.kernel.src.itemsize
        places = self._places(knobs.warps, self.registers(each, is_whole=turns == 1)) * processors
        work = self.again * passes + self.once
        if knobs.lanes:
            work += (self.parts - 1) * MERGED[self.is_exact] / self.neighbours
        visited = each * turns * work
        chain = turns * passes * LOADED * max(1.0, each * size / VECTOR) + WARPED * knobs.warps
        chain += STEP * visited + ALL_MEET * (knobs.programs > 1)
        chain += LATE * self.kernel.minimum_bytes / self.memory * processors / programs
        unequal = min(4.0, ceil_div(programs, processors) * processors / programs) - 1
        memory = self._memory(knobs, 1) * (STREAM + SEGMENT / (knobs.cells * size)) * (1 + UNEQUAL * unequal)
        issued = SLOT * visited * programs * threads / processors
        times = (memory, ceil_div(programs, places) * chain, issued)
        return LAUNCH + float(sum(each**BLEND for each in times) ** (1 / BLEND))

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
        again = (self.passes(knobs) - 1) * (missed + HELD_THERE * (1 - missed))
        again *= self.repeated * self.count * self.cells
        tiles = 0 if knobs.resident else ceil_div(self.cells, knobs.cells)
        return (self.kernel.minimum_bytes + again + PASSED * self.passed * tiles) / self.memory

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

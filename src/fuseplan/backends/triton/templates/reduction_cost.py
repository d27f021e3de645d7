"""What a kernel with statistics over any axes takes: memory's time, and that of its programs in turn.

The constants are a fit to 2,300 measurements of 107 plans on an H100: norms, softmax, cross-entropy, their
gradients and dynamic quantization of rows of 128 to 131,072 elements, 26 of the plans drawn at random.
"""

from __future__ import annotations

from math import ceil, hypot, sqrt

from fuseplan.backends.lattice import Lattice
from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.resources import REGISTERS
from fuseplan.backends.triton.templates.reduction_sums import programs_of, shared_columns
from fuseplan.backends.triton.templates.reduction_tiles import VECTOR, ReductionKnobs
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import const, leaves_of

BEGIN, BEGINNING = 1.4e-6, 0.135e-6  # seconds of a program besides what follows, and more for each warp
BLOCK = 0.07e-6  # for each block after the first
ELEMENT = (0.032e-6, 0.034e-6)  # for each element that a thread has of a block; where lanes have states
LANE = 0.25e-6  # for each part of a lane's state that a vector of elements joins
WAIT = 0.8e-6  # for warps to join their numbers
MEETING = 3e-6  # for programs to merge their states
SERVED = 0.42  # of the second cache holds rows that are read again
BEYOND = 0.1  # of that share more, and it holds none of them
PASSING = 0.29  # of a byte that is read or written once takes the place of those
OWN = 8.65  # registers of a thread for all else
READ = 0.35  # registers for an element of an operand that all cells share
PLACED = 2  # registers for an element's place, and for the one that is chosen
MOST = 255  # registers of a thread
PROGRAMS, THREADS = 32, 2048  # of a processor
ONE = const(1)
GRANULE = 8  # registers are given out in such lots
# Of programs that go through tiles and keep sums: a fit to 104 measurements of 8 plans on an H200, gradients
# of norms of 16384 rows of 768 to 8192 elements in bf16, 10 % off.
TURN = (0.93e-6, 0.05e-6)  # seconds of a tile beside what follows; where later ones are read ahead
PASS = 0.6e-6  # of each block of a tile after the first
JOIN, JOINED = 0.016e-6, 0.0103e-6  # for warps to join a number; and for each warp and cell
ISSUE, ISSUED = 0.00286e-6, 0.0106e-6  # of a processor: for an element of each of a warp's threads; a number
CACHED, MET = 0.4, 1.67  # of a byte's time, through the second cache; of what programs leave there
POWER = 3.66  # of the norm of these times
APART = 1.3  # of the time where statistics of runs are in another pass than those of rows
OF_CELL = (12, 20)  # registers for the numbers of a cell beside the sums; of one whose elements are held
OWN_BYTES, SHARED_BYTES = 3 << 10, 220 << 10  # shared memory of a program without tiles; of a processor


def passes(kernel: Kernel, lattice: Lattice, knobs: ReductionKnobs) -> int:
    """How often src is read."""
    is_held = knobs.elements * knobs.programs >= lattice.element_count
    return 1 if is_held else kernel.passes - lattice.is_reduced


def chooses_places(kernel: Kernel) -> bool:
    """Whether a statistic chooses between elements' places, as that of the largest does."""
    parts = (part for statistic in kernel.statistics for part in statistic.parts)
    return any(part.moved is not None and INDEX in leaves_of(part.term) for part in parts)


def fits(kernel: Kernel, lattice: Lattice, threads: int, elements: int) -> bool:
    """Whether a thread has registers for its share of a tile."""
    return registers(kernel, lattice, elements / threads) <= min(MOST, REGISTERS // threads)


def fits_beside(kernel: Kernel, target: Target, knobs: ReductionKnobs) -> bool:
    """Whether a processor holds the programs that go through all tiles: their registers and tiles ahead."""
    threads, lattice = knobs.warps * target.warp, Lattice(kernel)
    each = knobs.cells * knobs.elements / threads
    shared = len(shared_columns(kernel, lattice))
    is_held = knobs.elements >= lattice.element_count
    beside = (len(kernel.sums) + shared * (1 - READ)) * each if is_held else 0
    needed = registers(kernel, lattice, each) + beside + OF_CELL[is_held] * min(knobs.cells, each)
    ahead = max(0, knobs.ahead - 1) * knobs.cells * knobs.elements * _repeated_bytes(kernel, lattice)
    room = min(MOST, REGISTERS // (threads * knobs.resident))
    fits_there = threads * knobs.resident <= THREADS and needed <= room
    return fits_there and (ahead + OWN_BYTES) * knobs.resident <= SHARED_BYTES


def _of_sums(kernel: Kernel, target: Target, knobs: ReductionKnobs) -> float:
    """The time of programs that go through all tiles, and of their sums' way through the second cache.

    A program waits for loads, unless they are ahead, and for its warps; a processor issues for all of them.
    """
    lattice, programs = Lattice(kernel), programs_of(kernel, target, knobs)
    blocks = ceil_div(lattice.element_count, knobs.elements)
    visited = blocks * passes(kernel, lattice, knobs)
    each = knobs.cells * knobs.elements / (knobs.warps * target.warp) * visited
    parts = sum(part.term != ONE for statistic in kernel.statistics for part in statistic.parts)
    joined = parts * (1 if knobs.lanes else blocks)
    turns = ceil_div(ceil_div(lattice.cell_count, knobs.cells), programs)
    turn = TURN[knobs.ahead > 0] + PASS * (visited - 1) + joined * JOIN * (knobs.warps > 1)
    turn += ELEMENT[0] * each + joined * JOINED * knobs.warps * knobs.cells
    issued = knobs.resident * knobs.warps * (ISSUE * each + ISSUED * joined * knobs.cells)
    column = len(kernel.sums) * lattice.element_count * dtype_of(kernel.compute_dtype).itemsize
    kept = 0.0 if blocks == 1 else 2 * column * ceil_div(lattice.cell_count, knobs.cells)
    repeated = _repeated_bytes(kernel, lattice) * lattice.element_count
    in_flight = programs * knobs.cells * repeated
    missed = min(1.0, max(0.0, in_flight / (SERVED * target.l2_bytes) - 1) / BEYOND)
    again = (passes(kernel, lattice, knobs) - 1) * repeated * lattice.cell_count
    cached = CACHED * (kept + (1 - missed) * again) + MET * 2 * programs * column
    memory = (kernel.minimum_bytes + missed * again + cached) / model.rates(target).memory
    total: float = sum(each**POWER for each in (turns * turn, turns * issued, memory)) ** (1 / POWER)
    return model.LAUNCH_SECONDS + MEETING + total


def registers(kernel: Kernel, lattice: Lattice, each: float) -> float:
    """What a thread needs for so many elements, nearly: src and operands that statistics or dst read too."""
    later = (stage.expression for stage in kernel.epilogue)
    terms = (part.term for statistic in kernel.statistics for part in statistic.parts)
    used = frozenset[str]().union(*map(leaves_of, (*later, *terms)))
    held = 1.0 + PLACED * chooses_places(kernel)
    for operand in kernel.operands:
        place = lattice.tensors.index(operand.key)
        if operand.key in used and any(axis.steps[place] for axis in lattice.elements):
            held += 1 if any(axis.steps[place] for axis in lattice.cells) else READ
    words = dtype_of(kernel.compute_dtype).itemsize / 4
    return OWN + each * held * words * len(lattice.starts)


def seconds(kernel: Kernel, target: Target, knobs: ReductionKnobs) -> float:
    """The estimate for one launch."""
    if kernel.sums:
        return _of_sums(kernel, target, knobs)
    lattice, threads = Lattice(kernel), knobs.warps * target.warp
    groups = ceil_div(lattice.cell_count, knobs.cells)
    each = knobs.cells * knobs.elements / threads
    needed = ceil(registers(kernel, lattice, each) / GRANULE) * GRANULE
    places = target.processors * max(1, min(PROGRAMS, THREADS // threads, REGISTERS // (needed * threads)))
    elements = lattice.cell_count * lattice.element_count
    repeated = _repeated_bytes(kernel, lattice)
    passing = max(0.0, kernel.minimum_bytes / elements - repeated)
    share = min(places, groups) * knobs.cells / lattice.cell_count
    in_flight = share * elements * (repeated + PASSING * passing)
    missed = min(1.0, max(0.0, in_flight / (SERVED * target.l2_bytes) - 1) / BEYOND)
    again = (passes(kernel, lattice, knobs) - 1) * missed
    memory = (kernel.minimum_bytes + elements * repeated * again) / model.rates(target).memory
    waves = max(1.0, groups * knobs.programs / places)
    chain = _chain(kernel, lattice, knobs, each)
    if lattice.inner and knobs.elements < lattice.element_count:
        chain, memory = chain * APART, memory * APART
    return model.LAUNCH_SECONDS + sqrt(hypot(memory**2, (waves * chain) ** 2)) + chain / 2


def _repeated_bytes(kernel: Kernel, lattice: Lattice) -> int:
    """What every pass reads for an element: src, and the operands that it needs before the statistics."""
    terms = (part.term for statistic in kernel.statistics for part in statistic.parts)
    before = (formula for stage in kernel.prologue for formula in stage.expressions)
    used = frozenset[str]().union(*map(leaves_of, (*before, *terms)))
    places = {each: lattice.tensors.index(each.key) for each in kernel.operands if each.key in used}
    return kernel.src.itemsize + sum(
        dtype_of(each.dtype).itemsize
        for each, place in places.items()
        if all(any(axis.steps[place] for axis in axes) for axes in (lattice.cells, lattice.elements))
    )


def _chain(kernel: Kernel, lattice: Lattice, knobs: ReductionKnobs, each: float) -> float:
    """A program from its start to its end, where a thread has so many elements of a block."""
    turns = ceil_div(lattice.element_count, knobs.elements * knobs.programs)
    visited = turns * passes(kernel, lattice, knobs)
    parts = sum(len(statistic.parts) for statistic in kernel.statistics)
    waits = parts * (1 if knobs.lanes else turns) * (knobs.warps > 1)
    moved = each * len(lattice.starts) * visited
    lanes = LANE * parts * turns * each * kernel.src.itemsize / VECTOR
    meeting = MEETING * len(kernel.statistics) * (knobs.programs > 1)
    return (
        BEGIN
        + BEGINNING * knobs.warps
        + BLOCK * (visited - 1)
        + ELEMENT[knobs.lanes] * moved
        + waits * WAIT
        + lanes * knobs.lanes
        + meeting
    )

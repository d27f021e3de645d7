"""What a kernel with reductions takes: passes over memory and the second cache, and meetings.

The constants are a fit to 950 measurements on an H100: batch norm and its backward pass, eight shapes, f16
channels last and f32 channels first. Its picks took 1.03 times the fastest measured, in geometric mean.
"""

from __future__ import annotations

from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.normalization_tiles import Cut, Knobs
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.language.dtypes import dtype_of

BEGIN = 6.4e-6  # seconds that a launch takes besides, from cold caches
ALONE = 0.6e-6  # to reduce a tile in one program
MEETING = 2.6e-6  # to reduce it in several, and to meet
PASSED = 2.4e-11  # more for each byte that one program reads of what the others found
TURN = 1.5e-6  # for each tile of a group after the first, where tiles are kept: nothing is read before
TURNING = 0.8  # of the bandwidth is left then
SERVED = 0.6  # of the second cache: what a pass still finds there of the pass before
FASTER = 1.24  # how much faster than memory it is
IN_FLIGHT = 24e3  # bytes that a processor has to have under way for all of the bandwidth
SINGLY = 0.82  # of the bandwidth, where elements are moved one by one
KEEPING_SINGLY = 0.87  # of that, where they are kept
WHOLE = 128  # bytes of a row that are moved as one


def read_per_pass(kernel: Kernel) -> list[int]:
    """Bytes of the tensors per element that each pass reads; the last is the one that writes dst."""
    return [sum(read.values()) for read in kernel.read_in_passes]


def kept_bytes(kernel: Kernel) -> int:
    """Bytes that programs which keep their tiles hold."""
    return kernel.src.nbytes + sum(op.nbytes for op in kernel.operands if not op.packed)


def passed_bytes(kernel: Kernel, knobs: Knobs) -> int:
    """Bytes that the programs of all groups pass on, of all tiles."""
    if knobs.programs == 1:
        return 0
    cut, size = Cut(kernel, knobs), dtype_of(kernel.compute_dtype).array.itemsize
    numbers = sum(len(reduction.names) for reduction in kernel.statistics)
    return numbers * cut.tiles * knobs.programs * max(1, cut.numbers) * size


def seconds(kernel: Kernel, target: Target, knobs: Knobs) -> float:
    """The estimate for one launch."""
    cut, rate = Cut(kernel, knobs), model.rates(target).memory
    rounds = ceil_div(cut.tiles, knobs.groups)
    memory, cache = _moved(kernel, target, knobs, cut)
    speed = rate * _reached(kernel, target, knobs, cut) * _used(target, knobs, cut, rounds) ** 0.6
    turns = ALONE
    if knobs.programs > 1:
        passed = passed_bytes(kernel, knobs) / cut.tiles / len(kernel.statistics)
        again = cut.is_kept and rounds > 1
        speed *= TURNING if again else 1.0
        # Other programs of a processor work while one waits; before the first tile all of them wait.
        hidden = 1 + (rounds - 1) / _programs(target, knobs)
        turns = hidden * (MEETING + passed * PASSED + (TURN if again else 0.0))
    turns *= len(kernel.statistics)
    estimate: float = BEGIN + (memory + cache / FASTER) / speed + turns
    return estimate


def _moved(kernel: Kernel, target: Target, knobs: Knobs, cut: Cut) -> tuple[float, float]:
    """Bytes from and to memory, and bytes that the second cache serves."""
    if cut.is_kept:
        return kept_bytes(kernel) + kernel.dst.nbytes, 0.0
    first, *later = read_per_pass(kernel)
    places = target.processors * _programs(target, knobs)
    at_once = first * min(1.0, places / (cut.tiles * knobs.programs))
    missed = max(0.0, 1.0 - SERVED * (target.l3_bytes or target.l2_bytes) / at_once)
    return first + sum(later) * missed + kernel.dst.nbytes, sum(later) * (1.0 - missed)


def _programs(target: Target, knobs: Knobs) -> int:
    """Programs of a processor at a time."""
    most = knobs.resident if knobs.programs > 1 else max(4, knobs.resident)
    return max(1, min(most, ceil_div(knobs.programs * knobs.groups, target.processors)))


def _reached(kernel: Kernel, target: Target, knobs: Knobs, cut: Cut) -> float:
    """The share of the bandwidth that as many loads under way can reach, in rows that are so long."""
    tensors = 1 + sum(not op.packed for op in kernel.operands)
    tiles = cut.steps if cut.is_kept else knobs.unrolled
    under_way = 16 * tiles * tensors * knobs.warps * target.warp * _programs(target, knobs)
    reached: float = min(1.0, under_way / IN_FLIGHT) ** 0.28
    if not cut.is_planes:
        reached *= (cut.width / knobs.columns) ** 0.81
    if not cut.is_planes and cut.segment == 1:
        reached *= min(1.0, knobs.columns * kernel.dst.itemsize / WHOLE) ** 0.36
    if not cut.is_aligned:
        reached *= SINGLY * (KEEPING_SINGLY if cut.is_kept and knobs.programs > 1 else 1.0)
    return reached


def _used(target: Target, knobs: Knobs, cut: Cut, rounds: int) -> float:
    """The share of the processors' time in which they have something to do."""
    programs, places = knobs.programs * knobs.groups, target.processors * _programs(target, knobs)
    even = cut.tiles / (rounds * knobs.groups) * cut.blocks / (cut.steps * knobs.programs)
    even *= min(1.0, cut.extent / cut.block)  # rows of 64 in a tile for 2048 leave most threads idle
    return max(0.1, even * model.fill(programs, places))

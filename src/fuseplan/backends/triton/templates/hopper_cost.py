"""How long a contraction takes on Hopper: what a launch of a schedule is estimated to be."""

from __future__ import annotations

from math import prod

from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.templates.hopper_schedule import Schedule
from fuseplan.backends.triton.templates.hopper_tiles import HALF
from fuseplan.backends.triton.templates.product_tiles import SECTOR_BYTES
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target

# One processor of an H200. The numbers were fitted to 2,000 times of 114 products and convolutions, most of
# them random, with those of `product_cost`: choices take 1.03 of the best time, of 46 others 1.06.
FLOPS_A_SECOND = {HALF: 6.3e12, 4: 2.6e12}  # by the bytes of an element
L2_BYTES_A_SECOND = 102e9
LATENCY = 0.8e-6  # from a copy's start until its bytes come, with all others under way
START = 2.11e-6  # of a launch: from its first copies to its first products, and its last stores
STEPS_A_SECOND = 2.25e9  # of a warp: what comes after the sum, an instruction at a time
TILE_SECONDS = 0.6e-6  # between the sums of one group: waits for barriers and for the copy to dst
SHARED_READS = 34.2  # of 64 x 64 products: those of 128 columns are as fast as shared memory allows
TALL = 1.05  # products of 128 rows of one group, over those of 64: 1.07 and 1.10 in tiles of 256 x 128
# Seconds of the loads that a thread has under way, with channels last, and first: four times as many then.
LOADED_LAST, LOADED_FIRST = 0.9e-6, 1.6e-6
# Of f32 with channels last: seconds of a stage, and of an element that a thread loads, rounds and stores.
ROUNDED, ROUNDED_ELEMENT = 0.4e-6, 0.0235e-6
SCATTERED = 20  # instructions for an element that registers store along features
OF_FEATURES = 24  # for what one operand says of a feature, which threads have few of if features are rows
COPIED = 3.2  # for each byte of the copy of src: as long as so many take through memory
PADDED = 3.0e-6  # programs wait for each other, behind their copies of src or before they merge states
BROKEN = 1.68  # copies of rows that begin inside of sectors, over copies of whole sectors
HIDDEN = 0.337  # of the shorter of arithmetic and memory shows beside the longer
MEETING = 4.32e-6  # of spread tiles: waits for the sums of other programs
SUM_BYTES_A_SECOND = 33.7e9  # of these sums, written and read
APART = 1.22  # copies of programs that are at other channels each, over copies of the same ones at once
# Of rows with statistics, 7 plans on an H200: tiles of fewer features, and sums that leave few registers,
# over others.
NARROW_SUMS, WIDE_SUMS, CROWDED_SUMS = 1.08, 192, 1.05
STAYING = 16  # weights of up to this part of the L2 are as fast for later tiles of rows as for the first


def seconds(schedule: Schedule, target: Target, inside: float = 0.0) -> float:
    """A launch, and the longer of what the processors do with their tiles and of copies through memory.

    `inside` are the seconds of the former, which do not depend on bands, where these are known.
    """
    inside = inside or inside_of(schedule, target)
    memory = _moved(schedule, target) / model.rates(target).memory
    padding = COPIED * schedule.padded_bytes / model.rates(target).memory
    padding += PADDED * (schedule.geometry.padded + schedule.geometry.is_summed)
    return max(inside, memory) + HIDDEN * min(inside, memory) + padding + START + model.LAUNCH_SECONDS


def inside_of(schedule: Schedule, target: Target) -> float:
    """What the processors do with their tiles."""
    knobs = schedule.knobs
    places = target.processors * knobs.programs
    tiles = ceil_div(schedule.tiles, places) * knobs.programs
    summing, finishing = _summing(schedule), _finishing(schedule)
    # groups that take turns, or programs side by side, finish one tile while they sum another
    beside = knobs.groups if schedule.takes_turns else knobs.programs
    inside = max(tiles * summing, ceil_div(tiles, beside) * (summing + finishing)) + finishing
    if knobs.spread:
        meeting = MEETING + 2 * 4 * prod(knobs.box) * knobs.columns / SUM_BYTES_A_SECOND
        turns = schedule.tiles / places
        sums = turns * summing + min(turns, 1 + turns % 1) * (_summing(schedule, APART) - summing)
        inside = sums + tiles * finishing + meeting
    return inside


def _moved(schedule: Schedule, target: Target) -> float:
    """Bytes through memory: all once, a weight that the L2 does not keep again for later tiles of rows."""
    kernel, knobs = schedule.kernel, schedule.knobs
    broken = schedule.geometry.broken(schedule.part) - 1 if schedule.geometry.scatters else 0.0
    once = kernel.minimum_bytes + broken * kernel.dst.nbytes + 2 * schedule.state_bytes
    if not is_large(kernel, target):
        return once
    together = max(knobs.band, target.processors * knobs.programs / schedule.across)
    return once + kernel.weight.nbytes * max(0.0, prod(schedule.counts) / together - 1)


def is_large(kernel: Kernel, target: Target) -> bool:
    """Whether the order of tiles matters, because the L2 does not keep the weight for later ones."""
    return kernel.weight.nbytes * STAYING >= target.l2_bytes


def _summing(schedule: Schedule, apart: float = 1.0) -> float:
    """Seconds for the sums of a tile: products, or copies through the L2 that take `apart` times as long."""
    knobs = schedule.knobs
    # of a product, 64 rows and all columns are read from shared memory anew
    reads = (max(width, SHARED_READS * (64 + width) / 64) for _, _, width in schedule.sums)
    reading = sum(reads) / schedule.sum_shape[1]
    depth = schedule.blocks * schedule.lines * knobs.depth
    products = 2 * prod(knobs.box) * knobs.columns * depth * reading / FLOPS_A_SECOND[schedule.itemsize]
    products *= TALL if schedule.sum_shape[0] > 64 else 1.0
    if schedule.geometry.is_summed:
        products *= NARROW_SUMS if knobs.columns < WIDE_SUMS else CROWDED_SUMS if schedule.is_crowded else 1.0
    if schedule.geometry.gathers:
        return max(products, schedule.blocks * _loading(schedule))
    # a stage is free when the next one's copy has come: with 2 stages, products took 1.5 to 1.8 of the time
    copying = apart * _copied_bytes(schedule) / L2_BYTES_A_SECOND
    waiting = (LATENCY + schedule.stage_bytes / L2_BYTES_A_SECOND) / (knobs.programs * (knobs.stages - 1))
    return max(products, schedule.blocks * max(waiting, copying))


def _copied_bytes(schedule: Schedule) -> float:
    """Bytes of a stage, more for rows that begin inside of sectors; taps share their sectors."""
    geometry, size = schedule.geometry, schedule.itemsize
    steps = [axis.src_stride for axis in geometry.axes if axis.positions > 1]
    more = BROKEN - 1 if geometry.taps == 1 else 0.0
    src = more * schedule.src_bytes * any(step * size % SECTOR_BYTES for step in steps)
    broken = geometry.weight_row * size % SECTOR_BYTES > 0
    weight = more * (schedule.stage_bytes - schedule.src_bytes) * broken
    return schedule.stage_bytes + src + weight


def _loading(schedule: Schedule) -> float:
    """Seconds from a stage to the next where warps load src: as much at a time as registers hold."""
    elements = schedule.src_bytes / schedule.itemsize / 128
    step = schedule.kernel.src.element_strides[1]
    batches = max(1.0, elements / schedule.held_loads)
    weights = (schedule.stage_bytes - schedule.src_bytes) / L2_BYTES_A_SECOND
    if step == 1 and schedule.itemsize == 4:
        return max(ROUNDED + ROUNDED_ELEMENT * elements, weights)
    return max(batches * (LOADED_LAST if step == 1 else LOADED_FIRST), weights)


def _finishing(schedule: Schedule) -> float:
    """Seconds for what a group does after the sum."""
    steps = 4 + 3 * schedule.geometry.functions + SCATTERED * schedule.scatters_features
    elements = prod(schedule.own) * schedule.own_columns
    features = schedule.own_columns // (32 if schedule.knobs.swapped else 4)
    said = sum(operand.is_channel and operand.role != "weight" for operand in schedule.kernel.operands)
    taken = elements / 128 * steps + OF_FEATURES * features * said
    return taken / STEPS_A_SECOND + TILE_SECONDS

"""Contractions on Hopper: a warp that copies, groups of warps that multiply, epilogues beside products.

Behind the template: which choices fit a processor, and what each costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.parts import gates_beside
from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import product_cost
from fuseplan.backends.triton.templates.hopper_schedule import Knobs, Schedule
from fuseplan.backends.triton.templates.hopper_spread import Spread
from fuseplan.backends.triton.templates.hopper_tiles import (
    ALIGNED,
    HALF,
    MOST_AXES,
    MOST_STEP,
    ROW_BYTES,
    Geometry,
    even,
    row_of,
)
from fuseplan.backends.triton.templates.hopper_writer import HopperWriter
from fuseplan.backends.triton.templates.product_tiles import SECTOR_BYTES
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Packing, Pad, Reshape, Rounded
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, contraction_claims, layout_claims
from fuseplan.kernels.transposed import by_features
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls


@dataclass(frozen=True)
class Hopper(Knobs, GpuTemplate):
    """Products and convolutions of f16 and bf16, channels last, gated ones too, and of f32 in TF32.

    The grid is persistent.

    reads:  src and weight once per tile from the L2 into shared memory (src again for each tap), each operand
            once; `resident` weights once per program
    writes: dst once, by copies from shared memory; from registers where channels are first
    chosen: on sm_90 with channels last, and for f32 with precision=tf32

    One warp copies boxes of src and of the weight into a ring in shared memory; zeros come in for padding.
    Groups of four warps multiply them. Groups share a tile, or take tiles in turn: one group finishes its
    tile while another multiplies.

    Where the copy engine does not take the strides of src, all groups copy it to the workspace first, and
    the first copies wait for them. Registers write dst where its rows are no whole units.

    Of f32, four warps load src, round it to TF32 and store it into the ring: channels may be first, of any
    number and at any stride. Few channels are summed over together with the taps of the last axis. The
    features of all residues of a transposed convolution are those of one convolution.

    Attributes:
        box: rows of a tile along dst's axes outside the channel.
        columns: features of a tile.
        depth: channels of one product.
        stages: stages of the ring.
        groups: groups of four warps that multiply.
        together: whether the groups share a tile; otherwise they take turns.
        resident: whether a program keeps the weight of its features in shared memory.
        programs: programs on one processor.
        band: row tiles in a band; a band goes through all features before the next band begins.
        swapped: whether features are the rows of the products, and positions their columns; products with
            many columns read their factors less often from shared memory.
        reaching: whether one copy of src serves all taps along the first spatial axis.
        spread: whether all programs have an equal share of the last tiles' sums, where these leave some
            without work: a program adds some channels of a tile, and leaves the sum to the next one.
    """

    name: ClassVar[str] = "hopper"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel, transposes=True)
        joint = not kernel.contraction.is_transposed or Geometry(kernel).joint is not None
        got = None if joint else kernel.contraction.text
        yield claim(joint, Reason.TRANSPOSED, got=got, operator=kernel.centre_step)
        yield claim(target.name == "sm_90", Reason.NOT_HOPPER, got=str(target), want="sm_90")
        step, contraction = kernel.centre_step, kernel.contraction
        dtypes = dict.fromkeys((kernel.src.dtype, kernel.weight.dtype, kernel.dst.dtype))
        is_rounded = dtypes.keys() == {"f32"} and contraction.precision == "tf32"
        is_half = len(dtypes) == 1 and kernel.src.dtype in ("f16", "bf16")
        yield claim(is_half or is_rounded, Reason.NOT_HALF, got=" to ".join(dtypes), operator=step)
        first = kernel.prologue[0] if kernel.prologue else None
        at, text = (None, None) if first is None else (first.step, first.op_text)
        yield claim(first is None, Reason.PROLOGUE, got=text, operator=at)
        yield from layout_claims(kernel, gated=is_half)
        other = next((each for each in kernel.saved if kernel.saved[each].dtype != kernel.dst.dtype), None)
        yield claim(other is None, Reason.SAVED, operator=other)
        drawn = next((each for each in kernel.epilogue if "random" in calls(each.expression)), None)
        at, text = (None, None) if drawn is None else (drawn.step, drawn.op_text)
        yield claim(drawn is None, Reason.DRAWN, got=text, operator=at)
        rank = kernel.src.rank
        yield claim(rank <= MOST_AXES, Reason.COPY_AXES, got=f"{rank} axes", operator=step)
        if is_half:
            yield from _copy_claims(kernel)
        found = next(choices(kernel, target), None) is not None
        yield claim(found, Reason.GROUP_TILES, got=f"groups={contraction.groups}", operator=step)
        exact = is_rounded and accuracy == "strict"
        yield accuracy_claim(cls.bound(kernel), product_cost.bound(kernel, "ieee") if exact else accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = dict(choices(kernel, target))
        # Of equal estimates on an H200, bands of 8 took 0.95 of the time of bands of 1 where weights of 16
        # bits are large, 1.01 where they are small; swapped products took 0.97 of the time of others.
        wider = -1 if _is_large(kernel, target) and kernel.src.itemsize == HALF else 1
        for knobs in sorted(found, key=lambda it: (found[it], wider * it.band, not it.swapped, repr(it))):
            yield cls(**vars(knobs))

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as (feature, taps, channel), behind the image where each has its own; a turned one lies.

        In a gated product, each tile has its gates and then its values.
        """
        geometry = Geometry(kernel)
        if geometry.is_turned:
            return weight_packing(kernel.weight, (0, 1), (geometry.channels, row_of(geometry.features)))
        schedule, first = self.schedule(kernel), int(kernel.contraction.weight_per_batch)
        ordered = kernel.weight.axes
        axes = (*ordered[: first + 1], *ordered[first + 2 :], ordered[first + 1])
        weight = replace(kernel.weight, shape=geometry.conv.weight_shape) if geometry.joint else kernel.weight
        inner = tuple(weight.shape[axis] for axis in axes[1:])
        gates = gates_beside(kernel.parts, schedule.across * schedule.made, schedule.made, inner)
        packed = weight_packing(weight, axes, gates=gates)
        shape = (*packed.extents[: first + 1], geometry.taps, geometry.channels)
        last = Reshape(shape), Pad((*shape[:-1], geometry.packed_channels)), *[Rounded()] * geometry.gathers
        packed = replace(packed, steps=(*packed.steps, *last))
        if geometry.joint:
            packed = packed.behind(by_features(kernel.weight, kernel.contraction, last=False))
        return packed

    def schedule(self, kernel: Kernel) -> Schedule:
        """What follows from the choice for a kernel."""
        return Schedule(self, Geometry(kernel, self.reaching))

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        schedule = self.schedule(kernel)
        sums = Spread(schedule, schedule.grid(target.processors)).workspace_bytes
        return schedule.padded_bytes + sums

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return seconds(self.schedule(kernel), target)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Two units a product, in any order: tensor cores add with 23 fraction bits and cut what is below."""
        return product_cost.bound(kernel, "native" if kernel.src.dtype != "f32" else "tf32")

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return HopperWriter(self.schedule(kernel), target.processors, self.text).source(target)


def _copy_claims(kernel: Kernel) -> Iterator[Claim]:
    """The copy engine reads src and writes dst."""
    step, contraction = kernel.centre_step, kernel.contraction
    last = kernel.src.element_strides[1] == 1 and Geometry(kernel).is_beside
    yield claim(last, Reason.CHANNELS_FIRST, got=str(kernel.src), operator=step)
    odd = contraction.groups > 1 and contraction.channels_per_group % ALIGNED > 0
    got, want = f"{contraction.channels_per_group} channels", f"multiples of {ALIGNED}"
    yield claim(not odd, Reason.COPY_ALIGNMENT, got=got, want=want, operator=step)
    steps = max(contraction.stride, default=1)
    yield claim(steps <= MOST_STEP, Reason.COPY_STEP, got=f"stride={steps}", operator=step)


SHARED_BYTES = 227 * 1024  # what one program may have; two on one processor have half each
RESERVED_BYTES = 1024  # of a program's shared memory, for the system
FEWEST_STAGES, MOST_STAGES = 2, 8
BOXES = 2  # that are tried of a size: those that cover dst best
BANDS = (4, 8)

# groups, together, programs on a processor: accumulators of a thread
FORMS = {(2, False, 1): 128, (2, True, 1): 192, (1, False, 2): 64, (3, False, 1): 64, (3, True, 1): 96}
SUMS = (96, 160, 192)  # rows or features of tiles that are sums of powers of two, for 16 bits

# One processor of an H200. The numbers were fitted to 2,000 times of 114 products and convolutions, most of
# them random, with those of `product_cost`: choices take 1.03 of the best time, of 46 others 1.06.
FLOPS_A_SECOND = {HALF: 6.3e12, 4: 2.6e12}  # by the bytes of an element
L2_BYTES_A_SECOND = 102e9
LATENCY = 1.4e-6  # of a copy from memory, with all others under way
START = 2.11e-6  # of a launch: from its first copies to its first products, and its last stores
STEPS_A_SECOND = 2.25e9  # of a warp: what comes after the sum, an instruction at a time
TILE_SECONDS = 0.6e-6  # between the sums of one group: waits for barriers and for the copy to dst
SHARED_READS = 34.2  # of 64 x 64 products: those of 128 columns are as fast as shared memory allows
# Seconds of the loads that a thread has under way, with channels last, and first: four times as many then.
LOADED_LAST, LOADED_FIRST = 0.9e-6, 1.6e-6
SCATTERED = 20  # instructions for an element that registers store along features
COPIED = 3.2  # for each byte of the copy of src: as long as so many take through memory
PADDED = 3.0e-6  # programs wait for each other, behind their copies of src
BROKEN = 1.68  # copies of rows that begin inside of sectors, over copies of whole sectors
HIDDEN = 0.337  # of the shorter of arithmetic and memory shows beside the longer
MEETING = 4.32e-6  # of spread tiles: waits for the sums of other programs
SUM_BYTES_A_SECOND = 33.7e9  # of these sums, written and read
APART = 1.22  # copies of programs that are at other channels each, over copies of the same ones at once
STAYING = 16  # weights of up to this part of the L2 are as fast for later tiles of rows as for the first


def choices(kernel: Kernel, target: Target) -> Iterator[tuple[Knobs, float]]:
    """Every choice that fits the processor, and its seconds."""
    plain, reaching = Geometry(kernel), Geometry(kernel, True)
    geometries = (plain, reaching) if plain.can_reach else (plain,)
    # gate and value are columns of one thread's sums, which rows are not
    orders = (False,) if plain.ways > 1 else (False, True)
    for geometry, rows in product(geometries, (64, 128, 256, *SUMS)):
        boxes = geometry.boxes(rows)[:BOXES]
        for box, columns, depth, form, swapped in product(
            boxes, _widths(kernel), _depths(kernel), FORMS, orders
        ):
            if _fits((rows, columns), form, swapped):
                base = Knobs(box, columns, depth, FEWEST_STAGES, *form[:2], programs=form[2])
                base = replace(base, swapped=swapped, reaching=geometry.reaching)
                yield from _variants(base, geometry, target)


def seconds(schedule: Schedule, target: Target) -> float:
    """A launch, and the longer of what the processors do with their tiles and of copies through memory."""
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
    memory = _moved(schedule, target) / model.rates(target).memory
    padding = COPIED * schedule.padded_bytes / model.rates(target).memory
    padding += PADDED * schedule.geometry.is_padded
    return max(inside, memory) + HIDDEN * min(inside, memory) + padding + START + model.LAUNCH_SECONDS


def _moved(schedule: Schedule, target: Target) -> float:
    """Bytes through memory: all once, a weight that the L2 does not keep again for later tiles of rows."""
    kernel, knobs = schedule.kernel, schedule.knobs
    broken = schedule.geometry.broken(schedule.part) - 1 if schedule.geometry.scatters else 0.0
    once = kernel.minimum_bytes + broken * kernel.dst.nbytes
    if not _is_large(kernel, target):
        return once
    together = max(knobs.band, target.processors * knobs.programs / schedule.across)
    return once + kernel.weight.nbytes * max(0.0, prod(schedule.counts) / together - 1)


def _is_large(kernel: Kernel, target: Target) -> bool:
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
    if schedule.geometry.gathers:
        return max(products, schedule.blocks * _loading(schedule))
    flying = knobs.programs * knobs.stages * schedule.stage_bytes / LATENCY
    waiting = schedule.stage_bytes / flying
    return max(products, schedule.blocks * max(waiting, apart * _copied_bytes(schedule) / L2_BYTES_A_SECOND))


def _copied_bytes(schedule: Schedule) -> float:
    """Bytes of a stage, more for rows that begin inside of sectors; taps share their sectors."""
    geometry, size = schedule.geometry, schedule.itemsize
    steps = [axis.src_stride for axis in geometry.axes if axis.positions > 1]
    row = row_of(geometry.features) if geometry.is_turned else geometry.packed_channels
    more = BROKEN - 1 if geometry.taps == 1 else 0.0
    src = more * schedule.src_bytes * any(step * size % SECTOR_BYTES for step in steps)
    weight = more * (schedule.stage_bytes - schedule.src_bytes) * (row * size % SECTOR_BYTES > 0)
    return schedule.stage_bytes + src + weight


def _loading(schedule: Schedule) -> float:
    """Seconds from a stage to the next where warps load src: as much at a time as registers hold."""
    elements = schedule.src_bytes / schedule.itemsize / 128
    step = schedule.kernel.src.element_strides[1]
    batches = max(1.0, elements / schedule.held_loads)
    weights = schedule.stage_bytes - schedule.src_bytes
    return max(batches * (LOADED_LAST if step == 1 else LOADED_FIRST), weights / L2_BYTES_A_SECOND)


def _finishing(schedule: Schedule) -> float:
    """Seconds for what a group does after the sum."""
    steps = 4 + 3 * schedule.geometry.functions + SCATTERED * schedule.scatters_features
    elements = prod(schedule.own) * schedule.own_columns
    return elements / 128 * steps / STEPS_A_SECOND + TILE_SECONDS


def _widths(kernel: Kernel) -> tuple[int, ...]:
    """Features of a tile; of groups, a share without rest."""
    features = Geometry(kernel).conv.features_per_group
    if kernel.contraction.groups > 1:
        return tuple(width for width in (16, 32, 64, 128, 256) if features % width == 0)
    # a turned weight is copied in lines of a piece's features: with 64 bytes, tiles took 1.1 times as long
    least = ROW_BYTES // HALF if Geometry(kernel).is_turned else 1
    sums = [width for width in SUMS if kernel.src.itemsize == HALF and even(width) >= least]
    return tuple(width for width in (32, 64, 128, 256, *sums) if width < 2 * max(features, 32))


def _depths(kernel: Kernel) -> tuple[int, ...]:
    """Channels of one product: 128 bytes of them, or fewer where that wastes less."""
    geometry = Geometry(kernel)
    channels = geometry.channels
    depths = [count // kernel.src.itemsize for count in (128, 64, 32)]
    if geometry.along > 1:  # all are one product
        return tuple(depth for depth in depths if channels <= depth)[-1:]
    if geometry.gathers and channels >= depths[0]:  # fewer make more stages, which loads fill sooner
        return tuple(depths[:2])
    if kernel.contraction.groups > 1:
        return tuple(depth for depth in depths if channels % depth == 0)[:1]
    least = min(ceil_div(channels, depth) * depth for depth in depths)
    return tuple(depth for depth in depths if ceil_div(channels, depth) * depth <= 1.25 * least)[:1]


def _fits(tile: tuple[int, int], form: tuple[int, bool, int], swapped: bool) -> bool:
    """Whether a group's products have 64 or 128 rows, enough columns, and sums that fit into registers."""
    rows, columns = tile[::-1] if swapped else tile
    own = rows / (form[0] if form[1] else 1)
    fewest = 96 if swapped else 16
    return own in (64, 128) and fewest <= columns <= 256 and own * columns <= 128 * FORMS[form]


def _variants(base: Knobs, geometry: Geometry, target: Target) -> Iterator[tuple[Knobs, float]]:
    """The choice, also in bands, and with the weight held."""
    schedule = Schedule(base, geometry)
    if schedule.is_crowded and geometry.scatters:
        return
    grid = schedule.grid(target.processors)
    is_ordered = schedule.tiles > 4 * grid or _is_large(geometry.kernel, target)
    has_orders = schedule.across > 1 and schedule.tiles > schedule.across
    bands = (1, *BANDS) if has_orders and is_ordered else (1,)
    orders = (False, True) if Spread(schedule, target.processors * base.programs).can_be else (False,)
    for band, spread in product(bands, orders):
        yield from _deepest(Schedule(replace(base, band=band, spread=spread), geometry), target)
    # a held weight serves the features of one block: a program has to stay with them, and to have more tiles
    one_weight = not geometry.kernel.contraction.weight_per_batch
    if grid % schedule.across == 0 and schedule.tiles > grid and one_weight:
        yield from _deepest(Schedule(replace(base, resident=True), geometry), target)


def _deepest(schedule: Schedule, target: Target) -> Iterator[tuple[Knobs, float]]:
    """The choice with as many stages as fit; none where fewer than two do."""
    knobs = schedule.knobs
    if schedule.geometry.gathers and prod(knobs.box) * knobs.depth > 128 * schedule.held_loads:
        return  # ptxas gives up where a box does not fit into registers
    most = (SHARED_BYTES + RESERVED_BYTES) // knobs.programs - RESERVED_BYTES
    stages = min(MOST_STAGES, knobs.stages + (most - schedule.shared_bytes) // schedule.stage_bytes)
    if stages >= FEWEST_STAGES:
        found = Schedule(replace(knobs, stages=stages), schedule.geometry)
        yield found.knobs, seconds(found, target)

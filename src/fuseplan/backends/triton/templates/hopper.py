"""Contractions on Hopper: a warp that copies, groups of warps that multiply, epilogues beside products.

Behind the template: which choices fit a processor, and what each costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.triton import model
from fuseplan.backends.triton.index import ceil_div
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates.hopper_schedule import Knobs, Schedule
from fuseplan.backends.triton.templates.hopper_tiles import (
    ALIGNED,
    MOST_AXES,
    MOST_STEP,
    Geometry,
    strides_fit,
)
from fuseplan.backends.triton.templates.hopper_writer import HopperWriter
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Packing
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Accuracy, Template, accuracy_claim, contraction_claims, layout_claims
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls


@dataclass(frozen=True)
class Hopper(Knobs, GpuTemplate):
    """Products and convolutions of f16 and bf16, channels last, with a persistent grid.

    reads:  src and weight once per tile from the L2 into shared memory (src again for each tap), each operand
            once; `resident` weights once per program
    writes: dst once, by copies from shared memory
    chosen: on sm_90, wherever the copy engine can read src

    One warp copies boxes of src and of the weight into a ring in shared memory; zeros come in for padding.
    Groups of four warps multiply them. Groups share a tile, or take tiles in turn: one group finishes its
    tile while another multiplies.

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
    """

    name: ClassVar[str] = "hopper"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield from contraction_claims(kernel)
        yield claim(target.name == "sm_90", Reason.NOT_HOPPER, got=str(target), want="sm_90")
        step, contraction = kernel.centre_step, kernel.contraction
        dtypes = dict.fromkeys((kernel.src.dtype, kernel.weight.dtype, kernel.dst.dtype))
        is_half = len(dtypes) == 1 and kernel.src.dtype in ("f16", "bf16")
        yield claim(is_half, Reason.NOT_HALF, got=" to ".join(dtypes), operator=step)
        first = kernel.prologue[0] if kernel.prologue else None
        at, text = (None, None) if first is None else (first.step, first.op_text)
        yield claim(first is None, Reason.PROLOGUE, got=text, operator=at)
        yield from layout_claims(kernel)
        other = next((each for each in kernel.saved if kernel.saved[each].dtype != kernel.dst.dtype), None)
        yield claim(other is None, Reason.SAVED, operator=other)
        drawn = next((each for each in kernel.epilogue if "random" in calls(each.expression)), None)
        at, text = (None, None) if drawn is None else (drawn.step, drawn.op_text)
        yield claim(drawn is None, Reason.DRAWN, got=text, operator=at)
        rank = kernel.src.rank
        yield claim(rank <= MOST_AXES, Reason.COPY_AXES, got=f"{rank} axes", operator=step)
        last = _channels_last(kernel)
        yield claim(last, Reason.CHANNELS_FIRST, got=str(kernel.src), operator=step)
        sizes = {"channels": contraction.channels_per_group, "features": contraction.features}
        odd = [f"{count} {name}" for name, count in sizes.items() if count % ALIGNED]
        odd += [f"a stride of {stride} in src" for stride in strides_fit(kernel.src)]
        want = f"multiples of {ALIGNED}"
        yield claim(not odd, Reason.COPY_ALIGNMENT, got=next(iter(odd), None), want=want, operator=step)
        steps = max(contraction.stride, default=1)
        yield claim(steps <= MOST_STEP, Reason.COPY_STEP, got=f"stride={steps}", operator=step)
        found = next(choices(kernel, target), None) is not None
        yield claim(found, Reason.GROUP_TILES, got=f"groups={contraction.groups}", operator=step)
        yield accuracy_claim(_bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = dict(choices(kernel, target))
        for knobs in sorted(found, key=lambda each: (found[each], each.swapped, repr(each))):
            yield cls(**vars(knobs))

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as (feature, taps, channel), behind the image where each has its own; or as it lies."""
        if Geometry(kernel).is_turned:
            return weight_packing(kernel.weight, (0, 1))
        first = int(kernel.contraction.weight_per_batch)
        ordered = kernel.weight.axes
        axes = (*ordered[: first + 1], *ordered[first + 2 :], ordered[first + 1])
        return weight_packing(kernel.weight, axes)

    def schedule(self, kernel: Kernel) -> Schedule:
        """What follows from the choice for a kernel."""
        return Schedule(self, Geometry(kernel, self.reaching))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return seconds(self.schedule(kernel), target)

    def error_bound(self, kernel: Kernel) -> float:
        """A tensor core drops the bits below a sum's 23rd: the number of products times 2^-23."""
        return _bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return HopperWriter(self.schedule(kernel), target.processors, self.text).source()


def _bound(kernel: Kernel) -> float:
    """The error bound of a sum of products in f32, in any order: two units a product.

    Tensor cores add with at least 23 fraction bits and cut what is below.
    """
    return kernel.contraction.depth * 2.0**-23


def _channels_last(kernel: Kernel) -> bool:
    """Whether the channels of a position lie side by side in src and dst."""
    src, dst = kernel.src, kernel.dst
    return src.element_strides[1] == 1 and (dst.is_channels_last or dst.element_strides[1] == 1)


SHARED_BYTES = 227 * 1024  # what one program may have; two on one processor have half each
LINE_BYTES = 128  # of the L2
RESERVED_BYTES = 1024  # of a program's shared memory, for the system
FEWEST_STAGES, MOST_STAGES = 2, 8
BOXES = 2  # that are tried of a size: those that cover dst best
BANDS = (4, 8)

# groups, together, programs on a processor: accumulators of a thread
FORMS = {(2, False, 1): 128, (2, True, 1): 128, (1, False, 2): 64, (3, False, 1): 64}

# One processor of an H100. Over 13 convolutions and 5 products that were timed in every form, these numbers
# choose within 1.05 of the best, geometric mean, and within 1.18 at worst; over 18 products, 12 of them of
# random extents, within 1.09 and 1.20.
FLOPS_A_SECOND = 5.2e12
L2_BYTES_A_SECOND = 80e9
LATENCY = 2.0e-6  # of a copy from memory, with all others under way
STEPS_A_SECOND = 1.7e9  # of a warp: what comes after the sum, an instruction at a time
TILE_SECONDS = 0.2e-6  # between the sums of one group: waits for barriers and for the copy to dst
SHARED_READS = 38.0  # of 64 x 64 products: those of 128 columns are as fast as shared memory allows
BETWEEN_LINES = 1.25  # copies of rows that begin inside of a line of the L2, over copies of whole lines
HIDDEN = 0.3  # of the shorter of arithmetic and memory shows beside the longer


def choices(kernel: Kernel, target: Target) -> Iterator[tuple[Knobs, float]]:
    """Every choice that fits the processor, and its seconds."""
    plain, reaching = Geometry(kernel), Geometry(kernel, True)
    geometries = (plain, reaching) if plain.can_reach else (plain,)
    for geometry, rows in product(geometries, (64, 128, 256)):
        boxes = geometry.boxes(rows)[:BOXES]
        for box, columns, depth, form, swapped in product(
            boxes, _widths(kernel), _depths(kernel), FORMS, (False, True)
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
    memory = _moved(schedule, target) / model.rates(target).memory
    return max(inside, memory) + HIDDEN * min(inside, memory) + LATENCY + model.LAUNCH_SECONDS


def _moved(schedule: Schedule, target: Target) -> float:
    """Bytes through memory: all once, and a weight too large for the L2 again for later tiles of rows."""
    kernel, knobs = schedule.kernel, schedule.knobs
    weight = kernel.weight.nbytes
    if weight < target.l2_bytes // 2:
        return float(kernel.minimum_bytes)
    together = max(knobs.band, target.processors * knobs.programs / schedule.across)
    return kernel.minimum_bytes + weight * max(0.0, prod(schedule.counts) / together - 1)


def _summing(schedule: Schedule) -> float:
    """Seconds for the sums of a tile: products, or copies through the L2."""
    knobs = schedule.knobs
    columns = schedule.sum_shape[1]
    # of a product, 64 rows and all columns are read from shared memory anew
    reading = max(1.0, SHARED_READS * (64 + columns) / (64 * columns))
    depth = schedule.blocks * schedule.lines * knobs.depth
    products = 2 * prod(knobs.box) * knobs.columns * depth * reading / FLOPS_A_SECOND
    flying = knobs.programs * knobs.stages * schedule.stage_bytes / LATENCY
    moved = schedule.stage_bytes * (1.0 if _are_whole_lines(schedule.kernel) else BETWEEN_LINES)
    copies = schedule.blocks * moved / min(L2_BYTES_A_SECOND, flying)
    return max(products, copies)


def _are_whole_lines(kernel: Kernel) -> bool:
    """Whether the rows of a product begin with a line of the L2; those of taps share lines."""
    contraction = kernel.contraction
    return prod(contraction.kernel) > 1 or contraction.channels * kernel.src.itemsize % LINE_BYTES == 0


def _finishing(schedule: Schedule) -> float:
    """Seconds for what a group does after the sum."""
    steps = 4 + 3 * schedule.geometry.functions
    return prod(schedule.sum_shape) / 128 * steps / STEPS_A_SECOND + TILE_SECONDS


def _widths(kernel: Kernel) -> tuple[int, ...]:
    """Features of a tile; of groups, a share without rest."""
    features = kernel.contraction.features_per_group
    if kernel.contraction.groups > 1:
        return tuple(width for width in (16, 32, 64, 128, 256) if features % width == 0)
    return tuple(width for width in (32, 64, 128, 256) if width < 2 * max(features, 32))


def _depths(kernel: Kernel) -> tuple[int, ...]:
    """Channels of one product: 128 bytes of them, or fewer where that wastes less."""
    channels = kernel.contraction.channels_per_group
    if kernel.contraction.groups > 1:
        return tuple(depth for depth in (64, 32, 16) if channels % depth == 0)[:1]
    least = min(ceil_div(channels, depth) * depth for depth in (64, 32, 16))
    return tuple(depth for depth in (64, 32, 16) if ceil_div(channels, depth) * depth <= 1.25 * least)[:1]


def _fits(tile: tuple[int, int], form: tuple[int, bool, int], swapped: bool) -> bool:
    """Whether a group's products have 64 or 128 rows, enough columns, and sums that fit into registers."""
    rows, columns = tile[::-1] if swapped else tile
    rows //= form[0] if form[1] else 1
    fewest = 128 if swapped else 16
    return rows in (64, 128) and fewest <= columns <= 256 and rows * columns <= 128 * FORMS[form]


def _variants(base: Knobs, geometry: Geometry, target: Target) -> Iterator[tuple[Knobs, float]]:
    """The choice, also in bands, and with the weight held."""
    schedule = Schedule(base, geometry)
    grid = schedule.grid(target.processors)
    yield from _deepest(schedule, target)
    if schedule.across > 1 and schedule.tiles > 4 * grid:
        for band in BANDS:
            yield from _deepest(Schedule(replace(base, band=band), geometry), target)
    # a held weight serves the features of one block: a program has to stay with them, and to have more tiles
    one_weight = not geometry.kernel.contraction.weight_per_batch
    if grid % schedule.across == 0 and schedule.tiles > grid and one_weight:
        yield from _deepest(Schedule(replace(base, resident=True), geometry), target)


def _deepest(schedule: Schedule, target: Target) -> Iterator[tuple[Knobs, float]]:
    """The choice with as many stages as fit; none where fewer than two do."""
    knobs = schedule.knobs
    most = (SHARED_BYTES + RESERVED_BYTES) // knobs.programs - RESERVED_BYTES
    stages = min(MOST_STAGES, knobs.stages + (most - schedule.shared_bytes) // schedule.stage_bytes)
    if stages >= FEWEST_STAGES:
        found = Schedule(replace(knobs, stages=stages), schedule.geometry)
        yield found.knobs, seconds(found, target)

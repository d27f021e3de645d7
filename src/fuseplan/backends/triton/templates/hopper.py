"""Contractions on Hopper: a warp that copies, groups of warps that multiply, epilogues beside products.

Behind the template: which choices fit a processor, and what each costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar

from fuseplan.backends.parts import gates_beside
from fuseplan.backends.triton.index import WIDE, ceil_div
from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import product_cost, summary
from fuseplan.backends.triton.templates.hopper_cost import inside_of, is_large, seconds
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
)
from fuseplan.backends.triton.templates.hopper_writer import HopperWriter
from fuseplan.kernels.centre import Summary
from fuseplan.kernels.emit import Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.packing import Packing, Pad, Reshape, Rounded
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import (
    Accuracy,
    Template,
    accuracy_claim,
    contraction_claims,
    layout_claims,
    none_claim,
    summary_claims,
)
from fuseplan.kernels.transposed import by_features
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.scalar import calls


@dataclass(frozen=True)
class Hopper(Knobs, GpuTemplate):
    """Products and convolutions of f16 and bf16, channels last, gated ones too, and of f32 in TF32.

    The grid is persistent.

    reads:  src and weight once per tile from the L2 into shared memory (src again for each tap), each operand
            once; `resident` weights once per program
    writes: dst once, by copies from shared memory; from registers where channels are first. Of statistics of
        rows, the states of each tile's rows to the workspace and back, a few numbers for each row and tile
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
        whole_lines: whether rows of the weight are packed to whole lines of the L2.
        padded: whether src is copied to the workspace first, to rows of whole lines.
    """

    name: ClassVar[str] = "hopper"
    opens: ClassVar[bool] = True

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        is_summed = isinstance(kernel.centre, Summary)
        yield from summary_claims(kernel) if is_summed else contraction_claims(kernel, transposes=True)
        # each tile of rows has states in the workspace
        yield claim(not is_summed or kernel.open_axis is None, Reason.KNOWN_EXTENTS)
        joint = not kernel.contraction.is_transposed or Geometry(kernel).joint is not None
        got = None if joint else kernel.contraction.text
        yield claim(joint, Reason.TRANSPOSED, got=got, operator=kernel.centre_step)
        yield claim(target.name == "sm_90", Reason.NOT_HOPPER, got=str(target), want="sm_90")
        step, contraction = kernel.centre_step, kernel.contraction
        stored = () if is_summed else (kernel.dst.dtype,)
        dtypes = dict.fromkeys((kernel.src.dtype, kernel.weight.dtype, *stored))
        is_rounded = dtypes.keys() == {"f32"} and contraction.precision == "tf32" and not is_summed
        is_half = len(dtypes) == 1 and kernel.src.dtype in ("f16", "bf16")
        is_half = is_half and (not is_summed or kernel.compute_dtype == "f32")
        yield claim(is_half or is_rounded, Reason.NOT_HALF, got=" to ".join(dtypes), operator=step)
        yield none_claim(kernel.prologue, Reason.PROLOGUE)
        yield from layout_claims(kernel, gated=is_half)
        other = next((each for each in kernel.saved if kernel.saved[each].dtype != kernel.dst.dtype), None)
        yield claim(other is None, Reason.SAVED, operator=other)
        drawn = (each for each in kernel.epilogue if "random" in calls(each.expression))
        yield none_claim(drawn, Reason.DRAWN)
        rank = kernel.src.rank
        yield claim(rank <= MOST_AXES, Reason.COPY_AXES, got=f"{rank} axes", operator=step)
        if is_half:
            yield from _copy_claims(kernel)
        found = next(choices(kernel, target), None) is not None
        what, got = Reason.GROUP_TILES, f"groups={contraction.groups}"
        if is_summed:
            what, got = Reason.ROW_TILES, str(kernel.src)
        yield claim(found, what, got=got, operator=step)
        exact = is_rounded and accuracy == "strict"
        yield accuracy_claim(cls.bound(kernel), product_cost.bound(kernel, "ieee") if exact else accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        return (each for _, each in cls.estimated(kernel, target, accuracy))

    @classmethod
    def estimated(
        cls, kernel: Kernel, target: Target, accuracy: Accuracy
    ) -> Iterator[tuple[float, Template]]:
        found = dict(choices(kernel, target))
        # Of equal estimates on an H200, bands of 8 took 0.95 of the time of bands of 1 where weights of 16
        # bits are large, 1.01 where they are small; swapped products took 0.97 of the time of others.
        wider = -1 if is_large(kernel, target) and kernel.src.itemsize == HALF else 1
        moved = {it: (it.whole_lines, it.padded, wider * it.band) for it in found}
        for it in sorted(found, key=lambda it: (found[it], moved[it], -it.stages, not it.swapped, repr(it))):
            yield found[it], cls(**vars(it))

    def packed_weight(self, kernel: Kernel) -> Packing:
        """The weight as (feature, taps, channel), behind the image where each has its own; a turned one lies.

        In a gated product, each tile has its gates and then its values.
        """
        schedule, first = self.schedule(kernel), int(kernel.contraction.weight_per_batch)
        geometry = schedule.geometry
        if geometry.is_turned:
            return weight_packing(kernel.weight, (0, 1), (geometry.channels, geometry.weight_row))
        ordered = kernel.weight.axes
        axes = (*ordered[: first + 1], *ordered[first + 2 :], ordered[first + 1])
        weight = replace(kernel.weight, shape=geometry.conv.weight_shape) if geometry.joint else kernel.weight
        inner = tuple(weight.shape[axis] for axis in axes[1:])
        gates = gates_beside(kernel.parts, schedule.across * schedule.made, schedule.made, inner)
        packed = weight_packing(weight, axes, gates=gates)
        shape = (*packed.extents[: first + 1], geometry.taps, geometry.channels)
        last = Reshape(shape), Pad((*shape[:-1], geometry.weight_row)), *[Rounded()] * geometry.gathers
        packed = replace(packed, steps=(*packed.steps, *last))
        if geometry.joint:
            packed = packed.behind(by_features(kernel.weight, kernel.contraction, last=False))
        return packed

    def schedule(self, kernel: Kernel) -> Schedule:
        """What follows from the choice for a kernel."""
        return Schedule(self, Geometry(kernel, self.reaching, self.whole_lines, self.padded))

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        schedule = self.schedule(kernel)
        sums = Spread(schedule, schedule.grid(target.processors)).workspace_bytes
        return schedule.padded_bytes + schedule.state_bytes + sums

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return seconds(self.schedule(kernel), target)

    @staticmethod
    def bound(kernel: Kernel) -> float:
        """Two units a product, in any order: tensor cores add with 23 fraction bits and cut what is below."""
        arithmetic = "native" if kernel.src.dtype != "f32" else "tf32"
        if isinstance(kernel.centre, Summary):
            return summary.bound(kernel, arithmetic, MOST_PIECES)
        return product_cost.bound(kernel, arithmetic)

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
MOST_PIECES = 16  # of a tile of features with statistics
BOXES = 2  # that are tried of a size: those that cover dst best
BANDS = (1, 4, 8)

# groups, together, programs on a processor: accumulators of a thread
FORMS = {(2, False, 1): 128, (2, True, 1): 192, (1, False, 2): 64, (3, False, 1): 64, (3, True, 1): 96}
SUMS = (96, 160, 192)  # rows or features of tiles that are sums of powers of two, for 16 bits
KEPT = 4.5  # parts of the L2, of which a band of rows has one; with twice as much, products took 1.03 to 1.10


def choices(kernel: Kernel, target: Target) -> Iterator[tuple[Knobs, float]]:
    """Every choice that fits the processor, and its seconds."""
    plain = Geometry(kernel)
    reaches = (False, True) if plain.can_reach else (False,)
    geometries = [Geometry(kernel, reaching, *each) for reaching in reaches for each in plain.packings]
    if plain.is_summed and not (geometries[0].is_flat and kernel.dst.span < WIDE):
        return
    # gate and value are columns of one thread's sums, which rows are not, as all features with statistics
    orders = (False,) if plain.ways > 1 or plain.is_summed else (False, True)
    for geometry, rows in product(geometries, (64, 128, 256, *SUMS)):
        boxes = geometry.boxes(rows)[:BOXES]
        for box, columns, depth, form, swapped in product(
            boxes, _widths(kernel), _depths(kernel), FORMS, orders
        ):
            if _fits((rows, columns), form, swapped):
                base = Knobs(box, columns, depth, FEWEST_STAGES, *form[:2], programs=form[2], swapped=swapped)
                base = replace(base, whole_lines=geometry.whole_lines, padded=geometry.padded)
                base = replace(base, reaching=geometry.reaching)
                yield from _variants(base, geometry, target)


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
    if schedule.is_idle and not geometry.is_summed:  # sums of rows are read, whichever exist
        return
    if geometry.is_summed:
        # groups that take turns took 1.04 of the time and more; 256 x 192 spills where features are masked
        spills = schedule.is_crowded and base.groups == 2
        if not schedule.shares_tile or spills or schedule.state_bytes >= WIDE:
            return
    elif schedule.is_crowded and geometry.scatters:
        return
    grid = schedule.grid(target.processors)
    has_orders = schedule.across > 1 and schedule.tiles > schedule.across
    bands: tuple[int, ...] = (1,)
    if geometry.is_summed and has_orders:
        bands = _level(schedule, target)
    elif has_orders and schedule.tiles > 4 * grid:
        bands = BANDS
    elif has_orders and is_large(geometry.kernel, target):
        bands = BANDS[::2]  # with 4 as well, the best of 43 products took 0.96 of the time or more
    # of f32, with factors in registers too, spread tiles of 2 to the 15 took 1.05 to 2.7 of the least time
    has_room = schedule.itemsize == HALF or prod(base.box) * base.columns < 1 << 15
    can_spread = has_room and Spread(schedule, target.processors * base.programs).can_be
    for spread in (False, True) if can_spread else (False,):
        yield from _deepest(schedule, target, bands, spread=spread)
    # a held weight serves the features of one block: a program has to stay with them, and to have more tiles
    one_weight = not geometry.kernel.contraction.weight_per_batch
    if grid % schedule.across == 0 and schedule.tiles > grid and one_weight:
        yield from _deepest(schedule, target, resident=True)


def _level(schedule: Schedule, target: Target) -> tuple[int, ...]:
    """Bands of equal heights, such that the L2 keeps a band's rows: the weight is read for each band anew."""
    rows, geometry = prod(schedule.counts), schedule.geometry
    each = prod(schedule.knobs.box) * geometry.weight_row * schedule.itemsize
    most = [band for band in (8, 16, 32) if band == 8 or min(rows, band) * each * KEPT <= target.l2_bytes]
    return tuple(dict.fromkeys(ceil_div(rows, ceil_div(rows, band)) for band in most))


def _deepest(
    schedule: Schedule, target: Target, bands: Sequence[int] = (1,), **more: bool
) -> Iterator[tuple[Knobs, float]]:
    """The choice in bands, with as many stages as fit; none where fewer than two do."""
    schedule = schedule.varied(**more) if any(more.values()) else schedule
    knobs = schedule.knobs
    if schedule.geometry.gathers and prod(knobs.box) * knobs.depth > 128 * schedule.held_loads:
        return  # ptxas gives up where a box does not fit into registers
    most = (SHARED_BYTES + RESERVED_BYTES) // knobs.programs - RESERVED_BYTES
    stages = min(MOST_STAGES, knobs.stages + (most - schedule.shared_bytes) // schedule.stage_bytes)
    if stages >= FEWEST_STAGES:
        deepest = schedule.varied(stages=stages)
        inside = inside_of(deepest, target)
        for band in bands:
            found = deepest.varied(band=band) if band > 1 else deepest
            yield found.knobs, seconds(found, target, inside)

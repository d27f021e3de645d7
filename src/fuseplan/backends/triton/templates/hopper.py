"""Contractions on Hopper: a warp that copies, groups of warps that multiply, epilogues beside products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import prod
from typing import ClassVar

from fuseplan.backends.triton.template import GpuTemplate, Packing, vector_packing
from fuseplan.backends.triton.templates.hopper_schedule import Knobs, Schedule
from fuseplan.backends.triton.templates.hopper_tiles import (
    ALIGNED,
    HALF,
    MOST_STEP,
    Geometry,
    ceil_div,
    strides_fit,
)
from fuseplan.backends.triton.templates.hopper_writer import HopperWriter
from fuseplan.emit import Source
from fuseplan.kernel import Kernel, KernelOperand
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.target import Target
from fuseplan.template import Accuracy, Template, Traffic, accuracy_claim

SHARED_BYTES = 227 * 1024  # what one program may have; two on one processor have half each
RESERVED_BYTES = 1024  # of a program's shared memory, for the system
MOST_STAGES = 8


@dataclass(frozen=True)
class Hopper(GpuTemplate):
    """Products and convolutions of f16 and bf16, channels last, with a persistent grid.

    reads:  src and weight once a tile from the L2 into shared memory (src again for each tap), each operand
            once; `resident` weights once a program
    writes: dst once, by copies from shared memory
    chosen: on sm_90, wherever the copy engine can read src

    One warp copies boxes of src and of the weight into a ring in shared memory; zeros come in for padding.
    Groups of four warps multiply them. Groups either take tiles in turn, so that one finishes its tile while
    another multiplies, or share a tile.

    Attributes:
        box: rows of a tile along dst's axes outside the channel.
        columns: features of a tile.
        depth: channels of one product.
        stages: of the ring.
        groups: groups of four warps that multiply.
        together: whether they share a tile; else they take turns.
        resident: whether a program keeps the weight of its features in shared memory.
        programs: on one processor.
        band: tiles of rows that take all features before the next ones do.
        swapped: whether features are the rows of the products, and positions their columns: of products with
            many columns, the factors are read less often from shared memory.
        reaching: whether one copy of src serves all taps along the first spatial axis.
    """

    name: ClassVar[str] = "hopper"

    box: tuple[int, ...]
    columns: int
    depth: int
    stages: int
    groups: int = 2
    together: bool = False
    resident: bool = False
    programs: int = 1
    band: int = 1
    swapped: bool = False
    reaching: bool = False

    @classmethod
    def limits(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Claim]:
        yield claim(kernel.convolution is not None, Reason.NO_CONTRACTION)
        yield claim(target.name == "sm_90", Reason.NOT_HOPPER, got=str(target), want="sm_90")
        step, contraction = kernel.contraction_step, kernel.contraction
        yield claim(kernel.src.dtype in ("f16", "bf16"), Reason.NOT_HALF, got=kernel.src.dtype, operator=step)
        first = kernel.prologue[0] if kernel.prologue else None
        at, text = (None, None) if first is None else (first.step, first.op_text)
        yield claim(first is None, Reason.PROLOGUE, got=text, operator=at)
        last = _channels_last(kernel)
        yield claim(last, Reason.CHANNELS_FIRST, got=str(kernel.src), operator=step)
        odd = [n for n in (contraction.channels_per_group, contraction.features) if n % ALIGNED]
        odd += strides_fit(kernel.src)
        want = f"multiples of {ALIGNED}"
        yield claim(not odd, Reason.COPY_ALIGNMENT, got=next(iter(odd), None), want=want, operator=step)
        steps = max(contraction.stride, default=1)
        yield claim(steps <= MOST_STEP, Reason.COPY_STEP, got=f"stride={steps}", operator=step)
        found = any(True for _ in cls.candidates(kernel, target, accuracy))
        yield claim(found, Reason.GROUP_TILES, got=f"groups={contraction.groups}", operator=step)
        yield accuracy_claim(_bound(kernel), accuracy)

    @classmethod
    def candidates(cls, kernel: Kernel, target: Target, accuracy: Accuracy) -> Iterator[Template]:
        found = set(_choices(kernel, target))
        yield from sorted(found, key=lambda choice: (choice.seconds(kernel, target), choice.text))

    def packing(self, kernel: Kernel, operand: KernelOperand) -> Packing:
        """The weight as (feature, taps, channel), behind the image where each has its own."""
        if operand.role != "weight":
            return vector_packing(kernel, operand)
        first = int(kernel.contraction.weight_per_batch)
        ordered = kernel.weight_axes
        axes = (*ordered[: first + 1], *ordered[first + 2 :], ordered[first + 1])
        return Packing(axes, tuple(operand.shape[axis] for axis in axes), operand.dtype)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return Traffic(kernel.minimum_bytes - kernel.dst.nbytes, kernel.dst.nbytes)

    def schedule(self, kernel: Kernel) -> Schedule:
        """What follows from the choice for a kernel."""
        return Schedule(Knobs(**self.knobs), kernel)

    def seconds(self, kernel: Kernel, target: Target) -> float:
        schedule = self.schedule(kernel)
        places = target.processors * self.programs
        waves = ceil_div(schedule.tiles, places)
        columns = schedule.sum_shape[1]
        # of a product, 64 rows and all columns are read from shared memory anew
        reading = max(1.0, _SHARED_READS * (64 + columns) / (64 * columns))
        products = 2 * prod(self.box) * self.columns * schedule.blocks * schedule.lines * self.depth
        weight = 0 if self.resident else schedule.lines * schedule.weight_bytes
        moved = schedule.blocks * (schedule.src_bytes + weight) + prod(self.box) * self.columns * HALF
        inside = max(reading * products / _FLOPS_A_SECOND, moved / _L2_BYTES_A_SECOND) * self.programs
        memory = self.traffic(kernel, target).total / _BYTES_A_SECOND
        return max(waves * inside, memory) + _LAUNCH_SECONDS

    def error_bound(self, kernel: Kernel) -> float:
        return _bound(kernel)

    def emit(self, kernel: Kernel, target: Target) -> Source:
        return HopperWriter(self.schedule(kernel), target.processors, self.text).source()


# One processor of an H100.
_FLOPS_A_SECOND = 5.0e12
_L2_BYTES_A_SECOND = 45e9
_BYTES_A_SECOND = 2.8e12  # all of them together, from memory
_LAUNCH_SECONDS = 3e-6
_SHARED_READS = 41.6  # of 64 x 64 products: those of 128 columns are as fast as shared memory allows


def _bound(kernel: Kernel) -> float:
    """The error bound of a sum of products in f32, in any order: one rounding a product.

    Tensor cores add with at least 23 fraction bits, cutting what is below: two units a product.
    """
    return kernel.contraction.depth * 2.0**-23


def _channels_last(kernel: Kernel) -> bool:
    """Whether the channels of a position lie side by side in src and dst."""
    src, dst = kernel.src, kernel.dst
    return src.element_strides[1] == 1 and (dst.is_channels_last or dst.element_strides[1] == 1)


def _choices(kernel: Kernel, target: Target) -> Iterator[Hopper]:
    """Every choice that fits the processor."""
    features = kernel.contraction.features_per_group
    widths = [n for n in (32, 64, 128, 256) if n < 2 * max(features, 32)]
    if kernel.contraction.groups > 1:
        widths = [n for n in (16, *widths) if features % n == 0]
    for rows, columns, depth in product((64, 128, 256), widths, _depths(kernel)):
        for (groups, together, programs), swapped in product(_FORMS, (False, True)):
            if not _fits((rows, columns), groups, together, programs, swapped):
                continue
            for reaching, box in _boxes(kernel, rows):
                base = Hopper(box, columns, depth, 2, groups, together, False, programs, 1, swapped, reaching)
                yield from _variants(base, kernel, target)


def _boxes(kernel: Kernel, rows: int) -> Iterator[tuple[bool, tuple[int, ...]]]:
    """The best boxes of so many rows, each way round."""
    for reaching in (False, True):
        geometry = Geometry(kernel, reaching)
        if geometry.can_reach or not reaching:
            yield from ((reaching, box) for box in geometry.boxes(rows)[:2])


# groups, together, programs on a processor
_FORMS = ((2, False, 1), (2, True, 1), (1, False, 2), (3, False, 1))
_MOST_REGISTERS = {(2, 1): 128, (1, 2): 64, (3, 1): 64}  # of sums, by groups and programs


def _fits(tile: tuple[int, int], groups: int, together: bool, programs: int, swapped: bool) -> bool:
    """Whether a group's products have 64 or 128 rows, enough columns, and sums that fit into registers."""
    rows, columns = reversed(tile) if swapped else tile
    rows //= groups if together else 1
    fewest = 128 if swapped else 16
    return (
        rows in (64, 128)
        and fewest <= columns <= 256
        and rows * columns <= 128 * _MOST_REGISTERS[groups, programs]
    )


def _depths(kernel: Kernel) -> tuple[int, ...]:
    """Channels of one product: 128 bytes of them, or fewer where that wastes less."""
    channels = kernel.contraction.channels_per_group
    if kernel.contraction.groups > 1:
        return tuple(depth for depth in (64, 32, 16) if channels % depth == 0)[:1]
    least = min(ceil_div(channels, depth) * depth for depth in (64, 32, 16))
    return tuple(depth for depth in (64, 32, 16) if ceil_div(channels, depth) * depth <= 1.25 * least)[:1]


def _variants(base: Hopper, kernel: Kernel, target: Target) -> Iterator[Hopper]:
    """The choice with as many stages as fit; with the weight held; in bands."""
    schedule = base.schedule(kernel)
    tiles, across, grid = schedule.tiles, schedule.across, schedule.grid(target.processors)
    most = (SHARED_BYTES + RESERVED_BYTES) // base.programs - RESERVED_BYTES
    bands = (1, 8) if across > 1 and tiles > 4 * grid else (1,)
    for band in bands:
        yield from _deepest(replace(base, band=band), kernel, most)
    # a held weight serves the features of one block: a program has to stay with them, and to have more tiles
    own = kernel.contraction.weight_per_batch
    if grid % across == 0 and tiles > grid and not own:
        yield from _deepest(replace(base, resident=True), kernel, most)


def _deepest(base: Hopper, kernel: Kernel, most: int) -> Iterator[Hopper]:
    """The choice with as many stages as fit; none where fewer than two do."""
    fitting = (replace(base, stages=stages) for stages in range(MOST_STAGES, 1, -1))
    yield from islice((choice for choice in fitting if choice.schedule(kernel).shared_bytes <= most), 1)

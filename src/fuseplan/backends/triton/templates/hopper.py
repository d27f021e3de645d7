"""Contractions on Hopper: a warp that copies, groups of warps that multiply, epilogues beside products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fuseplan.backends.triton.template import GpuTemplate, weight_packing
from fuseplan.backends.triton.templates import hopper_choices
from fuseplan.backends.triton.templates.hopper_choices import choices
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
        saved = next(iter(kernel.saved), None)
        yield claim(saved is None, Reason.SAVED, operator=saved)
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
        """The weight as (feature, taps, channel), behind the image where each has its own."""
        first = int(kernel.contraction.weight_per_batch)
        ordered = kernel.weight_axes
        axes = (*ordered[: first + 1], *ordered[first + 2 :], ordered[first + 1])
        return weight_packing(kernel.weight, axes)

    def schedule(self, kernel: Kernel) -> Schedule:
        """What follows from the choice for a kernel."""
        return Schedule(self, Geometry(kernel, self.reaching))

    def seconds(self, kernel: Kernel, target: Target) -> float:
        return hopper_choices.seconds(self.schedule(kernel), target)

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

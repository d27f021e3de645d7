"""The order in which a pointwise kernel visits its elements: loops as few and as long as strides allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from fuseplan.backends.cpu.ir import Index
from fuseplan.backends.cpu.loops import ceil_div, offset_of, places
from fuseplan.backends.lattice import are_one, merged
from fuseplan.backends.parts import End, ends
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.language.layouts import image_strides


@dataclass(frozen=True)
class Axis:
    """One loop: how often, and how far a step goes in each tensor that is indexed.

    Attributes:
        extent: steps; in an open kernel that is being written, the outermost one's is a value.
        dst, src: elements of dst (operands per element lie as dst does) and of src.
        image: elements of an operand per activation; 0 where there is none.
        channel: channels; 0 where no operand is per channel.
        others: elements of each operand with axes of its own.
    """

    extent: int
    dst: int
    src: int
    image: int = 0
    channel: int = 0
    others: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """All distances of a step."""
        return (self.dst, self.src, self.image, self.channel, *self.others)


@dataclass(frozen=True)
class Walk:
    """Loops over a whole tensor, from the outside: `outer`, `channel`, then `run`, along which lanes lie.

    `channel` is None where lanes are channels (`along_channels`), or where nothing depends on the channel.

    Attributes:
        outer: outermost first.
        channel: the loop over channels around the run.
        run: dst lies densely along it.
        short: elements of the run at the last step of `outer[-1]`, where it is shorter there; else 0.
        period: channels after which the run begins anew; 0 where lanes are not channels.
    """

    outer: tuple[Axis, ...]
    channel: Axis | None
    run: Axis
    short: int = 0
    period: int = 0

    @property
    def rows(self) -> int:
        """How many times all of `channel` and `run` are gone through."""
        return prod(axis.extent for axis in self.outer)

    @property
    def channels(self) -> int:
        """Steps of the loop over channels."""
        return self.channel.extent if self.channel else 1

    @property
    def along_channels(self) -> bool:
        """Whether neighbouring lanes belong to neighbouring channels."""
        return self.run.channel == 1

    @property
    def repeats(self) -> int:
        """How many positions a run of channels covers."""
        return self.run.extent // self.period if self.period else 1

    def repeated(self, times: int) -> Walk:
        """The same walk with runs over the channels of `times` positions, where these follow one another."""
        if not self.along_channels or not self.outer or times < 2 or not self._follows():
            return self
        positions = self.outer[-1]
        times = min(times, positions.extent) if isinstance(positions.extent, int) else times
        long = replace(self.run, extent=self.run.extent * times)
        rows = ceil_div(positions.extent, times)
        last = replace(
            positions,
            extent=rows,
            dst=positions.dst * times,
            src=positions.src * times,
            image=positions.image * times,
        )
        short = (positions.extent - (rows - 1) * times) * self.run.extent
        short = 0 if short == long.extent else short
        return replace(self, outer=(*self.outer[:-1], last), run=long, short=short)

    def _follows(self) -> bool:
        """Whether the run of the next position begins where this one's ends."""
        return are_one(self.outer[-1], replace(self.run, channel=0))


def walk(kernel: Kernel) -> Walk:
    """The walk for a kernel without a contraction whose dst is dense, or over the places of its parts."""
    has_images = any(operand.is_inside for operand in kernel.operands)
    axes = [*merged(_axes(kernel, has_images, any(operand.is_channel for operand in kernel.operands)))]
    if not axes or axes[-1].image not in (0, 1) or (has_images and axes[-1].image == 0):
        # Lanes cannot lie along the batch where an operand is the same for all of it.
        axes.append(Axis(1, 1, 1, others=(0,) * len(roaming(kernel))))
    run, around = axes[-1], axes[:-1]
    channel = next((axis for axis in around if axis.channel), None)
    outer = tuple(axis for axis in around if axis is not channel)
    return Walk(outer, channel, run, period=run.extent if run.channel else 0)


def repeat(path: Walk, width: int, room: int, vectors: int) -> int:
    """Positions after which a run of channels is whole vectors, if `room` holds it, and long enough."""
    if not path.period:
        return 1
    wanted = vectors * width
    whole = lcm(path.period, width)
    if whole > min(room, 4 * wanted):
        return 1
    return whole // path.period * max(1, min(-(-wanted // whole), room // whole))


def roaming(kernel: Kernel) -> list[tuple[End, KernelOperand]]:
    """The operands with axes of their own, each with the end of the kernel that it is applied at."""
    by_role = {end.role: end for end in ends(kernel)}
    return [(by_role[each.role], each) for each in kernel.operands if each.strides]


def _axes(kernel: Kernel, activation: bool, channel: bool) -> list[Axis]:
    """One loop for each axis with more than one element, as dst stores them."""
    src, dst = (end.spec for end in ends(kernel))
    image = image_strides(dst.shape, dst.element_strides) if activation else (0,) * dst.rank
    others = list(zip(*(end.strides(operand) for end, operand in roaming(kernel)), strict=True))
    listed = [
        Axis(
            extent,
            dst.element_strides[i],
            src.element_strides[i],
            image[i],
            int(channel and i == 1),
            others[i] if others else (),
        )
        for i, extent in enumerate(dst.shape)
        if not isinstance(extent, int) or extent > 1
    ]
    return sorted(listed, key=lambda axis: -axis.dst)


def offsets(axes: Sequence[Axis], index: Index) -> tuple[Index, Index, Index]:
    """Where step `index` of loops begins in dst, src and an image."""
    dst: Index = 0
    src: Index = 0
    image: Index = 0
    for axis, step in zip(
        reversed(axes), reversed(places(index, [axis.extent for axis in axes])), strict=True
    ):
        dst, src = step * axis.dst + dst, step * axis.src + src
        image = step * axis.image + image if axis.image else image
    return dst, src, image


def others(axes: Sequence[Axis], index: Index, count: int) -> tuple[Index, ...]:
    """Where step `index` of loops begins in each of so many operands with axes of their own."""
    steps = places(index, [axis.extent for axis in axes])
    return tuple(offset_of(steps, [axis.others[number] for axis in axes]) for number in range(count))

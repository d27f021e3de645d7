"""A transposed convolution as ordinary ones: along an axis of stride s, outputs s apart have the same taps.

Output o = s*q + r of an axis is the sum over the taps k with k*d = o + low, modulo s, of src at
q + (r + low - k*d)/s. So the outputs of one residue r are a convolution of stride 1, of some of the taps, the
last first. With stride 1 there is one residue: the whole is a convolution with turned taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import gcd, prod
from operator import add

from fuseplan.kernels.contraction import Contraction
from fuseplan.kernels.kernel import KernelOperand
from fuseplan.kernels.packing import Packing, Reshape, Step, Take, Transpose


@dataclass(frozen=True)
class Residue:
    """Every s-th output of an axis.

    Attributes:
        begin: the first of them.
        count: how many there are.
        low: src before its first element that the first of them reads; negative where it begins inside src.
        taps: in the order in which they read src.
        step: elements of src from one tap to the next.
    """

    begin: int
    count: int
    low: int
    taps: tuple[int, ...]
    step: int

    def high(self, extent: int) -> int:
        """Elements behind an axis of src that the last output reads."""
        return max(0, self.count + (len(self.taps) - 1) * self.step - self.low - extent)


Run = tuple[Residue, ...]


def residues(conv: Contraction) -> tuple[tuple[Residue, ...], ...]:
    """The residues along each axis of a transposed convolution, as many as its stride or its outputs."""
    lows = (low for low, _ in conv.padding)
    axes = zip(conv.dst_spatial, conv.kernel, conv.stride, conv.dilation, lows, strict=True)
    return tuple(tuple(_residue(begin, *axis) for begin in range(min(axis[0], axis[2]))) for axis in axes)


def _residue(begin: int, out: int, kernel: int, stride: int, dilation: int, low: int) -> Residue:
    taps = tuple(tap for tap in reversed(range(kernel)) if (begin + low - tap * dilation) % stride == 0)
    first = (taps[0] * dilation - begin - low) // stride if taps else 0
    return Residue(begin, max(0, -(-(out - begin) // stride)), first, taps, dilation // gcd(dilation, stride))


def of_residues(conv: Contraction, of: Sequence[Residue]) -> Contraction:
    """The convolution that makes the outputs of a residue of each axis; its low padding may be negative."""
    return replace(
        conv,
        is_transposed=False,
        dst_spatial=tuple(each.count for each in of),
        kernel=tuple(len(each.taps) for each in of),
        stride=(1,) * len(of),
        dilation=tuple(each.step for each in of),
        padding=tuple((each.low, each.high(size)) for each, size in zip(of, conv.src_spatial, strict=True)),
    )


def every(conv: Contraction) -> Iterator[tuple[Run, ...]]:
    """A run of each axis in every combination that has outputs, the last axis fastest.

    The residues of a run are neighbours with as many outputs, of as many taps, from the same place of src on.
    """
    runs = (groupby(axis, lambda each: (each.count, each.low, len(each.taps))) for axis in residues(conv))
    return product(*([tuple(run) for (count, _, _), run in axis if count] for axis in runs))


def widest(conv: Contraction) -> Contraction:
    """A convolution with the outputs and the taps of the largest residue, one at least, and any's padding."""
    along = residues(conv)
    made = of_residues(conv, [max(axis, key=lambda each: len(each.taps)) for axis in along])
    return replace(
        made,
        dst_spatial=tuple(axis[0].count for axis in along),
        kernel=tuple(max(1, taps) for taps in made.kernel),
        padding=tuple(
            (max(each.low for each in axis), max(each.high(size) for each in axis))
            for axis, size in zip(along, conv.src_spatial, strict=True)
        ),
    )


def joined(conv: Contraction) -> Contraction | None:
    """The convolution whose features are those of every residue, where these read the same places of src.

    Its output q has the outputs of the remainders of o + low: q*s - low and those behind it. None where taps
    differ in number, which they do unless the stride divides the kernel, or with groups.
    """
    along = _aligned(conv)
    is_whole = all(
        len(axis) == stride and axis[0].taps for axis, stride in zip(along, conv.stride, strict=True)
    )
    kinds = [{(each.low, len(each.taps)) for each in axis} for axis in along]
    if conv.groups > 1 or not is_whole or any(len(axis) > 1 for axis in kinds):
        return None
    made = of_residues(conv, [axis[0] for axis in along])
    return replace(made, features=conv.features * prod(conv.stride))


def _aligned(conv: Contraction) -> tuple[Run, ...]:
    """The residues of the outputs from the place on where padding begins."""
    lows = (low for low, _ in conv.padding)
    spatial = tuple(map(add, conv.dst_spatial, lows))
    return residues(replace(conv, dst_spatial=spatial, padding=((0, 0),) * len(spatial)))


def by_features(weight: KernelOperand, conv: Contraction, *, last: bool) -> Packing:
    """The weight of the `joined` convolution: neighbours are features if `last`, else residues."""
    features, channels, *_ = weight.shape
    along = _aligned(conv)
    taken = [Take(2 + axis, tuple(tap for each in of for tap in each.taps)) for axis, of in enumerate(along)]
    split = [size for of in along for size in (len(of), len(of[0].taps))]
    outer, taps = range(2, 2 + len(split), 2), range(3, 3 + len(split), 2)
    order = (*outer, 0, 1, *taps) if last else (0, *outer, 1, *taps)
    joint = (features * prod(split[::2]), channels, *split[1::2])
    steps = (*taken, Reshape((features, channels, *split)), Transpose(order), Reshape(joint))
    return Packing(weight.shape, weight.dtype, steps)


def by_residue(weight: KernelOperand, conv: Contraction) -> Packing:
    """A weight with its taps along each axis by residues, one after another."""
    first, taken = len(weight.shape) - len(conv.kernel), []
    for axis, along in enumerate(residues(conv)):
        taken.append(Take(first + axis, tuple(tap for each in along for tap in each.taps)))
    return Packing(weight.shape, weight.dtype, tuple(taken))


def plain(conv: Contraction) -> Contraction:
    """The convolution that a transposed one is where it has one residue, which begins in front of src.

    An axis of one element has no stride: with a large one, each output has a residue, and at most one tap.
    """
    apart = zip(
        conv.src_spatial, conv.dst_spatial, conv.kernel, conv.stride, conv.dilation, conv.padding, strict=True
    )
    strides = (
        max(low + out, (taps - 1) * dilation + 1) if extent == 1 else stride
        for extent, out, taps, stride, dilation, (low, _) in apart
    )
    conv = replace(conv, stride=tuple(strides))
    first = [axis[0] for axis in residues(conv)]
    if max(conv.stride) > 1 or any(each.low < 0 for each in first):
        return conv
    return of_residues(conv, first)


def given_weight(made: KernelOperand, conv: Contraction) -> KernelOperand:
    """A weight (c, features/groups, *kernel) as (features, c/groups, *kernel); of a convolution, turned."""
    channels, features, *kernel = made.shape
    split = (conv.groups, channels // conv.groups, features, *kernel)
    shape = conv.weight_shape
    steps: tuple[Step, ...] = (Reshape(split), Transpose((0, 2, 1, *range(3, len(split)))), Reshape(shape))
    if not conv.is_transposed:
        steps += tuple(Take(2 + axis, tuple(reversed(range(taps)))) for axis, taps in enumerate(kernel))
    return replace(made, shape=shape, given=Packing(made.shape, made.dtype, steps))

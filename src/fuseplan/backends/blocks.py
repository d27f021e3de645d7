"""Where an operand with any axes has its elements: their places follow from the offset of an element."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf, prod

from fuseplan.kernels.counted import Counted
from fuseplan.kernels.kernel import KernelOperand
from fuseplan.language.layouts import dense
from fuseplan.language.tensor import TensorSpec

Term = tuple[tuple[int, ...], int, int]


def places(operand: KernelOperand, spec: TensorSpec) -> list[Term]:
    """The operand's index as a sum over its axes, from an element's offset in the storage of the tensor.

    Each is (outer, inner, step) for `offset % outer // inner * step`, with remainders by all of `outer` in
    order: by one, where a step along each axis is a multiple of those inside of it.
    """
    first = len(operand.shape) - len(operand.axes) + 1
    steps = dense((prod(operand.shape[:first]), *operand.shape[first:]), range(len(operand.axes)))
    blocks = operand.blocks or (1,) * len(operand.axes)
    return _places(zip(operand.axes, blocks, steps, strict=True), spec)


def counting(index: Counted, spec: TensorSpec) -> list[Term]:
    """An element's index, likewise."""
    return _places(((axis, 1, step) for axis, step in enumerate(index.steps) if step), spec)


def _places(listed: Iterable[tuple[int, int, int]], spec: TensorSpec) -> list[Term]:
    """Of axes, neighbours along them that have one element together, and steps."""
    shape = [extent if isinstance(extent, int) else inf for extent in spec.shape]  # inf: each launch says it
    every = zip(spec.element_strides, shape, strict=True)
    strides = sorted({stride for stride, extent in every if extent > 1}, reverse=True)
    found: list[Term] = []
    for axis, block, step in sorted(listed, key=lambda each: -spec.element_strides[each[0]]):
        stride = spec.element_strides[axis]
        if shape[axis] <= block:
            continue
        place: Term = _remainders([each for each in strides if each > stride]), stride * block, step
        around = place[0][-1] if place[0] else 0
        if found and found[-1][1] == around and found[-1][2] * place[1] == step * around:
            place = found.pop()[0], *place[1:]  # two axes that follow one another are one
        found.append(place)
    return found


def _remainders(strides: Sequence[int]) -> tuple[int, ...]:
    """The remainders to take, one after another; one by a multiple of the next changes nothing."""
    pairs = pairwise((*strides, 0))
    return tuple(stride for stride, inner in pairs if not inner or stride % inner)

"""A kernel with statistics over any axes as cells and elements: two groups of loops over all its tensors.

A cell is a place along the axes that are kept, an element a place along the reduced axes. A tensor's offset
is the sum of its steps along both; a tensor without an axis has the step 0 there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod

from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.language.parts import Split, part_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import leaves_of

KEPT = "kept()"  # the tensor of one cell's elements that `Lattice.keeping` adds; no key has parentheses


@dataclass(frozen=True)
class Axis:
    """One loop: how often, and the elements of a step in each of the lattice's tensors."""

    extent: int
    steps: tuple[int, ...]

    def holds(self, inner: Axis) -> bool:
        """Whether a step of this axis goes as far as all steps of `inner`, so that the two are one loop."""
        return all(step == inner.extent * below for step, below in zip(self.steps, inner.steps, strict=True))


class Lattice:
    """The loops of a kernel.

    Attributes:
        tensors: src, dst, the keys of operands and outputs, and `INDEX` where a formula reads it, in the
            order of an axis' steps; an offset of the last is the index itself.
        cells: the axes that are kept, outermost in src first.
        elements: the reduced axes, likewise.
        starts: elements from a place to that of each part, in each tensor; one row without parts.
        is_along: src's innermost axis is a reduced one.
        is_reduced: dst has one element for each cell.
    """

    starts: tuple[tuple[int, ...], ...]

    def __init__(self, kernel: Kernel) -> None:
        made = kernel.reduction
        index = [made.index] if made.index else []
        keys = [*(each.key for each in kernel.operands), *(each.key for each in kernel.outputs)]
        self.tensors = ("src", "dst", *keys, *(INDEX for _ in index))
        dst = _written(kernel.dst.element_strides, kernel.dst.shape)
        others = (_written(each.strides, each.shape) for each in kernel.outputs)
        read = (_steps(each, kernel.src.rank) for each in kernel.operands)
        steps: list[Sequence[int]] = [kernel.src.element_strides, dst, *read, *others, *index]
        extents, self.starts = kernel.src.shape, (tuple(0 for _ in steps),)
        if kernel.parts:
            extents, steps = self._in_parts(kernel, kernel.parts, steps)
        listed = [
            (place in made.over, Axis(extent, tuple(each[place] for each in steps)))
            for place, extent in enumerate(extents)
            if extent > 1
        ]
        listed.sort(key=lambda pair: -pair[1].steps[0])
        self.cells = merged(axis for is_over, axis in listed if not is_over)
        self.elements = merged(axis for is_over, axis in listed if is_over)
        self.is_along = not listed or listed[-1][0]
        reads_elements = "x" in leaves_of(kernel.epilogue[0].expression)  # the operator's own formula
        self.is_reduced = not reads_elements and all(kernel.dst.shape[place] == 1 for place in made.over)

    def keeping(self) -> Lattice:
        """The same loops, with a tensor that has the elements of one cell side by side."""
        made, step = copy(self), 1
        made.tensors, made.starts = (*self.tensors, KEPT), tuple((*each, 0) for each in self.starts)
        made.cells = tuple(replace(axis, steps=(*axis.steps, 0)) for axis in self.cells)
        made.elements = ()
        for axis in reversed(self.elements):
            made.elements = (replace(axis, steps=(*axis.steps, step)), *made.elements)
            step *= axis.extent
        return made

    def _in_parts(
        self, kernel: Kernel, split: Split, steps: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], list[Sequence[int]]]:
        """The extents and steps of part 0, where an axis is read or made in parts."""
        at = split.axis
        held = (dict(zip(each.axes, each.shape, strict=True)) for each in kernel.operands)
        along = [kernel.src.shape[at], kernel.dst.shape[at], *(each.get(at, 1) for each in held)]
        along += [each.shape[at] for each in kernel.outputs]
        counts = [split.count(extent) for extent in along] + [1] * (len(steps) - len(along))
        self._apart = dict(zip(self.tensors, (split.extent * each[at] for each in steps), strict=True))
        pairs = list(zip(steps, counts, strict=True))
        self.starts = tuple(
            tuple(split.start(part, count) * each[at] * (part < count) for each, count in pairs)
            for part in range(split.reads)
        )
        inner: list[Sequence[int]] = [
            [*each[:at], each[at] * split.step(count), *each[at + 1 :]] for each, count in pairs
        ]
        return (*kernel.src.shape[:at], split.extent, *kernel.src.shape[at + 1 :]), inner

    def start(self, leaf: str) -> int:
        """Elements from an operand's place to that of the part which a leaf names."""
        key, index = part_of(leaf)
        return 0 if index is None else index * self._apart[key]

    @property
    def cell_count(self) -> int:
        """Number of cells."""
        return prod(axis.extent for axis in self.cells)

    @property
    def element_count(self) -> int:
        """Number of elements of one cell."""
        return prod(axis.extent for axis in self.elements)

    @property
    def run(self) -> Axis:
        """The axis along which lanes lie: the innermost one of src."""
        axes = self.elements if self.is_along else self.cells
        return axes[-1] if axes else Axis(1, (0,) * len(self.tensors))

    @property
    def outer_elements(self) -> tuple[Axis, ...]:
        """The reduced axes around the lanes."""
        return self.elements[:-1] if self.is_along else self.elements

    @property
    def outer_cells(self) -> tuple[Axis, ...]:
        """The kept axes around the lanes."""
        return self.cells if self.is_along else self.cells[:-1]


def merged(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Neighbours that are one loop become one."""
    found: list[Axis] = []
    for axis in axes:
        around = found.pop().extent if found and found[-1].holds(axis) else 1
        found.append(Axis(around * axis.extent, axis.steps))
    return tuple(found)


def _steps(operand: KernelOperand, rank: int) -> list[int]:
    """An operand's steps along all axes of the kernel."""
    found = dict(zip(operand.axes, operand.strides, strict=True))
    return [found.get(axis, 0) for axis in range(rank)]


def _written(strides: Iterable[int], shape: Iterable[int]) -> list[int]:
    """The steps of a tensor that has all axes of the kernel, perhaps with extent 1."""
    return [step * (extent > 1) for step, extent in zip(strides, shape, strict=True)]

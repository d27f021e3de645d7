"""A kernel with statistics over any axes as cells and elements: two groups of loops over all its tensors.

A cell is a place along the axes that are kept, an element a place along the reduced axes. A tensor's offset
is the sum of its steps along both; a tensor without an axis has the step 0 there.

Where src's innermost axes are reduced ones that are too short for vectors, they and the innermost kept axis
may be one loop over columns: several neighbouring columns belong to one cell (`fold`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeVar, cast

from fuseplan.kernels.kernel import Kernel, KernelOperand, Output
from fuseplan.language.layouts import dense, image_strides
from fuseplan.language.parts import Split, part_of
from fuseplan.language.reduction import INDEX
from fuseplan.scalar import leaves_of

A = TypeVar("A", bound="Loop")
KEPT = "kept()"  # the tensor of one cell's elements that `Lattice.keeping` adds; no key has parentheses


class Loop(Protocol):
    """The fields of a loop, which is a dataclass."""

    @property
    def extent(self) -> int:
        """Steps."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements of a step in each tensor."""


@dataclass(frozen=True)
class Axis:
    """One loop: how often, and the elements of a step in each of the lattice's tensors."""

    extent: int
    steps: tuple[int, ...]


class Lattice:
    """The loops of a kernel.

    Args:
        kernel: has statistics.
        folded: lanes are columns of which several belong to a cell; only where `can_fold`.

    Attributes:
        tensors: src, dst, the keys of operands, outputs and indices, and `INDEX` where a formula reads it,
            in the order of an axis' steps; an offset of an index is the index itself.
        cells: the axes that are kept, outermost in src first; folded, the last one is that of the columns.
        elements: the reduced axes, likewise.
        starts: elements from a place to that of each part, in each tensor; one row without parts.
        is_along: src's innermost axis is a reduced one, and lanes lie along it.
        is_reduced: dst has one element for each cell.
        inner, inner_extent, inner_step, of_runs: the statistics of runs of a cell's elements, the elements of
            a run, or 0, the step that has them, and the outputs that are made of their numbers.
        fold: columns that belong to one cell.
        uneven: the tensors with one element for all columns of a cell.
        cell_steps: a step to the next cell of a run of columns, in each tensor.
    """

    starts: tuple[tuple[int, ...], ...]

    def __init__(self, kernel: Kernel, *, folded: bool = False) -> None:
        made = kernel.reduction
        index = [*(each.steps for each in kernel.indices), *([made.index] if made.index else [])]
        keys = [*(each.key for each in kernel.operands), *(each.key for each in kernel.outputs)]
        keys += [each.key for each in kernel.indices]
        self.tensors = ("src", "dst", *keys, *([INDEX] if made.index else []))
        dst = _written(kernel.dst.element_strides, kernel.dst.shape)
        others = (_output_steps(kernel, each) for each in kernel.outputs)
        read = (_operand_steps(kernel, each) for each in kernel.operands)
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
        self.inner = made.inner
        self.inner_extent = prod(kernel.src.shape[axis] for axis in made.inner_over) if made.inner else 0
        behind = (stage.step for stage in kernel.epilogue if made.run_names & leaves_of(stage.expression))
        self.inner_step = next(behind, None)
        self.of_runs = tuple(each for each in kernel.results if made.run_names & leaves_of(each.expression))
        self.fold, self.uneven, self.cell_steps = 1, frozenset[str](), (0,) * len(self.tensors)
        if folded:
            self._fold()

    def keeping(self) -> Lattice:
        """The same loops, with a tensor that has the elements of one cell side by side."""
        made, step = copy(self), 1
        made.tensors, made.starts = (*self.tensors, KEPT), tuple((*each, 0) for each in self.starts)
        made.cells = tuple(replace(axis, steps=(*axis.steps, 0)) for axis in self.cells)
        made.cell_steps, made.elements = (*self.cell_steps, 0), ()
        for axis in reversed(self.elements):
            made.elements = (replace(axis, steps=(*axis.steps, step)), *made.elements)
            step *= axis.extent
        return made

    def _in_parts(
        self, kernel: Kernel, split: Split, steps: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], list[Sequence[int]]]:
        """The extents and steps of part 0, where an axis is read or made in parts."""
        at = split.axis
        # An operand of one element has no axes.
        held = (dict(zip(each.axes, each.shape, strict=bool(each.axes))) for each in kernel.operands)
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

    def start(self, leaf: str, part: int) -> int:
        """Elements from the place that an operand has in a part to that of the part which a leaf names."""
        key, index = part_of(leaf)
        own = self.starts[part][self.tensors.index(key)]
        return 0 if index is None else index * self._apart[key] - own

    @property
    def can_fold(self) -> bool:
        """Whether the innermost kept axis and the reduced axes in it are one loop."""
        if not (self.is_along and self.cells and self.elements) or self.is_reduced or len(self.starts) > 1:
            return False
        around, inner, run = self.elements[:-1], self.elements[-1], self.cells[-1]
        rows = [axis for axis in around if axis.steps[0] > run.steps[0]]
        is_alone = len(rows) == len(around) and inner.steps[0] == 1 and run.steps[0] == inner.extent
        uneven = self._uneven(run, inner)
        return is_alone and not any(axis.steps[place] for place in uneven for axis in (inner, *rows))

    def _uneven(self, run: Axis, inner: Axis) -> list[int]:
        """The tensors in which the two axes are not one."""
        pairs = enumerate(zip(run.steps, inner.steps, strict=True))
        return [place for place, (step, below) in pairs if step != inner.extent * below]

    def _fold(self) -> None:
        if not self.can_fold:
            raise ValueError("no columns: a cell's innermost elements and the next cell's are not one loop")
        run, inner = self.cells[-1], self.elements[-1]
        self.uneven = frozenset(self.tensors[place] for place in self._uneven(run, inner))
        self.fold, self.cell_steps, self.is_along = inner.extent, run.steps, False
        self.cells = (*self.cells[:-1], Axis(run.extent * inner.extent, inner.steps))
        self.elements = self.elements[:-1]

    @property
    def cell_count(self) -> int:
        """Number of cells."""
        return prod(axis.extent for axis in self.cells) // self.fold

    @property
    def element_count(self) -> int:
        """Number of elements of one cell."""
        return prod(axis.extent for axis in self.elements) * self.fold

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


def are_one(axis: Loop, inner: Loop) -> bool:
    """Whether a step of an axis goes as far as all steps of the one inside, so that the two are one loop."""
    return all(step == below * inner.extent for step, below in zip(axis.steps, inner.steps, strict=True))


def merged(axes: Iterable[A]) -> tuple[A, ...]:
    """Axes, of which neighbours that are one loop become one."""
    found: list[A] = []
    for axis in axes:
        around = found.pop().extent if found and are_one(found[-1], axis) else 1
        found.append(replace(cast(Any, axis), extent=axis.extent * around))
    return tuple(found)


def _operand_steps(kernel: Kernel, operand: KernelOperand) -> list[int]:
    """An operand's steps along all axes of the kernel; none where its places follow from those of dst."""
    rank, dst = kernel.src.rank, kernel.dst
    strides: Sequence[int] = operand.strides
    if kernel.has_cells and operand.axes:
        strides = _written(operand.strides, operand.shape)
    if not kernel.has_cells:
        if not operand.packed:
            return list(dst.element_strides)
        if operand.is_scattered:
            return [0] * rank
        first = len(operand.shape) - len(operand.axes) + 1
        strides = dense((prod(operand.shape[:first]), *operand.shape[first:]), range(len(operand.axes)))
        if operand.is_inside and len(operand.axes) == rank - 1:
            strides = image_strides(dst.shape, dst.element_strides)[1:]
    found = dict(zip(operand.axes, strides, strict=False))
    return [found.get(axis, 0) for axis in range(rank)]


def _output_steps(kernel: Kernel, made: Output) -> list[int]:
    """An output's steps along all axes of the kernel."""
    if kernel.has_cells:
        return _written(made.strides, made.shape)
    if made.after is not None:
        return _written(kernel.dst.element_strides, kernel.dst.shape)
    found = dict(zip(made.axes, dense(made.shape, range(len(made.axes))), strict=True))
    return [found.get(axis, 0) for axis in range(kernel.src.rank)]


def _written(strides: Iterable[int], shape: Iterable[int]) -> list[int]:
    """The steps of a tensor that has all axes of the kernel, perhaps with extent 1."""
    return [step * (extent > 1) for step, extent in zip(strides, shape, strict=True)]

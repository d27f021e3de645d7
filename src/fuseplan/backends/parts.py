"""Where the parts of an axis lie, for kernels that go over the places of a part."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.opened import resized
from fuseplan.kernels.packing import Pad, Reshape, Step, Transpose
from fuseplan.language.parts import Split, part_of
from fuseplan.language.tensor import TensorSpec

WHOLE = Split(0, 1, 1, 1)  # of a kernel without parts: its tensors are the only part


@dataclass(frozen=True)
class End:
    """One end of a pointwise kernel: src and the stages before the parts meet, or dst and those behind.

    Attributes:
        spec: part 0 of the tensor.
        starts: elements from there to each part.
        role: of the stages that are applied to these parts: `prologue` or `epilogue`.
        split: the kernel's.
    """

    spec: TensorSpec
    starts: tuple[int, ...]
    role: str
    split: Split

    @classmethod
    def of(cls, kernel: Kernel, role: str) -> End:
        """The end of a kernel whose stages have that role."""
        split = WHOLE if kernel.parts is None or kernel.centre else kernel.parts
        spec, count = (kernel.src, split.reads) if role == "prologue" else (kernel.dst, split.makes)
        if count == 1:
            return cls(spec, (0,), role, split)
        shape, strides = list(spec.shape), list(spec.element_strides)
        along = strides[split.axis]
        shape[split.axis], strides[split.axis] = split.extent, along * split.step(count)
        starts = tuple(split.start(index, count) * along for index in range(count))
        numbers = [extent if isinstance(extent, int) else 2 for extent in shape]  # of 1, no stride matters
        part = TensorSpec(numbers, spec.dtype, strides=strides)
        return cls(part if numbers == shape else resized(part, 0, shape[0]), starts, role, split)

    def strides(self, operand: KernelOperand) -> tuple[int, ...]:
        """Elements of an operand with axes of its own from a place to the next along each axis."""
        found = [0] * self.spec.rank
        for axis, stride in zip(operand.axes, operand.strides, strict=True):
            found[axis] = stride * (self.split.step(len(self.starts)) if self._is_whole(operand, axis) else 1)
        return tuple(found)

    def start(self, operand: KernelOperand, leaf: str, number: int) -> int:
        """Elements of such an operand to the first place that a leaf means in part `number` of the tensor."""
        _, index = part_of(leaf)
        for axis, stride in zip(operand.axes, operand.strides, strict=True):
            if axis == self.split.axis and index is not None:
                return index * self.split.extent * stride
            if self._is_whole(operand, axis):
                return self.split.start(number, len(self.starts)) * stride
        return 0

    def _is_whole(self, operand: KernelOperand, axis: int) -> bool:
        """Whether the operand goes along all parts of the axis."""
        extent = operand.shape[operand.axes.index(axis)]
        return axis == self.split.axis and extent == self.split.extent * len(self.starts)


def ends(kernel: Kernel) -> tuple[End, End]:
    """The ends of a pointwise kernel."""
    return End.of(kernel, "prologue"), End.of(kernel, "epilogue")


def gates_beside(
    split: Split | None, extent: int, width: int, inner: tuple[int, ...] = ()
) -> tuple[Step, ...]:
    """Steps of a packing that bring the two parts of its first axis together, `width` of each in turn.

    Args:
        split: how the parts lie; None: there is nothing to do, nor where neighbours stay neighbours.
        extent: elements of a part afterwards, a multiple of `width`: zeros follow its own.
        width: elements that stay together.
        inner: the other axes.
    """
    if split is None or (split.interleaved and (width, extent) == (1, split.extent)):
        return ()
    behind = tuple(range(2, 2 + len(inner)))
    by_parts: tuple[Step, ...] = (Reshape((2, split.extent, *inner)),)
    if split.interleaved:
        by_parts = (Reshape((split.extent, 2, *inner)), Transpose((1, 0, *behind)))
    return (
        *by_parts,
        Pad((2, extent, *inner)),
        Reshape((2, extent // width, width, *inner)),
        Transpose((1, 0, 2, *(axis + 1 for axis in behind))),
        Reshape((2 * extent, *inner)),
    )

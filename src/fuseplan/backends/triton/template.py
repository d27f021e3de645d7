"""What the templates for GPUs share: the order in which a kernel reads its operands."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.parts import gates_beside
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing, Pad, Step, Transpose, storage_axes
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template, Traffic, moved_once


@dataclass(frozen=True)
class GpuTemplate(Template):
    """A template whose operands torch packs on the device."""

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """How the kernel reads an operand per channel, per activation or shared: dense, in the compute dtype.

        Per activation, one image in the order in which the tensor it is applied to is stored. Between a
        contraction and a gated product, gate and value take turns. A weight: as `packed_weight` says.
        """
        if operand.role == "weight":
            return self.packed_weight(kernel)
        ordered: tuple[Step, ...] = ()
        if operand.is_inside and 1 in operand.axes:
            ordered = (Transpose(storage_axes(kernel.shape_of(operand))),)
        if operand.role == "between" and operand.is_channel and kernel.parts:
            ordered = gates_beside(kernel.parts, kernel.parts.extent, 1)
        return Packing(operand.shape, kernel.compute_dtype, ordered)

    def traffic(self, kernel: Kernel, target: Target) -> Traffic:
        return moved_once(kernel, self.kept_bytes(kernel, target))

    def kept_bytes(self, kernel: Kernel, target: Target) -> int:
        """Bytes of the workspace that a launch writes and reads again."""
        return 0

    def packed_weight(self, kernel: Kernel) -> Packing:
        """How the kernel reads a weight."""
        raise ValueError(f"{self.name} reads no weight: only its template can pack it")


def weight_packing(
    operand: KernelOperand,
    axes: tuple[int, ...],
    extents: tuple[int, ...] | None = None,
    *,
    gates: tuple[Step, ...] = (),
    last: tuple[Step, ...] = (),
) -> Packing:
    """How a weight is read on a GPU: in its own dtype, its axes in the order `axes`.

    Args:
        axes: the logical axis that stands at each place, outermost first.
        extents: in that order; zeros follow the operand's own.
        gates: steps that bring gates and values together.
        last: steps that make other numbers of the elements.
    """
    padded = () if extents is None else (Pad(extents),)
    return Packing(operand.shape, operand.dtype, (Transpose(axes), *gates, *padded, *last))

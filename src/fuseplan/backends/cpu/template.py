"""What the templates for CPUs share: the order in which a kernel reads its operands."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.backends.parts import gates_beside
from fuseplan.kernels.kernel import Kernel, KernelOperand
from fuseplan.kernels.packing import Packing, Pad, Reshape, Step, Transpose, storage_axes
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template, lanes


@dataclass(frozen=True)
class CpuTemplate(Template):
    """A template whose operands are packed in the compute dtype, to whole vectors."""

    def packing(self, kernel: Kernel, target: Target, operand: KernelOperand) -> Packing:
        """How the kernel reads an operand that is no weight; zeros follow to the end of a vector.

        per channel, per position and along axes: in order. per activation: in the order in which one image of
        the tensor it is applied to is stored. shared: its one element. Between a contraction and a gated
        product: of all gates, then of all values. A weight: as `weight_steps` says.

        Raises:
            ValueError: the operand is per element, or a weight of which the template does not say it.
        """
        if operand.role == "weight":
            steps = (Transpose(operand.axes), *self.weight_steps(kernel, target))
            return Packing(operand.shape, kernel.compute_dtype, steps)
        if not operand.packed:
            raise ValueError(f"operand {operand.key} lies as dst does: only its template can pack it")
        ordered: tuple[Step, ...] = ()
        if operand.is_inside and 1 in operand.axes:
            ordered = (Transpose(storage_axes(kernel.shape_of(operand))),)
        if operand.role == "between" and operand.is_channel and kernel.parts:
            ordered = gates_beside(kernel.parts, kernel.parts.extent, kernel.parts.extent)
        width = lanes(kernel, target)
        padded = (Reshape((operand.size,)), Pad((-(-operand.size // width) * width,)))
        return Packing(operand.shape, kernel.compute_dtype, (*ordered, *padded))

    def weight_steps(self, kernel: Kernel, target: Target) -> tuple[Step, ...]:
        """How the kernel reads a weight, whose axes come in canonical order, in the compute dtype."""
        raise ValueError(f"{self.name} reads no weight: only its template can pack it")

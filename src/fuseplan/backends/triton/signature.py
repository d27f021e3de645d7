"""The types of a kernel's arguments, as Triton writes them."""

from __future__ import annotations

from fuseplan.kernels.emit import Slot, Source
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.kernels.template import Template
from fuseplan.language.declarations import IN_PLACE
from fuseplan.language.dtypes import dtype_of

# Counters are the workspace's usual content; a kernel casts it where it keeps something else.
_KINDS = {"workspace": "*i32", "extent": "i64"}


def types_of(source: Source, kernel: Kernel, template: Template, target: Target) -> tuple[str, ...]:
    """Triton's type of every argument, in the order of the slots.

    A tensor map is a `tensordesc`, a parameter by value a number of the compute dtype, the extent of open
    axes an `i64`, for no value of which the code is specialised. Everything else is a pointer: to src's,
    dst's and a result's dtype, to the dtype an operand is packed in, to int32 for the workspace.
    """
    return tuple(_type(slot, kernel, template, target) for slot in source.slots)


def _type(slot: Slot, kernel: Kernel, template: Template, target: Target) -> str:
    if slot.map is not None:
        return f"tensordesc<{dtype_of(slot.map.dtype).triton}[{', '.join(map(str, slot.map.box))}]>"
    if slot.kind == "parameter":
        return dtype_of(kernel.compute_dtype).triton
    if slot.kind in _KINDS:
        return _KINDS[slot.kind]
    return "*" + dtype_of(_element(slot, kernel, template, target)).triton


def _element(slot: Slot, kernel: Kernel, template: Template, target: Target) -> str:
    """The dtype that a pointer points to."""
    if slot.kind == "parameters":
        return kernel.compute_dtype
    if slot.kind == "result":
        return next(output.dtype for output in kernel.outputs if output.key == slot.key)
    if slot.kind != "operand":
        return (kernel.src if slot.kind == "src" else kernel.dst).dtype
    operand = kernel.operand(slot.key)
    return operand.dtype if operand.per in IN_PLACE else template.packing(kernel, target, operand).dtype

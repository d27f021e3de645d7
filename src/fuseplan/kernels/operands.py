"""The operands of a kernel: their axes in the kernel's order, and where they lie along them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuseplan.kernels.kernel import KernelOperand
from fuseplan.language.declarations import Operand
from fuseplan.language.layouts import dense
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.step import Step


def operands_of(
    steps: Sequence[Step], role: str, places: Sequence[int] | None = None
) -> Iterator[KernelOperand]:
    """Those of steps, in order."""
    for step in steps:
        for each in step.operands:
            yield operand_of(each, step.src, role, places)


def operand_of(
    made: Operand,
    src: TensorSpec,
    role: str,
    places: Sequence[int] | None = None,
    order: list[int] | None = None,
) -> KernelOperand:
    """The operand with its axes in the kernel's order.

    Args:
        src: of the operator that takes it.
        places: the kernel's axis of each of src's; n, c, spatial unless given.
        order: of the operand's axes; that of the kernel's axes unless given.
    """
    where = src.places if places is None else places
    if order is None:
        steps = src.element_strides
        order = sorted(range(len(made.axes)), key=lambda at: (where[made.axes[at]], -steps[made.axes[at]]))
    axes = tuple(dict.fromkeys(where[made.axes[at]] for at in order))
    blocks = tuple(made.block if axis == where[src.channel_axis] else 1 for axis in axes)
    return KernelOperand(
        made.key,
        axes,
        tuple(made.shape[at] for at in order) or made.shape,
        made.dtype,
        role,
        () if order == list(range(len(order))) else tuple(order),
        blocks=blocks if made.block > 1 else (),
        packed=made.spec is None,
    )


def roaming(made: Operand, src: TensorSpec, role: str) -> KernelOperand:
    """The operand where an axis is read in parts: it lies in the plan's order, and has strides."""
    lowered = operand_of(made, src, role)
    if not (lowered.packed and lowered.axes):
        return lowered
    axes = tuple(src.places[axis] for axis in made.axes)
    return replace(
        lowered, axes=axes, shape=made.shape, order=(), strides=dense(made.shape, range(len(axes)))
    )


def placed(made: Operand, step: Step, role: str, places: Sequence[int]) -> KernelOperand:
    """An operand of a kernel whose statistics are over any axes: `places` are the axes of the step's src.

    Packed elements stand in the order in which src lies, so that a run of src's meets a run of theirs.
    """
    steps = step.src.element_strides
    order = sorted(range(len(made.axes)), key=lambda at: -steps[made.axes[at]])
    lowered = operand_of(made, step.src, role, places, order if made.spec is None else None)
    strides = dense(lowered.shape, range(len(lowered.shape)))
    if not lowered.packed:
        lies = step.dst if made.per == "element" or made.spec is None else made.spec
        strides = tuple(lies.element_strides[axis] for axis in lowered.order or range(len(strides)))
    return replace(lowered, strides=strides if lowered.axes else ())

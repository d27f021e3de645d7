"""An axis of which a statistic sees one run at a time, as two axes of the kernel."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.kernels.gradients import KernelTensor
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import behind_runs, in_runs
from fuseplan.language.parts import Split
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.step import Step


def split_step(step: Step, axis: int, length: int) -> Step:
    """The step where an axis of all its tensors is two: the runs, and the elements of each, so many."""

    def tensor(spec: TensorSpec) -> TensorSpec:
        shape, strides = in_runs(spec.shape, (axis, spec.shape[axis] // length)), spec.element_strides
        around = (strides[axis] * shape[axis + 1],)
        return KernelTensor(shape, spec.dtype, strides=(*strides[:axis], *around, *strides[axis:]))

    def operand(made: Operand) -> Operand:
        axes = behind_runs(made.axes, axis)
        if axis not in made.axes:
            return replace(made, axes=axes)
        place = made.axes.index(axis)
        shape = in_runs(made.shape, (place, made.shape[place] // length))
        return replace(made, shape=shape, axes=(*axes[:place], axis, *axes[place:]))

    def by_run(made: Result) -> Result:
        return replace(made, axes=tuple(each + (each > axis) for each in made.axes))

    return replace(
        step,
        src=tensor(step.src),
        dst=tensor(step.dst),
        operands=tuple(map(operand, step.operands)),
        results=tuple(map(by_run, step.results)),
    )


def parts_in_runs(split: Split, axis: int, length: int) -> Split:
    """The parts of an axis where `axis` is two; where it is theirs, they are whole runs."""
    if split.axis == axis:
        return replace(split, extent=split.extent // length)
    return replace(split, axis=split.axis + (split.axis > axis))

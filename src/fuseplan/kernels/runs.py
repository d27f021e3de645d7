"""An axis of which a statistic sees one run at a time, as two axes of the kernel."""

from __future__ import annotations

from dataclasses import replace

from fuseplan.kernels.gradients import KernelTensor
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import behind_runs, in_runs
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.step import Step


def split_step(step: Step, split: tuple[int, int]) -> Step:
    """The step where an axis of all its tensors is two: so many runs, and the elements of each."""
    axis = split[0]

    def tensor(spec: TensorSpec) -> TensorSpec:
        shape, strides = in_runs(spec.shape, split), spec.element_strides
        around = (strides[axis] * shape[axis + 1],)
        return KernelTensor(shape, spec.dtype, strides=(*strides[:axis], *around, *strides[axis:]))

    def operand(made: Operand) -> Operand:
        axes = behind_runs(made.axes, axis)
        if axis not in made.axes:
            return replace(made, axes=axes)
        place = made.axes.index(axis)
        shape = in_runs(made.shape, (place, split[1]))
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

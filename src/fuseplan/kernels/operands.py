"""The operands of a kernel: their axes in the kernel's order, and where they lie along them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuseplan.kernels.contracted import KernelTensor
from fuseplan.kernels.kernel import KernelOperand, Output
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.layouts import behind_runs, dense, in_runs
from fuseplan.language.parts import Split
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.step import Step
from fuseplan.scalar import Scalar


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


def spread(spec: TensorSpec, places: Sequence[int], rank: int) -> TensorSpec:
    """The same elements with so many axes: the tensor's own are at the places, others have extent 1."""
    shape, strides = [1] * rank, [1] * rank
    for place, extent, stride in zip(places, spec.shape, spec.element_strides, strict=True):
        shape[place], strides[place] = extent, stride
    return KernelTensor(shape, spec.dtype, strides=strides)


def placed_output(
    made: Output, step: Step, centre: Step, places: Sequence[int], behind: Sequence[int]
) -> Output:
    """A saved value with its places in a kernel whose statistics are over any axes."""
    spec = spread(step.dst, places if step.index < centre.index else behind, _rank(places))
    return replace(made, shape=spec.shape, strides=spec.element_strides)


def placed_result(made: Result, formula: Scalar, places: Sequence[int], over: tuple[int, ...] = ()) -> Output:
    """A result of statistics over any axes: the extents and strides of its own axes, 1 along the others.

    It is a sum `over` axes of src where there are any.
    """
    shape, strides = [1] * _rank(places), [1] * _rank(places)
    for axis, extent, stride in zip(made.axes, made.shape, made.spec.element_strides, strict=bool(made.axes)):
        shape[places[axis]], strides[places[axis]] = extent, stride
    all_axes, lies = tuple(range(len(shape))), tuple(strides)
    return Output(made.key, all_axes, tuple(shape), made.dtype, formula, made.updated, None, lies, over)


def _rank(places: Sequence[int]) -> int:
    """The kernel's axes, where src's are at these places: a vector is one row."""
    return max(2, len(places))


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

    by_run = (tuple(each + (each > axis) for each in made.axes) for made in step.results)
    return replace(
        step,
        src=tensor(step.src),
        dst=tensor(step.dst),
        operands=tuple(map(operand, step.operands)),
        results=tuple(replace(made, axes=axes) for made, axes in zip(step.results, by_run, strict=True)),
    )


def parts_in_runs(split: Split, axis: int, length: int) -> Split:
    """The parts of an axis where `axis` is two; where it is theirs, they are whole runs."""
    if split.axis == axis:
        return replace(split, extent=split.extent // length)
    return replace(split, axis=split.axis + (split.axis > axis))

"""The second stage: the matched steps as a kernel record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuseplan.kernels.centre import Reduction, Summary, Unary
from fuseplan.kernels.contracted import NO_WINDOW, contraction, gradient
from fuseplan.kernels.counted import counted
from fuseplan.kernels.joined import centres, numbered, results, runs_of, statistics, sums, with_inner
from fuseplan.kernels.kernel import Kernel, KernelOperand, Output, Stage
from fuseplan.kernels.lookup import reads_rows
from fuseplan.kernels.match import Match, row_stride, rows_of
from fuseplan.kernels.operands import (
    operand_of,
    operands_of,
    parts_in_runs,
    placed,
    placed_output,
    placed_result,
    roaming,
    split_step,
    spread,
)
from fuseplan.kernels.transposed import given_weight
from fuseplan.language.declarations import Result
from fuseplan.language.layouts import behind_runs, dense
from fuseplan.language.parts import Split
from fuseplan.language.reduction import INDEX
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.attention import Attending
from fuseplan.ops.conv import ConvTranspose
from fuseplan.ops.gradient import ConvWeightGradient, LinearWeightGradient
from fuseplan.ops.matmul import Product
from fuseplan.ops.normalization import Normalization, reduced_axes
from fuseplan.ops.parts import Parted
from fuseplan.ops.ranges import RANGES, Save, Within
from fuseplan.ops.scan import UnaryOp
from fuseplan.plans.step import Step
from fuseplan.plans.text import operator_text
from fuseplan.scalar import CASTS, Scalar, leaf, leaves_of


def lower(match: Match) -> Kernel:
    """The kernel of a match: its centre, and the elementwise stages before and after it."""
    *others, last = match.steps
    kernel = _lowered(others if isinstance(last.op, RANGES) and others else match.steps)
    if isinstance(last.op, Within) and last.dst.layout != last.src.layout:
        # No template writes ranges of reductions, nor of weight gradients, whose axes are others.
        has_own_axes = kernel.has_cells or kernel.dst.rank != last.src.rank
        dst = kernel.dst if has_own_axes else last.src.canonical
        if last.op.layout is not None and not has_own_axes:
            dst = TensorSpec(dst.shape, dst.dtype, last.op.layout)
        kernel = replace(kernel, dst=dst, whole=last.op.features)
    if not match.opened:
        return kernel
    axis = 1 if kernel.statistics and not kernel.has_cells else 0  # rows are channels
    each = kernel.src.shape[axis] // match.steps[0].src.batch
    return replace(kernel, open_axis=axis, open_each=each, open_keys=match.opened)


@reads_rows
def _lowered(steps: Sequence[Step]) -> Kernel:
    centre = next((step for step in steps if step.op.kind != "elementwise"), None)
    if centre is None:
        return _pointwise(steps)
    before, after = steps[: centre.index], steps[centre.index + 1 :]
    if isinstance(centre.op, Attending):
        return _attention(steps, centre, after)
    if isinstance(centre.op, UnaryOp):
        return _unary(steps, before, centre, after)
    if isinstance(centre.op, Normalization):
        return _normalization(steps, before, centre, after)
    if centre.op.is_gradient:
        return _weight_gradient(steps, before, centre, after)
    behind = next((step for step in after if isinstance(step.op, Normalization)), None)
    if behind is not None:
        return _summary(steps, behind)
    return _contraction(steps, before, centre, after)


def _summary(steps: Sequence[Step], behind: Step) -> Kernel:
    """A contraction, and statistics of its result: the kernels of both halves as one."""
    head, tail = steps[: behind.index], steps[behind.index :]
    first, last = _lowered(head), _normalization(tail, (), behind, tail[1:])
    assert isinstance(last.centre, Reduction)  # by what lowers statistics
    between = [replace(each, role="between") if each.role == "epilogue" else each for each in first.operands]
    return replace(
        last,
        src=first.src,
        prologue=first.prologue,
        centre=Summary(first.contraction, last.centre),
        between=first.epilogue,
        operands=(*between, *last.operands),
        parameters=(*first.parameters, *last.parameters),
    )


def _attention(steps: Sequence[Step], centre: Step, after: Sequence[Step]) -> Kernel:
    """Key, value, and what hides scores or is added to them, are read where they lie."""
    op = centre.op
    assert isinstance(op, Attending)  # by its kind
    kernel = _kernel(steps, (), after)
    beside = [
        replace(operand_of(each, centre.src, each.name), strides=each.spec.element_strides)
        for each in centre.operands
        if each.spec is not None
    ]
    made = (_result(each, centre.src, leaf(each.key)) for each in centre.results)
    return replace(
        kernel,
        centre=op.centre(centre.src),
        operands=(*beside, *operands_of(after, "epilogue")),
        outputs=(*made, *kernel.outputs),
    )


def _unary(steps: Sequence[Step], before: Sequence[Step], centre: Step, after: Sequence[Step]) -> Kernel:
    """A centre of src alone; every operand has a step along each axis of the kernel."""
    op, src = centre.op, centre.src
    assert isinstance(op, UnaryOp)  # by its kind
    axis = op.axis_of(src)
    made = Unary(op.along_axis(src.places[axis]), src.shape[axis], src.size)
    listed = ((step, "prologue" if step in before else "epilogue") for step in steps)
    found = (placed(each, step, role, step.src.places) for step, role in listed for each in step.operands)
    return replace(_kernel(steps, before, after), centre=made, operands=tuple(found))


def _kernel(steps: Sequence[Step], before: Sequence[Step], after: Sequence[Step]) -> Kernel:
    """A kernel of elementwise stages alone; all tensors but src lie as dst does."""
    return Kernel(
        src=steps[0].src.canonical,
        dst=steps[-1].dst.canonical,
        prologue=tuple(map(_stage, before)),
        centre=None,
        epilogue=_rounded_once(tuple(map(_stage, after)), steps[-1].dst.dtype),
        operands=tuple(operands_of(steps, "epilogue")),
        parameters=tuple(each.key for step in steps for each in step.parameters),
        outputs=tuple(map(_saved, (step for step in steps if isinstance(step.op, Save)))),
        indices=(*counted(before, "prologue"), *counted(after, "epilogue")),
    )


def _pointwise(steps: Sequence[Step]) -> Kernel:
    """A kernel of elementwise operators; those in front of one that reads parts are applied to each part."""
    parted = next((step for step in steps if isinstance(step.op, Parted)), None)
    if parted is None:
        return _kernel(steps, (), steps)
    before, after = steps[: parted.index], steps[parted.index :]
    operands = tuple(
        roaming(each, step.src, "prologue" if step in before else "epilogue")
        for step in steps
        for each in step.operands
    )
    return replace(_kernel(steps, before, after), parts=split_of(parted), operands=operands)


def _contraction(
    steps: Sequence[Step], before: Sequence[Step], centre: Step, after: Sequence[Step]
) -> Kernel:
    """A contraction; where its result is read in parts, elementwise operators may stand between the two."""
    parted = next((step for step in after if step.op.has_parts), None)
    meeting = centre.index + 1 if parted is None else parted.index
    between, behind = steps[centre.index + 1 : meeting], steps[meeting:]
    return replace(
        _kernel(steps, before, behind),
        centre=contraction(centre),
        operands=(
            *operands_of(before, "prologue"),
            *_weights(centre),
            *operands_of(between, "between"),
            *operands_of(behind, "epilogue"),
        ),
        parts=None if parted is None else split_of(parted),
        between=tuple(map(_stage, between)),
    )


def _weight_gradient(
    steps: Sequence[Step], before: Sequence[Step], centre: Step, after: Sequence[Step]
) -> Kernel:
    """A contraction over images and positions, or rows; the elements of src lie as the plan has them."""
    op, src = centre.op, steps[0].src
    if isinstance(op, ConvWeightGradient):
        made = gradient(src.canonical, op.features, op.groups, op.window(src), op.precision)
    else:
        assert isinstance(op, LinearWeightGradient)  # by its kind
        rows = rows_of(src)
        matrix = TensorSpec(rows.shape[1:], rows.dtype, strides=rows.element_strides[1:])
        made = gradient(matrix, op.features, 1, NO_WINDOW, op.precision)
    (grad,) = centre.operands
    return replace(
        _kernel(steps, before, after),
        src=made.src,
        dst=made.dst(steps[-1].dst.dtype),
        centre=replace(made.convolution, written=operator_text(op)),
        operands=(made.weight(grad),),
    )


def split_of(step: Step) -> Split:
    """The parts that a step reads and makes; the axis in the order n, c, spatial."""
    assert isinstance(step.op, Parted)
    split = step.op.split(step.src)
    return replace(split, axis=step.src.places[split.axis])


def _rounded_once(stages: tuple[Stage, ...], dtype: str) -> tuple[Stage, ...]:
    """The stages, the last one without its own rounding to the dtype, which the store does."""
    if not stages or CASTS.get(stages[-1].expression.fn) != dtype:
        return stages
    return (*stages[:-1], replace(stages[-1], expression=stages[-1].expression.args[0]))


def _normalization(
    steps: Sequence[Step], before: Sequence[Step], centre: Step, after: Sequence[Step]
) -> Kernel:
    """Reductions of the prologue's result; the element's formula is the first stage behind them."""
    op = centre.op
    assert isinstance(op, Normalization)  # by its kind
    made = Reduction(statistics(steps), (0, 2), "channel")
    kernel = replace(_kernel(steps, before, (centre, *after)), centre=made)
    if centres(after) or any(step.op.has_parts for step in steps):
        return _over_axes(kernel, steps, centre)
    # No step along an axis finds the element that a block of neighbours has together.
    has_blocks = any(operand.block > 1 for step in steps for operand in step.operands)
    in_blocks = not steps[0].index and has_blocks and not op.sums(centre.leaves, centre.src)
    if op.per == "row" and in_blocks and _are_rows(steps):
        return _in_rows(kernel, steps)
    if op.per not in ("channel", "activation"):
        return _over_axes(kernel, steps, centre)
    per = op.per if kernel.src.rank > 2 else "channel"  # an image of one position
    return replace(
        kernel,
        centre=replace(made, over=reduced_axes(per, kernel.src.rank), per=per),
        outputs=(*(_result(each, centre.src, formula) for each, formula in results(centre)), *kernel.outputs),
    )


def _in_rows(kernel: Kernel, steps: Sequence[Step]) -> Kernel:
    """The kernel of one image whose channels are rows, and whose positions are a row's elements.

    Rows are so where an operand has one element for a block of neighbours: a reduction over cells reads none.
    """
    src = steps[0].src
    places = [2 if axis == src.channel_axis else 1 for axis in range(src.rank)]
    given = operands_of(steps, "epilogue", places)
    return replace(
        kernel,
        src=rows_of(src),
        dst=rows_of(steps[-1].dst),
        operands=tuple(
            replace(each, axes=()) if each.axes == (2,) and each.size == 1 else each for each in given
        ),
        outputs=tuple(replace(each, shape=steps[-1].dst.shape) for each in kernel.outputs),
    )


def _are_rows(steps: Sequence[Step]) -> bool:
    """Whether rows are evenly spaced, nothing is counted, and no operand differs between rows of an image."""
    is_even = all(row_stride(spec) is not None for spec in (steps[0].src, steps[-1].dst))
    is_even = is_even and not any(step.indices for step in steps)
    given = ({*each.axes} - {step.src.channel_axis} for step in steps for each in step.operands)
    return is_even and all(len(axes) in (0, steps[0].src.rank - 1) for axes in given)


def _over_axes(kernel: Kernel, steps: Sequence[Step], centre: Step) -> Kernel:
    """The kernel of statistics over any axes; behind them, tensors may have fewer axes than src."""
    op = centre.op
    assert isinstance(op, Normalization)  # by its kind
    axes, removed, inner = op.over(centre.src), op.removes(centre.src), runs_of(steps)
    split = inner or op.split(centre.src)
    parts = next((step.op.split(step.src) for step in steps if isinstance(step.op, Parted)), None)
    counting, run, at = steps, None, centre.index - steps[0].index
    if split:
        axis, length = run = split[0], centre.src.shape[split[0]] // split[1]
        steps = [split_step(step, axis, length) for step in steps]
        axes = (*behind_runs(axes, axis), *([axis] if inner else []))
        parts, centre = parts and parts_in_runs(parts, axis, length), steps[at]
    src, whole = centre.src, steps[0].src.canonical
    places = [whole.rank - src.rank + src.canonical_order.index(axis) for axis in range(src.rank)]
    behind = [place for axis, place in enumerate(places) if axis not in removed]
    over = tuple(sorted(places[axis] for axis in axes))
    stay = tuple({*range(whole.rank)} - {*over})
    along = dict(zip(places, dense(src.shape, axes), strict=True))
    is_read = any(INDEX in leaves_of(stage.expression) for stage in kernel.epilogue)
    is_read |= any(each.reads_index for each in kernel.statistics)
    index = tuple(along.get(place, 0) for place in range(whole.rank)) if is_read else ()
    return replace(
        kernel,
        src=whole,
        dst=spread(steps[-1].dst, behind, whole.rank),
        centre=with_inner(Reduction(kernel.statistics, over, op.per, index), steps, places, inner),
        parts=parts and replace(parts, axis=places[parts.axis]),
        epilogue=tuple(
            numbered(stage, step, over) for stage, step in zip(kernel.epilogue, steps[at:], strict=True)
        ),
        operands=tuple(
            placed(
                each,
                step,
                "prologue" if step.index < centre.index else "epilogue",
                behind if step.index > centre.index else places,
            )
            for step in steps
            for each in step.operands
        ),
        outputs=(
            *(placed_result(*each, places) for step in centres(steps) for each in results(step)),
            *(placed_result(*each, places, stay) for each in sums(centre)),
            *(placed_output(each, steps[each.after or 0], centre, places, behind) for each in kernel.outputs),
        ),
        indices=(
            *counted(counting[:at], "prologue", places, whole.rank, run),
            *counted(counting[at + 1 :], "epilogue", behind, whole.rank, run),
        ),
    )


def _result(made: Result, src: TensorSpec, formula: Scalar) -> Output:
    axes = tuple(sorted(src.places[axis] for axis in made.axes))
    strides = made.spec.element_strides if made.per == "beside" else ()
    return Output(made.key, axes, made.shape, made.dtype, formula, made.updated, strides=strides)


def _saved(step: Step) -> Output:
    (made,) = step.results
    dst = step.dst.canonical
    return Output(made.key, tuple(range(dst.rank)), dst.shape, dst.dtype, leaf("x"), after=step.index)


def _weights(step: Step) -> Iterator[KernelOperand]:
    """The second factor, where there is one."""
    for each in operands_of((step,), "weight"):
        axes = list(range(len(each.shape)))
        if isinstance(step.op, Product) and not step.op.transposed:
            axes[-2:] = reversed(axes[-2:])
        made = replace(each, axes=tuple(axes))
        yield given_weight(made, contraction(step)) if isinstance(step.op, ConvTranspose) else made


def _stage(step: Step) -> Stage:
    saves = step.op.key if isinstance(step.op, Save) else ""
    formula, *others = step.formulas
    return Stage(step.index, operator_text(step.op, parameters=False), formula, saves, tuple(others))

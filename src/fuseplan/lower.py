"""The second stage: the matched steps as a kernel record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuseplan.kernel import Convolution, Kernel, KernelOperand, Stage
from fuseplan.match import Match
from fuseplan.ops.conv import Conv
from fuseplan.ops.matmul import Matmul
from fuseplan.plan import Step
from fuseplan.tensor import TensorSpec
from fuseplan.text import operator_text


def lower(match: Match) -> Kernel:
    """The kernel of a match: its contraction, if it has one, and the elementwise stages before and after."""
    steps = match.steps
    centre = next((step.index for step in steps if step.op.kind == "contraction"), None)
    before, after = ((), steps) if centre is None else (steps[:centre], steps[centre + 1 :])
    middle = () if centre is None else (steps[centre],)
    roles = (("prologue", before), ("weight", middle), ("epilogue", after))
    return Kernel(
        src=steps[0].src,
        dst=steps[-1].dst,
        prologue=tuple(map(_stage, before)),
        convolution=None if centre is None else _convolution(steps[centre]),
        epilogue=tuple(map(_stage, after)),
        operands=tuple(operand for role, part in roles for operand in _operands(part, role)),
        parameters=tuple(each.key for step in steps for each in step.parameters),
    )


def _operands(steps: Sequence[Step], role: str) -> Iterator[KernelOperand]:
    for step in steps:
        for each in step.operands:
            made = each.operand
            yield KernelOperand(each.key, made.per, made.shape, made.dtype, role)


def _stage(step: Step) -> Stage:
    return Stage(step.index, operator_text(step.op, parameters=False), step.formula)


def _convolution(step: Step) -> Convolution:
    op = step.op
    if isinstance(op, Matmul):
        return _product(op, step.src)
    assert isinstance(op, Conv)  # by the rules
    window = op.window(step.src)
    return Convolution(
        batch=step.src.batch,
        channels=step.src.channels,
        features=op.features,
        groups=op.groups,
        src_spatial=step.src.spatial,
        dst_spatial=window.dst,
        kernel=window.kernel,
        stride=window.stride,
        dilation=window.dilation,
        padding=window.padding,
        precision=op.precision,
    )


def _product(op: Matmul, src: TensorSpec) -> Convolution:
    """A matrix product as the convolution of one tap that it is."""
    once = (1,) * len(src.spatial)
    return Convolution(
        batch=src.batch,
        channels=src.channels,
        features=op.features,
        groups=1,
        src_spatial=src.spatial,
        dst_spatial=src.spatial,
        kernel=once,
        stride=once,
        dilation=once,
        padding=((0, 0),) * len(once),
        weight_per_batch=op.batched,
        weight_transposed=not op.transposed,
        precision=op.precision,
    )

"""Which axis is c: what the operators of a plan say of a tensor without a layout, and when they disagree.

A convolution and batch normalization read axis 1 as the channels. A product with a matrix reads the last
axis. Operators with one operand per channel, such as bias, take c where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuseplan.errors import PlanError
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Op

Write = Callable[[TensorSpec, Sequence[Op]], str]  # the text of a plan, with all names of its axes


def named(src: TensorSpec, ops: Sequence[Op], write: Write) -> TensorSpec:
    """The input with the names that its operators give its axes; itself where its layout names them.

    Args:
        write: writes a plan, for the error.

    Raises:
        PlanError: an operator per channel comes before the first one that tells which axis that is.
    """
    first = next((index for index, op in enumerate(ops) if op.reads), None)
    if first is None or ops[first].reads != "rows":
        return src
    if src.is_layout_said or src.names == ROWS[src.rank]:
        return src
    rows = src.with_names(ROWS[src.rank])
    index = _first_per_channel(rows, ops[:first])
    if index is None:
        return rows
    raise PlanError(
        f"{ops[index].name}: its channels may be axis 1, of extent {src.shape[1]}, or the last axis, "
        f"of extent {src.shape[-1]}",
        got=f"{src}, and {ops[first].name} after it, which reads the last axis",
        remedy=f"For the last axis:\n  {write(rows, ops)}\nFor axis 1, run it before the plan",
        text=write(src, ops),
        operator=index,
    )


def are_implied(src: TensorSpec, ops: Sequence[Op]) -> bool:
    """Whether the text without the names of src's axes is read with the same ones."""
    if src.layout != src.names or src.names != ROWS[src.rank]:
        return False
    first = next((index for index, op in enumerate(ops) if op.reads), None)
    if first is None or ops[first].reads != "rows":
        return False
    return _first_per_channel(src, ops[:first]) is None


def _first_per_channel(src: TensorSpec, ops: Sequence[Op]) -> int | None:
    """The first operator with an operand per channel; None without one, or behind one that cannot be."""
    for index, op in enumerate(ops):
        try:
            if any(each.per == "channel" for each in op.operands(src)):
                return index
            src = op.output(src)
        except PlanError:
            break  # the plan says so when it takes the operator
    return None


def check(src: TensorSpec, ops: Sequence[Op], write: Write) -> None:
    """Refuses an operator that reads other axes than the plan has named.

    Args:
        src: the plan's input, as `named` gives it; results have the same names, or some of them.
        write: writes a plan, for the error.

    Raises:
        PlanError: an operator reads other axes; both readings are shown.
    """
    spec = src
    for index, op in enumerate(ops):
        problem = _contradiction(spec, op)
        if problem:
            remedy = None
            if op.reads == "rows" and spec.names == src.names and spec.rank > 2:
                remedy = _readings(src, ops, index, write)
            elif op.reads == "channels" and spec.names == src.names and spec.rank > 1:
                remedy = f"With the channels as axis 1, the input is {src.canonical}"
            axes = f"{spec}: the axes are {', '.join(spec.names)}" if spec.shape else f"{spec}: one number"
            text = write(src, ops)
            raise PlanError(f"{op.name}: it {problem}", got=axes, remedy=remedy, text=text, operator=index)
        try:
            spec = op.output(spec)
        except PlanError:
            return  # the plan says so when it takes the operator


def _contradiction(src: TensorSpec, op: Op) -> str:
    """The end of a sentence about an operator that reads other axes than src has; empty where it does not."""
    if op.reads == "rows" and not src.shape:
        return "reads the last axis, and here there is none"
    if op.reads == "rows" and src.has_channel_names and src.rank > 2:
        return "reads the last axis, and the plan names axis 1 the channels"
    if op.reads == "channels" and src.rank < 2:
        return "reads the axes n and c"
    if op.reads == "channels" and src.channel_axis != 1:
        return f"reads the channels at axis 1, and here they are axis {src.channel_axis}"
    return ""


def _readings(src: TensorSpec, ops: Sequence[Op], index: int, write: Write) -> str:
    """The plans that a product over the last axis may have meant."""
    if any(op.reads == "channels" for op in ops[:index]):
        features = ops[index].attributes().get("features")
        return f"To sum over axis 1: conv{len(src.spatial)}d({features}, kernel=1)" if features else ""
    last = TensorSpec(src.shape, src.dtype, ROWS[src.rank])
    return (
        f"For axis 1, of extent {src.shape[1]}:\n  {write(as_rows(src), ops)}\n"
        f"For the last axis of {'x'.join(map(str, src.shape))}, of extent {src.shape[-1]}, "
        f"as PyTorch does:\n  {write(last, ops)}"
    )


def as_rows(src: TensorSpec) -> TensorSpec:
    """The same elements with the channels as the last axis; a matrix has them there."""
    if src.rank == 2:
        return src
    order = [0, *range(2, src.rank), 1]
    shape, steps = ([each[axis] for axis in order] for each in (src.shape, src.element_strides))
    return TensorSpec(shape, src.dtype, strides=steps, names=ROWS[src.rank])

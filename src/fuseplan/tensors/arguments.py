"""Tensors and numbers for a plan at run time, checked before a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from fuseplan.errors import ArgumentError, counted, did_you_mean
from fuseplan.language.declarations import IN_SRC_DTYPE, Operand, Result, Shape
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.messages.excerpt import bounded, operator_span, shown, underlined
from fuseplan.op import Op
from fuseplan.ops.embedding import Embedding
from fuseplan.ops.matmul import Matmul
from fuseplan.ops.normalization import Normalization
from fuseplan.plans.given import number
from fuseplan.plans.plan import FusionPlan, as_plan
from fuseplan.plans.step import Step
from fuseplan.plans.text import operator_text
from fuseplan.tensors.arrays import Buffer, described, overlap


@dataclass(frozen=True)
class End:
    """The input or the output of a plan, as messages speak of it."""

    key: str

    def __str__(self) -> str:
        return f"`{self.key}`"

    @property
    def name(self) -> str:
        """The same as its key."""
        return self.key


SRC, OUT = End("src"), End("out")
# Words that some libraries take where a plan takes its keys.
NO_KEYS = {
    "fold": """\
Batch normalization is not folded into a weight. By hand, with k = scale / sqrt(variance + epsilon):
  multiply each feature's weight by k, give (bias - mean) * k + shift as bias, and write `-> bias` for both"""
}
Tensor = End | Operand | Result


class Arguments:
    """Operands, parameters and results of a plan, for any number of calls; a second value replaces the first.

    Many threads may execute with one object at once. While a thread sets a value, no other may use it.

    Args:
        plan: the plan, or its text; equal plans take the arguments too.
        **values: operands, parameters and tensors for results by the plan's keys.

    Raises:
        PlanError: the text is no plan.
        ArgumentError: as `set` does; or `plan` is neither.
    """

    def __init__(self, plan: FusionPlan | str, **values: Any) -> None:
        self.plan = as_plan(plan)
        self._values: dict[str, Any] = {}
        self.set(**values)

    def set(self, step: Step | None = None, /, **values: Any) -> Arguments:
        """Sets a step's arguments by the operator's names, or without a step the plan's by its keys.

        Tensors are kept, not copied: a kernel reads them when it is launched or bound.

        Args:
            step: the result of `plan.add` or `plan[i]`.
            **values: for operands NumPy arrays, or tensors with DLPack or `__cuda_array_interface__`, for
                results such tensors to write into; for parameters numbers.

        Returns:
            The arguments themselves.

        Raises:
            ArgumentError: the step is of another plan, a name is unknown, or a value has the wrong shape or
                type. Nothing is set then.
        """
        keys = self._keys_of(step)
        checked = {}
        for name, value in values.items():
            if name not in keys:
                raise _unknown(self.plan, step.title if step else "the plan", name, keys)
            check_value(self.plan, keys[name], value)
            checked[keys[name]] = value
        self._values |= checked
        return self

    def _keys_of(self, step: Step | None) -> dict[str, str]:
        if step is None:
            return {key: key for key in keys_of(self.plan)}
        if not isinstance(step, Step):
            raise ArgumentError(f"{shown(step)} is not a step; want the result of plan.add(...) or plan[i]")
        mine = self.plan.steps
        if not (step.index < len(mine) and mine[step.index] == step):
            raise ArgumentError(
                f"{step.title} is a step of another plan; these arguments are for\n  {self.plan}"
            )
        return step.keys

    @property
    def values(self) -> dict[str, Any]:
        """The values set so far, by the plan's keys."""
        return dict(self._values)

    def __repr__(self) -> str:
        return f"Arguments({self.plan!r}, {', '.join(self._values) or 'nothing set'})"


def keys_of(plan: FusionPlan) -> tuple[str, ...]:
    """All names by which a plan's operands, parameters and results are given."""
    named = (plan.operands, plan.parameters, plan.results)
    return tuple(each.key for kind in named for each in kind)


def check_keys(plan: FusionPlan, given: Mapping[str, Any]) -> None:
    """Refuses a name that the plan does not have.

    Raises:
        ArgumentError: there is one.
    """
    known = keys_of(plan)
    for name in given:
        if name not in known:
            raise _unknown(plan, "the plan", name, known)


def _unknown(plan: FusionPlan, whose: str, name: str, known: Iterable[str]) -> ArgumentError:
    what = f"{whose} has no operand, parameter or result `{bounded(name)}`"
    return ArgumentError(f"{what}. {did_you_mean(name, known, NO_KEYS)}\n  {plan}")


def bare_values(plan: FusionPlan, count: int) -> ArgumentError:
    """The error about `count` tensors behind src and out that were given without names."""
    named = ", ".join(f"{each.key}=..." for each in plan.operands)
    what = f"{counted(count, 'tensor')} after `src` and `out` {'has' if count == 1 else 'have'} no name"
    return ArgumentError(f"{what}: pass operands by name, as in compiled(src, {named})\n  {plan}")


def check_value(plan: FusionPlan, key: str, value: Any) -> None:
    """Refuses a value that the operand, parameter or result of that key cannot have.

    Raises:
        ArgumentError: it cannot.
    """
    declared = {each.key: each for kind in (plan.operands, plan.results) for each in kind}.get(key)
    if isinstance(declared, Operand):
        operand_buffer(plan, declared, value)
    elif declared is not None:
        result_buffer(plan, declared, value)
    else:
        parameter_value(plan, key, value)


def fitting(view: Callable[..., Buffer], tensor: Any, end: End, spec: TensorSpec) -> Buffer:
    """The tensor for an end of a plan as a buffer.

    Raises:
        ArgumentError: it is not laid out as the spec says; both are shown.
    """
    buffer = view(tensor, end).read_as(spec.dtype)
    if buffer.matches(spec):
        return buffer
    own, remedy = "plan.output", "leave it out for a new tensor; pass operands by name"
    if end is SRC:
        own, remedy = "plan.src", "compile a plan for it"
    if buffer.shape == spec.shape and buffer.dtype == spec.dtype:
        remedy = f"the layout differs: copy it into fuseplan.empty({own}), or {remedy}"
    raise ArgumentError(end, f" does not match the plan\n  got {buffer.text}; want {spec}\n  {remedy}")


def operand_buffer(
    plan: FusionPlan, operand: Operand, value: Any, view: Callable[..., Buffer] = described
) -> Buffer:
    """The tensor given for an operand, as `view` sees it.

    Raises:
        ArgumentError: it has another shape, dtype or, where the kernel reads it in place, another layout.
    """
    buffer = view(value, operand, in_place=operand.spec is not None).read_as(operand.dtype)
    src, place = plan[operand.step].src, operand.spec
    if buffer.shape != operand.shape:
        remedy = _reshaped(plan[operand.step].op, buffer.shape, operand.shape)
        raise _refused(plan, operand, "has the wrong shape", buffer, want_text(operand), remedy)
    if buffer.dtype not in dtypes_taken(operand, src.dtype):
        remedy = f"Convert it, such as by .to(torch.{dtype_of(operand.dtype).package})"
        raise _refused(plan, operand, "has the wrong dtype", buffer, want_text(operand, src.dtype), remedy)
    if place is not None and not place.same_layout(buffer.strides):
        remedy = "The kernel reads it in place: copy it into that layout, or give the plan's src this layout"
        raise _refused(plan, operand, "has the wrong layout", buffer, str(place), remedy)
    return buffer


def _reshaped(op: Op, got: Shape, want: Shape) -> str | None:
    """How a tensor of another shape may become the operand, if its elements may be the right ones."""
    if got[:-2] == want[:-2] and got[-2:] == want[-2:][::-1]:
        other = replace(op, transposed=not op.transposed) if isinstance(op, Matmul) else None
        hint = f", or write {operator_text(other)} in the plan" if other else ""
        return f"Its last two axes are swapped: pass it transposed{hint}"
    if sorted(got) == sorted(want):
        return "Its axes are in another order: transpose it"
    if prod(got) == prod(want):
        return f"It has the right number of elements: reshape it to {want}"
    return None


def result_buffer(
    plan: FusionPlan, result: Result, value: Any, view: Callable[..., Buffer] = described
) -> Buffer:
    """The tensor given for a result, as `view` sees it: it is written where it lies.

    Raises:
        ArgumentError: it has another shape, dtype or layout, or is read-only.
    """
    wanted = result.spec
    buffer = view(value, result).read_as(wanted.dtype)
    for is_right, what in (
        (buffer.shape == wanted.shape, "the wrong shape"),
        (buffer.dtype == wanted.dtype, "the wrong dtype"),
        (wanted.same_layout(buffer.strides), "gaps, or its axes in another order,"),
    ):
        if not is_right:
            remedy = "The kernel writes it in place: pass a dense tensor of that shape and dtype"
            remedy += "" if result.updated else ", or leave it out for a new tensor"
            raise _refused(plan, result, f"has {what}", buffer, str(wanted), remedy)
    if buffer.readonly:
        raise ArgumentError(result, " is read-only: pass a writable tensor")
    return buffer


def dtypes_taken(operand: Operand | Result, src_dtype: str) -> tuple[str, ...]:
    """Its own dtype; where that is the compute dtype of floats, also src's, which is widened."""
    row = dtype_of(src_dtype)
    is_widened = operand.per not in IN_SRC_DTYPE and row.is_float and operand.dtype == row.compute
    return (operand.dtype, src_dtype) if is_widened else (operand.dtype,)


def want_text(operand: Operand, src_dtype: str | None = None) -> str:
    """What an operand has to be: `f32[64]`, or `f32[64] or f16[64]`."""
    names = dict.fromkeys(dtypes_taken(operand, src_dtype) if src_dtype else (operand.dtype,))
    return " or ".join(str(Dense(operand.shape, name)) for name in names)


def index_check(plan: FusionPlan) -> Callable[[int], None] | None:
    """What refuses indices without a row of their table, given the address of src; None where src has none.

    The kernel gives NaN for them, and nobody would learn which index that was.
    """
    op, src = (plan.ops or (None,))[0], plan.src
    if not isinstance(op, Embedding):
        return None
    least, rows = -op.rows if op.from_end else 0, op.rows

    def check(address: int) -> None:
        numbers = Buffer(address, src.shape, src.dtype, src.element_strides, True, None).numpy()
        if least <= numbers.min() and numbers.max() < rows:
            return
        place = tuple(map(int, np.argwhere((numbers < least) | (numbers >= rows))[0]))
        want = f"an index from {least} to {rows - 1}"
        raise ArgumentError(SRC, f" is no row of the table: got {numbers[place]} at {place}; want {want}")

    return check


def missing_text(plan: FusionPlan, missing: list[str]) -> str:
    """What is said of tensors that a call does not give."""
    told = {each.key: (each.step, want_text(each)) for each in plan.operands}
    updated = {each.key: (each.step, f"{each.spec}, to be updated") for each in plan.results}
    wanted = [
        f"`{key}` of operator {step} ({plan[step].op.name}): {want}"
        for key, (step, want) in (told | updated).items()
        if key in missing
    ]
    what = "operand" if set(missing) <= told.keys() else "tensor"
    return "\n  ".join([f"{counted(len(wanted), what)} missing", *wanted, str(plan)])


def parameter_value(plan: FusionPlan, key: str, value: Any) -> float:
    """The number given for a parameter; NaN and infinities are numbers.

    Raises:
        ArgumentError: it is none.
    """
    step = next(each.step for each in plan.parameters if each.key == key)
    return number(key, plan[step].title, value)


def may_share(plan: FusionPlan) -> bool:
    """Whether `out` may be the tensor given as src: the plan's only operator says so."""
    (op, *others) = plan.ops or (None,)
    return isinstance(op, Normalization) and op.overwrites and not others and plan.src == plan.output


def meets(begin: int, end: int, held: list[tuple[int, int]]) -> bool:
    """Whether what lies from `begin` to `end` meets any of the others, told by their bounds."""
    for low, high in held:  # noqa: SIM110, a generator would take as long as all other checks
        if begin < high and low < end:
            return True
    return False


def check_apart(written: Sequence[tuple[Tensor, Buffer]], read: Sequence[tuple[Tensor, Buffer]]) -> None:
    """Refuses a tensor to write into that shares memory with another one, or with one that the kernel reads.

    Raises:
        ArgumentError: one does.
    """
    for place, (tensor, out) in enumerate(written):
        for other, buffer in read:
            if overlap(out, buffer):
                why = ", which the kernel still reads while it writes: pass another array"
                raise ArgumentError(tensor, " overlaps ", other, why)
        for other, buffer in written[:place]:
            if overlap(out, buffer):
                why = ", and both are written: pass another array"
                raise ArgumentError(tensor, " overlaps ", other, why)


def _refused(
    plan: FusionPlan, tensor: Operand | Result, what: str, got: Buffer, want: str, remedy: str | None = None
) -> ArgumentError:
    text, step = str(plan), tensor.step
    lines = [
        f" of operator {step} ({plan[step].op.name}) {what}",
        "",
        *(f"  {line}" for line in underlined(text, operator_span(text, step))),
        f"  got {got.text}; want {want}",
    ]
    return ArgumentError(tensor, "\n".join(lines + ([f"  {remedy}"] if remedy else [])))

"""Plans as torch's operator takes them: the text of the operators, and the tensors that a call gives."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence

import torch

from fuseplan.errors import ArgumentError, PlanError, counted
from fuseplan.kernels.template import Accuracy
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.extents import OPEN
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import ARROW
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text, parse_plan

Tensors = Sequence[torch.Tensor]
JOINS = " | "  # behind the operands that are given in several tensors: `weight=2:0 | linear(8) -> glu`
ACCURACY = re.compile(r"accuracy=(\S+)")  # in front of them, where it is not the default one
REPACKS = "repacks"  # likewise, where weights are others in each call
NAMED = re.compile(r"\s*\[([*\w]+)\]\s*->\s*")  # names of axes in front of operators, a star before open ones


def given_of(plan: FusionPlan) -> tuple[Operand | Result, ...]:
    """The tensors besides src that a call gives, in order: operands, then old values of updated results."""
    return (*plan.operands, *(each for each in plan.results if each.updated))


def plan_on(operators: str, src: torch.Tensor) -> FusionPlan:
    """The plan of the operators on a tensor.

    Args:
        operators: a plan's text behind its input. Names of src's axes may stand in front: `[bsc] -> bias`.
        src: the tensor.

    Raises:
        PlanError: the operators do not fit the tensor, or no plan takes it.
    """
    shape, strides = (
        tuple(map(int, each)) for each in (src.shape, src.stride())
    )  # torch's open ones are fixed
    return plan_of_look(operators, shape, strides, src.dtype)


@functools.lru_cache(maxsize=4096)
def joins_of(operators: str) -> dict[str, tuple[int, int]]:
    """The operands that a call gives in several tensors, by key: how many, and the axis that joins them."""
    words = ACCURACY.sub("", operators.rpartition(JOINS)[0]).split()
    pairs = (word.partition("=") for word in words if word != REPACKS)
    return {key: (int(told.split(":")[0]), int(told.split(":")[1])) for key, _, told in pairs}


def keys_of(operators: str, plan: FusionPlan) -> tuple[str, ...]:
    """The key of each tensor besides src that a call gives."""
    joins, given = joins_of(operators), given_of(plan)
    return tuple(each.key for each in given for _ in range(joins.get(each.key, (1, 0))[0]))


def operands_in(operators: str, plan: FusionPlan, given: Tensors) -> list[torch.Tensor]:
    """The plan's tensors besides src: those that a call gives in several tensors are joined."""
    joins, ahead = joins_of(operators), iter(given)
    if not joins:
        return list(given)
    pairs = [joins.get(each.key, (1, 0)) for each in given_of(plan)]
    parts = [(list(itertools.islice(ahead, count)), axis) for count, axis in pairs]
    return [each[0] if len(each) == 1 else torch.cat(each, axis) for each, axis in parts]


@functools.lru_cache(maxsize=4096)
def plan_of_look(
    operators: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> FusionPlan:
    """The plan of the operators on a tensor of a look, as `plan_on` gives it."""
    operators = operators.rpartition(JOINS)[2]
    strides = tuple(step or int(extent == 1) for step, extent in zip(strides, shape, strict=True))
    found = NAMED.match(operators)
    if found is None:  # the operators name the axes
        return FusionPlan.parse(f"{TensorSpec(shape, dtype, strides=strides)} {ARROW} {operators}")
    ops = parse_plan(f"f32[{'x'.join('1' * len(shape))}] {ARROW} {operators[found.end() :]}")[1]
    return FusionPlan(TensorSpec(shape, dtype, strides=strides, names=found[1].replace("*", "")), *ops)


def operators_text(
    plan: FusionPlan,
    opened: Sequence[int] = (),
    joins: Mapping[str, tuple[int, int]] | None = None,
    accuracy: Accuracy = "default",
    repacks: bool = False,
) -> str:
    """The operators of a plan as `plan_on` reads them.

    Args:
        plan: the plan.
        opened: the axes of src for all of whose extents there is one kernel.
        joins: the operands that a call gives in several tensors, as `joins_of` gives them.
        accuracy: as for `fuseplan.compile`.
        repacks: weights are others in each call.
    """
    words = [*([REPACKS] if repacks else []), *([f"accuracy={accuracy}"] if accuracy != "default" else [])]
    front = " ".join((*words, *(f"{key}={count}:{axis}" for key, (count, axis) in (joins or {}).items())))
    text = f"{front}{JOINS if front else ''}"
    if not plan.src.has_channel_names or opened:
        names = "".join(f"*{name}" if axis in opened else name for axis, name in enumerate(plan.src.names))
        text += f"[{names}] {ARROW} "
    return text + f" {ARROW} ".join(operator_text(op) for op in plan.ops)


def opened_in(plan: FusionPlan, operators: str) -> FusionPlan | None:
    """The plan with open axes, where the text in front of its operators has some and a plan can have them."""
    found = NAMED.match(operators.rpartition(JOINS)[2])
    if found is None or "*" not in found[1]:
        return None
    src = plan.src
    axes = [axis for axis, star in enumerate(re.findall(r"(\*?)\w", found[1])) if star]
    named = (src.layout, src.names), (f"{src.layout} of {src.names}", None)
    for opened, (layout, names) in itertools.product(
        (axes, axes[:1]), named
    ):  # all of them, or rows of one size
        shape = [OPEN if axis in opened else extent for axis, extent in enumerate(src.shape)]
        with contextlib.suppress(PlanError):
            made = TensorSpec(shape, src.dtype, layout, names=names)
            if made.with_extents(*(src.shape[axis] for axis in opened)) == src:
                return FusionPlan(made, *plan.ops)
    return None


def check_count(
    plan: FusionPlan, wanted: Sequence[str], operands: Tensors, parameters: Sequence[float]
) -> None:
    """Checks that there are as many tensors, by their keys, and numbers as the plan takes.

    Raises:
        ArgumentError: there are not; the message lists the keys.
    """
    if len(operands) != len(wanted):
        told = f"`{plan}` takes {counted(len(wanted), 'tensor')} besides src ({', '.join(wanted)})"
        raise ArgumentError(f"{told}, got {len(operands)}")
    numbers = [each.key for each in plan.parameters]
    if parameters and len(parameters) != len(numbers):
        told = f"`{plan}` takes {counted(len(numbers), 'parameter')} ({', '.join(numbers)}), or none"
        raise ArgumentError(f"{told}, got {len(parameters)}")

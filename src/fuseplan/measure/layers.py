"""A plan's operators as other libraries need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuseplan.language.attend import Attend
from fuseplan.op import Op
from fuseplan.ops.attention import Attending
from fuseplan.ops.conv import Conv
from fuseplan.ops.windows import Window
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step


class CannotRunError(Exception):
    """A peer does not take the plan; the message says why."""


@dataclass(frozen=True)
class Layer:
    """An operator as peers need it.

    Attributes:
        name: its word in the plan's text.
        attributes: what is fixed in the plan, by name.
        parameters: numbers with their values, by the operator's own names.
        keys: the plan's key of each operand, or of an earlier value, by the operator's own names.
    """

    name: str
    attributes: Mapping[str, Any]
    parameters: Mapping[str, float]
    keys: Mapping[str, str]
    step: Step


def layers(plan: FusionPlan) -> list[Layer]:
    """The plan's operators as peers need them; a bias right after a contraction is an operand of that."""
    folded: list[Layer] = []
    for layer in plain_layers(plan):
        before = folded[-1] if folded else None
        if layer.name == "bias" and before and "weight" in before.keys and "bias" not in before.keys:
            folded[-1] = replace(before, keys={**before.keys, **layer.keys})
        else:
            folded.append(layer)
    return folded


def plain_layers(plan: FusionPlan) -> list[Layer]:
    """The plan's operators as peers need them, a bias by itself too."""
    return [
        Layer(
            name=step.op.name,
            attributes=step.op.attributes(),
            parameters={parameter.name: parameter.value for parameter in step.op.parameters()},
            keys={operand.name: operand.key for operand in step.operands} | step.op.again,
            step=step,
        )
        for step in plan.steps
    ]


def is_usual(op: Op) -> bool:
    """Whether every attribute and every number has its default."""
    return all(is_default for _, _, is_default in op.written())


def convolution_of(layer: Layer) -> tuple[Conv, Window]:
    """The convolution of a layer, and how its kernel moves: every size an axis, padding as pairs.

    Raises:
        CannotRunError: the layer is none.
    """
    op = layer.step.op
    if not isinstance(op, Conv):
        raise CannotRunError(f"{layer.name!r} is not a convolution")
    return op, op.window(layer.step.src)


def attended(layer: Layer) -> Attend:
    """What attention's layer computes.

    Raises:
        CannotRunError: the layer is none.
    """
    if not isinstance(layer.step.op, Attending):
        raise CannotRunError(f"{layer.name!r} is not attention")
    return layer.step.op.attend(layer.step.src)


def running(plan: FusionPlan) -> list[str]:
    """Keys of the tensors that come anew with every call: `src` and what is read where it lies."""
    return ["src", *(operand.key for operand in plan.operands if operand.spec is not None)]


def refuse(name: str, layer: Layer) -> CannotRunError:
    """The refusal of one operator."""
    return CannotRunError(f"{name} does not run {layer.name!r} in these measurements")

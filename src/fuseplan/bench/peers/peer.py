"""What a peer is: something that prepares a plan with its arrays and can then be called again and again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fuseplan.ops.conv import Conv, Window
from fuseplan.plan import FusionPlan, Step

Array = NDArray[Any]
Arrays = Mapping[str, Array]  # `src` and every operand by its key, each of logical shape


class CannotRunError(Exception):
    """A peer does not take the plan; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """A plan made ready: weights bound, outputs allocated.

    Attributes:
        call: runs it once; with several copies of the arrays, on the next of them each time.
        result: runs it on the first copy and gives its output, in logical order.
        facts: what a result line says of it: template, knobs, traffic.
    """

    call: Callable[[], object]
    result: Callable[[], Array]
    facts: Mapping[str, Any] = field(default_factory=dict)


class Peer(Protocol):
    """A library in one of its forms; made in a process of its own for a number of threads."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]

    def __init__(self, threads: int) -> None:
        """Raises ImportError where its package is not installed."""

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Makes the plan ready on copies of its arrays; the weights are those of the first.

        Raises:
            CannotRunError: the peer does not take the plan.
        """
        ...


@dataclass(frozen=True)
class Layer:
    """An operator as peers need it.

    Attributes:
        name: its word in the plan's text.
        attributes: what is fixed in the plan, by name.
        parameters: numbers with their values, by the operator's own names.
        keys: the plan's key of each operand, by the operator's own names.
        step: the plan's step.
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
        if layer.name == "bias" and before is not None and _takes_bias(before):
            folded[-1] = replace(before, keys={**before.keys, **layer.keys})
        else:
            folded.append(layer)
    return folded


def _takes_bias(layer: Layer) -> bool:
    return layer.step.op.kind == "contraction" and "bias" not in layer.keys


def plain_layers(plan: FusionPlan) -> list[Layer]:
    """The plan's operators as peers need them, a bias by itself too."""
    return [
        Layer(
            name=step.op.name,
            attributes=step.op.attributes(),
            parameters={parameter.name: parameter.value for parameter in step.op.parameters()},
            keys={operand.operand.name: operand.key for operand in step.operands},
            step=step,
        )
        for step in plan.steps
    ]


def is_plain(layer: Layer) -> bool:
    """Whether every attribute has its default: the form that other libraries have too."""
    names = layer.attributes.keys()
    return all(is_default for name, _, is_default in layer.step.op.written() if name in names)


def convolution_of(layer: Layer) -> tuple[Conv, Window]:
    """The convolution of a layer, and how its kernel moves: every size an axis, padding as pairs.

    Raises:
        CannotRunError: the layer is none.
    """
    op = layer.step.op
    if not isinstance(op, Conv):
        raise CannotRunError(f"{layer.name!r} is no convolution")
    return op, op.window(layer.step.src)


def running(plan: FusionPlan) -> list[str]:
    """Keys of the tensors that come anew with every call: `src` and what is given per element."""
    return ["src", *(operand.key for operand in plan.operands if operand.operand.per == "element")]


def only_f32(plan: FusionPlan, name: str) -> None:
    """Refuses what the peers are not measured with: they convert, or compute in another precision.

    Raises:
        CannotRunError: the plan is not in f32.
    """
    if plan.src.dtype != "f32":
        raise CannotRunError(f"{name} is measured in f32; the plan is in {plan.src.dtype}")


def refuse(name: str, layer: Layer) -> CannotRunError:
    """The refusal of one operator."""
    return CannotRunError(f"{name} is not taught {layer.name!r} here")


def aligned(array: Array) -> Array:
    """A dense copy, outermost axis first, that begins at a cache line, as the libraries allocate theirs."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    made = raw[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made

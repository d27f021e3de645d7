"""Operators of a plan, the activation of each mode, and a list of operators as a fusion plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fuseplan.compat.miopen.call import Object, bad_parameter, not_initialized
from fuseplan.compat.miopen.enums import miopenActivationMode_t, miopenBatchNormMode_t
from fuseplan.compat.miopen.kinds import ACTIVATION, ACTIVATION_BACKWARD, INFERENCE, TRAINING, Kind
from fuseplan.compat.miopen.tensors import MODE_WORDS
from fuseplan.compat.miopen_driver import letters
from fuseplan.language.tensor import TensorSpec
from fuseplan.op import Elementwise, Op
from fuseplan.ops.activation import Clamp, Power
from fuseplan.ops.affine import BatchNorm
from fuseplan.ops.expression import Expression
from fuseplan.ops.training import ActivationBackward, BatchNormBackward, BatchNormTraining
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arguments import check_value, dtypes_taken

NUMBERS = ("activAlpha", "activBeta", "activGamma")
ALPHA = "alpha of the result"  # the name by which an operator's factor is given; no operand's


@dataclass(frozen=True)
class Operator:
    """An operator of a plan: its kind, this library's operator, and the parameters in MIOpen's order."""

    kind: Kind
    op: Op
    parameters: tuple[str, ...] = ()

    def values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The operator's values from the arguments of a call, by its own names, without null."""
        names = self.kind.takes | dict(zip(NUMBERS, self.parameters, strict=False))
        return {own: arguments[name] for name, own in names.items() if arguments.get(name) is not None}

    def numbers(self, alpha: float, beta: float, gamma: float) -> dict[str, float]:
        """An activation's parameters: as many of activAlpha, activBeta and activGamma as its formula has."""
        return dict(zip(self.parameters, (alpha, beta, gamma), strict=False))


def normalization(kind: Kind, mode: miopenBatchNormMode_t, running: bool = False) -> Operator:
    """Batch normalization: inference, training, with running statistics or without, or its backward pass."""
    word = MODE_WORDS[mode]
    if kind is TRAINING:
        return Operator(kind, BatchNormTraining(word, running=running))
    return Operator(kind, BatchNorm(word) if kind is INFERENCE else BatchNormBackward(mode=word))


@dataclass(frozen=True)
class Lowered:
    """Operators as a fusion plan.

    Attributes:
        keys: for each operator, the plan's keys by the operator's own names.
        places: for each operator, the index in the plan; two merged operators have the same.
    """

    plan: FusionPlan
    operators: tuple[Operator, ...]
    keys: tuple[dict[str, str], ...]
    places: tuple[int, ...]

    def named(self, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """An operator's values by the plan's keys; tensors without MIOpen's axes of length 1."""
        keys, unread = self.keys[index], self.operators[index].kind.unread
        read = {name: value for name, value in values.items() if name in keys or name not in unread}
        return {keys[name]: without_ones(self.plan, keys[name], value) for name, value in read.items()}

    def check(self, index: int, values: Mapping[str, Any]) -> None:
        """Checks an operator's values.

        Raises:
            ArgumentError: a tensor has another shape or type, or a number is none.
        """
        for key, value in self.named(index, values).items():
            check_value(self.plan, key, value)


def check_described(plan: FusionPlan, key: str, name: str, given: TensorSpec) -> None:
    """Checks the description of a plan's tensor. A plan's numbers have no description.

    Raises:
        StatusError: it has another shape, or a type that the plan does not take it in.
    """
    takes = {each.key: dtypes_taken(each, plan[each.step].src.dtype) for each in plan.operands}
    takes |= {each.key: (each.dtype,) for each in plan.results}
    shape = _shapes(plan).get(key)
    if shape is None:
        return
    ones = given.rank - 1 - len(shape)
    wanted = [TensorSpec(shape if ones < 0 else (1, *shape, *(1,) * ones), each) for each in takes[key]]
    if all((given.shape, given.dtype) != (each.shape, each.dtype) for each in wanted):
        told = " or ".join(dict.fromkeys(map(str, wanted)))
        raise bad_parameter(f"{name} is described as {given}; want {told}")


def without_ones(plan: FusionPlan, key: str, value: Any) -> Any:
    """A tensor 1xCx1x1 or 1xCxHxW as (c,) or (c, h, w), where the plan has that shape: a view of it."""
    wanted = _shapes(plan).get(key)
    shape = getattr(value, "shape", None)
    if wanted is None or not isinstance(shape, tuple) or shape[:1] != (1,):
        return value
    rest = len(shape) - 1 - len(wanted)
    if rest < 0 or shape != (1, *wanted, *(1,) * rest) or not hasattr(value, "__getitem__"):
        return value
    return value[(0, *(slice(None),) * len(wanted), *(0,) * rest)]


def _shapes(plan: FusionPlan) -> dict[str, tuple[int, ...]]:
    return {each.key: each.shape for kind in (plan.operands, plan.results) for each in kind}


def lowered(src: TensorSpec, operators: Sequence[Operator], scaled: frozenset[int] = frozenset()) -> Lowered:
    """The fusion plan of operators; the results of the `scaled`, by index, are multiplied by a number.

    Raises:
        PlanError: an operator cannot take what comes before it.
    """
    plan = FusionPlan(src)
    keys: list[dict[str, str]] = []
    places: list[int] = []
    for op, indices in _merged(operators):
        step = plan.add(op)
        for index in indices:
            keys.append(step.keys)
            places.append(step.index)
            if index in scaled:
                factor = plan.add(Expression("alpha * x", alpha=1.0))
                keys[-1] = keys[-1] | {ALPHA: factor.keys["alpha"]}
    return Lowered(plan, tuple(operators), tuple(keys), tuple(places))


def _merged(operators: Sequence[Operator]) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Each operator with its index; the backward passes of a normalization and its activation are one."""
    index = 0
    while index < len(operators):
        op = operators[index].op
        follower = operators[index + 1].op if index + 1 < len(operators) else None
        if isinstance(op, BatchNormBackward) and isinstance(follower, ActivationBackward):
            yield replace(op, activation=follower.of), (index, index + 1)
            index += 2
        else:
            yield op, (index,)
            index += 1


Mode = miopenActivationMode_t
# Each mode's operator, whose numbers are given with each call, and its parameters in the order of activAlpha,
# activBeta, activGamma.
ACTIVATIONS: dict[Mode, tuple[Elementwise, tuple[str, ...]]] = {
    mode: (Clamp(-inf, inf) if kind is Clamp else kind(), names)
    for mode, (kind, names) in zip(Mode, letters.ACTIVATIONS.values(), strict=True)
}


def _activation(mode: Mode, dtype: str) -> Elementwise:
    """The operator of a mode for tensors of that dtype; below its threshold POWER is 0."""
    if mode is Mode.miopenActivationPOWER and dtype in letters.POWER_THRESHOLD:
        return Power(threshold=letters.POWER_THRESHOLD[dtype])
    return ACTIVATIONS[mode][0]


def forward(mode: Mode, dtype: str) -> Operator:
    """The activation of a mode."""
    return Operator(ACTIVATION, _activation(mode, dtype), ACTIVATIONS[mode][1])


def backward(mode: Mode, dtype: str) -> Operator:
    """The backward pass of the activation of a mode."""
    gradient = ActivationBackward(_activation(mode, dtype))
    return Operator(ACTIVATION_BACKWARD, gradient, ACTIVATIONS[mode][1])


class miopenActivationDescriptor_t(Object):
    """A mode and its three numbers; nothing until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._told: tuple[Mode, float, float, float] | None = None

    @property
    def told(self) -> tuple[Mode, float, float, float]:
        """Mode, alpha, beta and gamma; a StatusError where nothing was set yet."""
        if self._told is None:
            raise not_initialized(
                "the activation descriptor was never set: miopenSetActivationDescriptor sets its mode"
            )
        return self._told

    def set(self, mode: Mode, alpha: float, beta: float, gamma: float) -> None:
        """Sets it."""
        self._told = (mode, alpha, beta, gamma)

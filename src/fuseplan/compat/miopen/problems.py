"""Problems of Find 2.0: operators with the tensors they are about, fused one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace

from fuseplan.compat.miopen.call import Object, bad_parameter, invalid_value, not_implemented
from fuseplan.compat.miopen.convolutions import miopenConvolutionDescriptor_t
from fuseplan.compat.miopen.enums import (
    miopenBatchNormMode_t,
    miopenProblemDirection_t,
    miopenTensorArgumentId_t,
)
from fuseplan.compat.miopen.kinds import BACKWARD, BIAS, CONVOLUTION, INFERENCE, TRAINING, pairs
from fuseplan.compat.miopen.operators import (
    Lowered,
    Operator,
    backward,
    check_described,
    forward,
    lowered,
    miopenActivationDescriptor_t,
    normalization,
)
from fuseplan.compat.miopen.tensors import is_same
from fuseplan.compat.miopen.tensors import miopenTensorDescriptor_t as Tensor
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import Bias

Direction = miopenProblemDirection_t
Id = miopenTensorArgumentId_t
FORWARD = Direction.miopenProblemDirectionForward
GRADIENT = Direction.miopenProblemDirectionBackward
INFER = Direction.miopenProblemDirectionInference


@dataclass(frozen=True)
class Role:
    """The tensors of a problem as its operator's operands and results.

    Attributes:
        given: the operator's own names of the other tensors and numbers, by id.
        described: the id whose descriptor has to be set; None where the operator needs none.
    """

    src: Id
    dst: Id
    given: dict[Id, str]
    described: Id | None = None


def _of(family: str, src: str, dst: str, given: str = "", described: str | None = None) -> Role:
    """A role; the ids are written without their common beginning."""

    def named(name: str) -> Id:
        ids, full = Id.__members__, f"{family}{name}"
        return ids.get(f"miopenScalar{full}") or ids[f"miopenTensor{full}"]

    tensors = {named(name): own for name, own in pairs(given).items()}
    return Role(named(src), named(dst), tensors, None if described is None else named(described))


ROLES: dict[tuple[str, Direction], Role] = {
    ("convolution", FORWARD): _of("Convolution", "X", "Y", "W=weight", "W"),
    ("bias", FORWARD): _of("Bias", "X", "Y", "=bias", ""),
    ("activation", FORWARD): _of("Activation", "X", "Y"),
    ("activation", GRADIENT): _of("Activation", "DY", "DX", "X=input Y=output"),
    ("batchnorm", INFER): _of(
        *("Batchnorm", "X", "Y"),
        "Scale=scale Bias=shift EstimatedMean=mean EstimatedVariance=variance Epsilon=epsilon",
        "EstimatedMean",
    ),
    ("batchnorm", FORWARD): _of(
        *("Batchnorm", "X", "Y"),
        "Scale=scale Bias=shift SavedMean=saved_mean SavedVariance=saved_inverse_variance "
        "RunningMean=running_mean RunningVariance=running_variance ExpAvgFactor=momentum Epsilon=epsilon",
    ),
    ("batchnorm", GRADIENT): _of(
        *("Batchnorm", "DY", "DX"),
        "X=input Scale=scale Bias=shift ScaleDiff=scale_gradient BiasDiff=shift_gradient "
        "SavedMean=mean SavedVariance=inverse_variance",
    ),
}
# Names that a problem may give and its operator does not read: they follow from the rest, or have no effect.
UNREAD = ("output", "shift", "momentum", "input")

Described = dict[Id, TensorSpec]


@dataclass(frozen=True)
class Part:
    """One operator of a problem.

    Attributes:
        role: the use of its tensors.
        make: the operator, of its input and the tensors described.
        numbers: activAlpha, activBeta and activGamma.
    """

    role: Role
    make: Callable[[TensorSpec, Described], Operator]
    numbers: tuple[float, ...] = ()
    tensors: Described = field(default_factory=dict)


@dataclass(frozen=True)
class Posed:
    """A problem as a plan.

    Attributes:
        plan: the fusion plan, as JSON.
        src, dst: ids of input and output.
        keys: the plan's key of each other id, by the id's name; empty for a tensor that is not read.
        numbers: parameters that the problem fixes, by key.
    """

    plan: str
    src: int
    dst: int
    keys: dict[str, str]
    numbers: dict[str, float]


class miopenProblem_t(Object):
    """One operator, or several fused."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.parts = [part]

    def describe(self, name: Id, descriptor: Tensor) -> None:
        """Describes a tensor of the problem; a StatusError where the problem has no such tensor."""
        for part in self.parts:
            if name in (part.role.src, part.role.dst, *part.role.given):
                part.tensors[name] = descriptor.spec
                return
        raise bad_parameter(f"the problem has no tensor {name.name}")

    def fuse(self, other: miopenProblem_t) -> None:
        """Appends the operators of another problem."""
        self.parts += [replace(part, tensors=dict(part.tensors)) for part in other.parts]

    def posed(self) -> Posed:
        """The problem as a plan.

        Raises:
            StatusError: a tensor that has to be described is not, or is described as it cannot be, or two
                operators have a tensor in common.
            PlanError: an operator cannot take what comes before it.
        """
        operators: list[Operator] = []
        src = _described(self.parts[0], self.parts[0].role.src)
        made = lowered(src, operators)
        for part in self.parts:
            _same(part, part.role.src, made.plan.output)
            if part.role.described is not None:
                _described(part, part.role.described)
            operators.append(part.make(made.plan.output, part.tensors))
            made = lowered(src, operators)
            _same(part, part.role.dst, made.plan.output)
        numbers: dict[str, float] = {}
        for index, part in enumerate(self.parts):
            values = operators[index].numbers(*part.numbers) if part.numbers else {}
            numbers |= made.named(index, values)
        keys = dict(self._keys(made))
        for part in self.parts:
            for name, spec in part.tensors.items():
                if name.name in keys:
                    check_described(made.plan, keys[name.name], name.name, spec)
        ends = self.parts[0].role.src, self.parts[-1].role.dst
        return Posed(made.plan.to_json(), *ends, keys, numbers)

    def _keys(self, made: Lowered) -> Iterator[tuple[str, str]]:
        seen: set[Id] = set()
        for index, part in enumerate(self.parts):
            is_follower = index > 0 and made.places[index] == made.places[index - 1]
            for name, own in part.role.given.items():
                key = None if is_follower and own == "input" else made.keys[index].get(own)
                if key is None and own not in UNREAD:
                    continue
                if name in seen:
                    raise not_implemented(
                        f"two operators of the problem have a {name.name}: which one is meant?"
                    )
                seen.add(name)
                yield name.name, key or ""


def _described(part: Part, name: Id) -> TensorSpec:
    if name not in part.tensors:
        raise invalid_value(
            f"the problem is missing the {name.name} tensor descriptor: "
            "miopenSetProblemTensorDescriptor sets it"
        )
    return part.tensors[name]


def _same(part: Part, name: Id, wanted: TensorSpec) -> None:
    given = part.tensors.get(name, wanted)
    if not is_same(given, wanted):
        raise bad_parameter(f"{name.name} is described as {given}; want {wanted}")


def _role(word: str, direction: Direction) -> Role:
    if (word, direction) not in ROLES:
        known = ", ".join(each.name for name, each in ROLES if name == word)
        raise not_implemented(f"a {word} problem of {direction.name} is not supported; want {known}")
    return ROLES[word, direction]


def convolution_problem(descriptor: miopenConvolutionDescriptor_t, direction: Direction) -> miopenProblem_t:
    """The problem of a forward convolution, as the descriptor is now."""
    role = _role("convolution", direction)
    described = deepcopy(descriptor.checked())  # which may change, or be destroyed

    def make(src: TensorSpec, tensors: Described) -> Operator:
        return Operator(CONVOLUTION, described.operator(src, tensors[Id.miopenTensorConvolutionW]))

    return miopenProblem_t(Part(role, make))


def bias_problem(direction: Direction) -> miopenProblem_t:
    """The problem of a bias."""
    return miopenProblem_t(Part(_role("bias", direction), lambda src, _: Operator(BIAS, Bias())))


def activation_problem(descriptor: miopenActivationDescriptor_t, direction: Direction) -> miopenProblem_t:
    """The problem of an activation, or of its backward pass."""
    role = _role("activation", direction)
    mode, *numbers = descriptor.told
    make = forward if direction is FORWARD else backward
    return miopenProblem_t(Part(role, lambda src, _: make(mode, src.dtype), tuple(numbers)))


def normalization_problem(
    mode: miopenBatchNormMode_t, running: bool, direction: Direction
) -> miopenProblem_t:
    """The problem of batch normalization: inference, forward training or its backward pass."""
    role = _role("batchnorm", direction)
    made = normalization({INFER: INFERENCE, FORWARD: TRAINING, GRADIENT: BACKWARD}[direction], mode, running)
    return miopenProblem_t(Part(role, lambda src, _: made))

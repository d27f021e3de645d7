"""Problems of Find 2.0: operators with the tensors they are about, fused one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.call import Object, Ref, StatusError, api, bad_parameter, not_implemented
from fuseplan.miopen.convolutions import miopenConvolutionDescriptor_t
from fuseplan.miopen.enums import (
    miopenBatchNormMode_t,
    miopenProblemDirection_t,
    miopenStatus_t,
    miopenTensorArgumentId_t,
)
from fuseplan.miopen.operators import (
    BACKWARD,
    BIAS,
    CONVOLUTION,
    INFERENCE,
    TRAINING,
    Lowered,
    Operator,
    check_described,
    lowered,
)
from fuseplan.miopen.plan import backward, forward
from fuseplan.miopen.tensors import MODE_WORDS, is_same, miopenTensorDescriptor_t
from fuseplan.ops.affine import BatchNorm, Bias
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining
from fuseplan.tensor import TensorSpec

Direction = miopenProblemDirection_t
Id = miopenTensorArgumentId_t
FORWARD = Direction.miopenProblemDirectionForward


@dataclass(frozen=True)
class Role:
    """What the tensors of a problem are to its operator.

    Attributes:
        src: the input's id.
        dst: the output's.
        given: ids of what the operator is given, and the operator's names; numbers among them.
        described: the id whose descriptor has to be set; None where the operator needs none.
    """

    src: Id
    dst: Id
    given: dict[Id, str]
    described: Id | None = None


SCALE_AND_BIAS = {Id.miopenTensorBatchnormScale: "scale", Id.miopenTensorBatchnormBias: "shift"}
ROLES: dict[tuple[str, Direction], Role] = {
    ("convolution", FORWARD): Role(
        Id.miopenTensorConvolutionX,
        Id.miopenTensorConvolutionY,
        {Id.miopenTensorConvolutionW: "weight"},
        Id.miopenTensorConvolutionW,
    ),
    ("bias", FORWARD): Role(
        Id.miopenTensorBiasX, Id.miopenTensorBiasY, {Id.miopenTensorBias: "bias"}, Id.miopenTensorBias
    ),
    ("activation", FORWARD): Role(Id.miopenTensorActivationX, Id.miopenTensorActivationY, {}),
    ("activation", Direction.miopenProblemDirectionBackward): Role(
        Id.miopenTensorActivationDY,
        Id.miopenTensorActivationDX,
        {Id.miopenTensorActivationX: "input", Id.miopenTensorActivationY: "output"},
    ),
    ("batchnorm", Direction.miopenProblemDirectionInference): Role(
        Id.miopenTensorBatchnormX,
        Id.miopenTensorBatchnormY,
        {
            **SCALE_AND_BIAS,
            Id.miopenTensorBatchnormEstimatedMean: "mean",
            Id.miopenTensorBatchnormEstimatedVariance: "variance",
            Id.miopenScalarBatchnormEpsilon: "epsilon",
        },
        Id.miopenTensorBatchnormEstimatedMean,
    ),
    ("batchnorm", FORWARD): Role(
        Id.miopenTensorBatchnormX,
        Id.miopenTensorBatchnormY,
        {
            **SCALE_AND_BIAS,
            Id.miopenTensorBatchnormSavedMean: "saved_mean",
            Id.miopenTensorBatchnormSavedVariance: "saved_inverse_variance",
            Id.miopenTensorBatchnormRunningMean: "running_mean",
            Id.miopenTensorBatchnormRunningVariance: "running_variance",
            Id.miopenScalarBatchnormExpAvgFactor: "momentum",
            Id.miopenScalarBatchnormEpsilon: "epsilon",
        },
    ),
    ("batchnorm", Direction.miopenProblemDirectionBackward): Role(
        Id.miopenTensorBatchnormDY,
        Id.miopenTensorBatchnormDX,
        {
            Id.miopenTensorBatchnormX: "input",
            **SCALE_AND_BIAS,
            Id.miopenTensorBatchnormScaleDiff: "scale_gradient",
            Id.miopenTensorBatchnormBiasDiff: "shift_gradient",
            Id.miopenTensorBatchnormSavedMean: "mean",
            Id.miopenTensorBatchnormSavedVariance: "inverse_variance",
        },
    ),
}
# What a problem may have and its operator not read: all of it follows from the rest, or has no effect.
UNREAD = ("output", "shift", "momentum", "input")

Described = dict[Id, TensorSpec]


@dataclass(frozen=True)
class Part:
    """One operator of a problem.

    Attributes:
        role: what its tensors are.
        make: the operator, of its input and the tensors described.
        numbers: activAlpha, activBeta and activGamma.
        tensors: what is described, by id.
    """

    role: Role
    make: Callable[[TensorSpec, Described], Operator]
    numbers: tuple[float, ...] = ()
    tensors: Described = field(default_factory=dict)


@dataclass(frozen=True)
class Posed:
    """A problem as a plan.

    Attributes:
        made: the operators as a fusion plan.
        src, dst: ids of input and output.
        keys: the plan's key of each id; empty for what is not read.
        numbers: parameters that the problem fixes, by key.
    """

    made: Lowered
    src: Id
    dst: Id
    keys: dict[Id, str]
    numbers: dict[str, float]


class miopenProblem_t(Object):
    """One operator, or several fused."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.parts = [part]

    def describe(self, name: Id, spec: TensorSpec) -> None:
        """Says what a tensor of the problem looks like.

        Raises:
            StatusError: the problem has no such tensor.
        """
        for part in self.parts:
            if name in (part.role.src, part.role.dst, *part.role.given):
                part.tensors[name] = spec
                return
        raise bad_parameter(f"the problem has no tensor {name.name}")

    def posed(self) -> Posed:
        """The plan, and what each tensor is in it.

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
            for name in part.tensors.keys() & keys.keys():
                check_described(made.plan, keys[name], name.name, part.tensors[name])
        return Posed(made, self.parts[0].role.src, self.parts[-1].role.dst, keys, numbers)

    def _keys(self, made: Lowered) -> Iterator[tuple[Id, str]]:
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
                yield name, key or ""


def _described(part: Part, name: Id) -> TensorSpec:
    if name not in part.tensors:
        raise StatusError(
            miopenStatus_t.miopenStatusInvalidValue,
            f"the problem is missing the {name.name} tensor descriptor: "
            "miopenSetProblemTensorDescriptor sets it",
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


@api
def miopenCreateConvProblem(
    problem: Ref, operatorDesc: miopenConvolutionDescriptor_t, direction: miopenProblemDirection_t
) -> None:
    """Makes the problem of a forward convolution; X and W are to be described."""
    role = _role("convolution", direction)
    described = deepcopy(operatorDesc.checked())  # which may change, or be destroyed

    def make(src: TensorSpec, tensors: Described) -> Operator:
        return Operator(CONVOLUTION, described.operator(src, tensors[Id.miopenTensorConvolutionW]))

    problem.value = miopenProblem_t(Part(role, make))


@api
def miopenCreateBiasProblem(problem: Ref, direction: miopenProblemDirection_t) -> None:
    """Makes the problem of a bias, which is to be described."""
    role = _role("bias", direction)
    problem.value = miopenProblem_t(Part(role, lambda src, _: Operator(BIAS, Bias())))


@api
def miopenCreateActivationProblem(
    problem: Ref, operatorDesc: miopenActivationDescriptor_t, direction: miopenProblemDirection_t
) -> None:
    """Makes the problem of an activation, or of its backward pass."""
    role = _role("activation", direction)
    mode, *numbers = operatorDesc.told
    make = forward if direction is FORWARD else backward
    problem.value = miopenProblem_t(Part(role, lambda src, _: make(mode, src.dtype), tuple(numbers)))


@api
def miopenCreateBatchnormProblem(
    problem: Ref,
    mode: miopenBatchNormMode_t,
    runningMeanVariance: bool,
    direction: miopenProblemDirection_t,
) -> None:
    """Makes the problem of batch normalization: inference, forward training or its backward pass."""
    role, word = _role("batchnorm", direction), MODE_WORDS[mode]
    made = {
        Direction.miopenProblemDirectionInference: Operator(INFERENCE, BatchNorm(word)),
        FORWARD: Operator(TRAINING, BatchNormTraining(word, running=runningMeanVariance)),
        Direction.miopenProblemDirectionBackward: Operator(BACKWARD, BatchNormBackward(mode=word)),
    }[direction]
    problem.value = miopenProblem_t(Part(role, lambda src, _: made))


@api
def miopenSetProblemTensorDescriptor(
    problem: miopenProblem_t, id: miopenTensorArgumentId_t, descriptor: miopenTensorDescriptor_t
) -> None:
    """Describes a tensor of a problem; results need no description, and are checked if they have one."""
    problem.describe(id, descriptor.spec)


@api
def miopenFuseProblems(problem1: miopenProblem_t, problem2: miopenProblem_t) -> None:
    """Appends the operators of the second problem to the first."""
    problem1.parts += [replace(part, tensors=dict(part.tensors)) for part in problem2.parts]


@api
def miopenDestroyProblem(problem: miopenProblem_t) -> None:
    """Ends a problem; what it was fused into keeps its operators."""
    problem.destroy()

"""Functions that do all in one call: operators, their arguments, the kernel, which the handle keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fuseplan.compat.miopen.arguments import factor_of, has_statistics
from fuseplan.compat.miopen.call import bad_parameter
from fuseplan.compat.miopen.enums import miopenBatchNormMode_t
from fuseplan.compat.miopen.execute import Arguments, Call, call_of, scaled
from fuseplan.compat.miopen.handle import miopenHandle_t
from fuseplan.compat.miopen.kinds import (
    ACTIVATION,
    BACKWARD,
    BIAS,
    CONVOLUTION,
    INFERENCE,
    RESIDUAL,
    TRAINING,
)
from fuseplan.compat.miopen.operators import (
    Lowered,
    Operator,
    backward,
    forward,
    lowered,
    miopenActivationDescriptor_t,
    without_ones,
)
from fuseplan.compat.miopen.tensors import MODE_WORDS, check_parameters, check_same
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.affine import Add, BatchNorm, Bias
from fuseplan.ops.training import BatchNormBackward, BatchNormTraining

EPSILON = 1e-5  # where the batch's statistics stand in for an inverse variance that is null
RUNNING = ("running_mean", "running_variance")
BEFORE = ("prevResultRunningMean", "prevResultRunningVariance")


@dataclass
class Steps:
    """Operators and their values, gathered and run at once."""

    operators: list[Operator] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)

    def add(self, operator: Operator, arguments: Arguments, **numbers: float | None) -> None:
        """Appends an operator with its arguments of a call, and numbers by its own names."""
        given = {name: value for name, value in numbers.items() if value is not None}
        self.operators.append(operator)
        self.given.append(operator.values(arguments) | given)

    def activate(
        self,
        descriptor: miopenActivationDescriptor_t,
        dtype: str,
        arguments: Arguments,
        *,
        is_backward: bool = False,
    ) -> None:
        """Appends an activation with its numbers, or its backward pass."""
        mode, *numbers = descriptor.told
        made = (backward if is_backward else forward)(mode, dtype)
        self.add(made, arguments, **made.numbers(*numbers))

    def scale(self, alpha: float | None, beta: float | None) -> None:
        """Multiplies the last result; a StatusError where beta is not 0."""
        self.given[-1] |= factor_of(ACTIVATION, alpha, beta)

    def run(self, call: Call) -> None:
        """Compiles and launches; a FuseplanError as `checked` and `Call.launch` do."""
        call.launch(self.checked(call.src[0]), self.given)

    def checked(self, src: TensorSpec) -> Lowered:
        """The plan, after a check of all values.

        Raises:
            PlanError: an operator cannot take what comes before it.
            ArgumentError: an operator does not take a tensor or a number.
        """
        made = lowered(src, self.operators, scaled(self.given))
        for index, values in enumerate(self.given):
            made.check(index, values)
        return made


def convolve(arguments: Arguments) -> None:
    """A convolution, a tensor that is added unless it is null, a bias and an activation."""
    src, z, z_descriptor = arguments["xDesc"].spec, arguments["z"], arguments["zDesc"]
    convolution = arguments["convDesc"].operator(src, arguments["wDesc"].spec)
    place = convolution.output(src)
    mode = miopenBatchNormMode_t.miopenBNSpatial
    check_parameters("biasDesc", arguments["biasDesc"].spec, place, mode)
    steps = Steps()
    steps.add(Operator(CONVOLUTION, convolution), arguments)
    if z is None:
        steps.scale(arguments["alpha1"], None)
    elif z_descriptor is None:
        raise bad_parameter("`zDesc` is null and `z` is not")
    else:
        check_same("z", z_descriptor.spec, place)
        factors = {name: arguments[name] for name in ("alpha1", "alpha2")}
        steps.add(Operator(RESIDUAL, Add()), arguments, **factors)
    steps.add(Operator(BIAS, Bias()), arguments)
    steps.activate(arguments["activationDesc"], src.dtype, arguments)
    steps.run(call_of(arguments, "x", "y"))


def activate(arguments: Arguments) -> None:
    """An activation, or its backward pass where there is a dy."""
    is_backward = "dy" in arguments
    call = call_of(arguments, *(("dy", "dx") if is_backward else ("x", "y")))
    check_same("x", arguments["xDesc"].spec, call.src[0])
    steps = Steps()
    steps.activate(arguments["activDesc"], call.src[0].dtype, arguments, is_backward=is_backward)
    steps.scale(arguments["alpha"], arguments["beta"])
    steps.run(call)


def infer(arguments: Arguments) -> None:
    """Normalizes by frozen statistics, inverse ones without epsilon; by the batch's where they are null."""
    call, mode = _call(arguments, "x", "y")
    steps, is_inverse = Steps(), "epsilon" not in arguments
    if has_statistics(arguments, "estimated"):
        steps.add(Operator(INFERENCE, BatchNorm(mode, inverse=is_inverse)), arguments)
    else:
        made = Operator(TRAINING, BatchNormTraining(mode, saved=False))
        steps.add(made, {"epsilon": EPSILON, **arguments})
    _finish(steps, call, arguments)


def train(arguments: Arguments) -> None:
    """Normalizes by the batch's statistics, saves them, and updates running ones, or other ones with them."""
    call, mode = _call(arguments, "x", "y")
    has_statistics(arguments, "save")
    is_running = has_statistics(arguments, "running")
    steps = Steps()
    steps.add(Operator(TRAINING, BatchNormTraining(mode, running=is_running)), arguments)
    is_copied = is_running and BEFORE[0] in arguments
    with _begun(steps, call, arguments) if is_copied else nullcontext():
        _finish(steps, call, arguments)


def differentiate(arguments: Arguments) -> None:
    """Computes the gradients of x, the input of the forward pass, scale and bias."""
    call, mode = _call(arguments, "dy", "dx")
    factors = (arguments["alphaParamDiff"], arguments["betaParamDiff"])
    if factors[0] not in (None, 1) or factors[1] not in (None, 0):
        raise bad_parameter(
            f"alphaParamDiff = {factors[0]}, betaParamDiff = {factors[1]}: gradients of scale and bias are "
            "neither scaled nor added to what was there; want 1 and 0"
        )
    check_same("x", arguments["xDesc"].spec, call.src[0])
    statistics = "saved" if has_statistics(arguments, "saved") else "recomputed"
    steps = Steps()
    steps.add(Operator(BACKWARD, BatchNormBackward(mode=mode, statistics=statistics)), arguments)
    _finish(steps, call, arguments)


def _call(arguments: Arguments, src: str, dst: str) -> tuple[Call, str]:
    """The handle, the ends and the mode of a call, after a check of its parameters' descriptors."""
    call, mode = call_of(arguments, src, dst), arguments["bn_mode"]
    parameters = arguments.keys() - {"xDesc", f"{src}Desc", f"{dst}Desc", "activDesc"}
    for name, value in arguments.items():
        if name in parameters and name.endswith("Desc"):
            check_parameters(name, value.spec, call.src[0], mode)
    return call, MODE_WORDS[mode]


def _finish(steps: Steps, call: Call, arguments: Arguments) -> None:
    """Appends the activation and the factor, and runs."""
    is_backward = "dy" in arguments
    if "activDesc" in arguments:
        steps.activate(arguments["activDesc"], call.src[0].dtype, {}, is_backward=is_backward)
    ending = "DataDiff" if is_backward else ""
    steps.scale(arguments[f"alpha{ending}"], arguments[f"beta{ending}"])
    steps.run(call)


@contextmanager
def _begun(steps: Steps, call: Call, arguments: Arguments) -> Iterator[None]:
    """Old values in the tensors that the first step updates, which a refused call leaves as they were.

    All are read before one is written: old and new ones may lie in the same memory in any order.
    """
    made, handle = steps.checked(call.src[0]), call.handle
    given = made.named(0, steps.given[0])
    into = [given[key] for key in RUNNING]
    old = [without_ones(made.plan, key, arguments[name]) for key, name in zip(RUNNING, BEFORE, strict=True)]
    held = [
        handle.contents(f"`{name}`", value, like) for name, value, like in zip(BEFORE, old, into, strict=True)
    ]
    before = [handle.contents("the tensor to update", each, each) for each in into]
    _write(handle, held, into)
    try:
        yield
    except Exception:
        _write(handle, before, into)
        raise


def _write(handle: miopenHandle_t, contents: list[Any], into: list[Any]) -> None:
    for each, tensor in zip(contents, into, strict=True):
        handle.write(each, tensor)

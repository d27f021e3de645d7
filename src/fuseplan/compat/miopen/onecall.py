"""Functions that do all in one call: operators, their arguments, the kernel, which the handle keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuseplan.compat.miopen.activations import backward, forward, miopenActivationDescriptor_t
from fuseplan.compat.miopen.arguments import factor_of
from fuseplan.compat.miopen.call import bad_parameter
from fuseplan.compat.miopen.enums import miopenBatchNormMode_t
from fuseplan.compat.miopen.execute import Arguments, Call, call_of, scaled
from fuseplan.compat.miopen.kinds import ACTIVATION, BIAS, CONVOLUTION, RESIDUAL
from fuseplan.compat.miopen.operators import Lowered, Operator, lowered
from fuseplan.compat.miopen.tensors import check_parameters, check_same
from fuseplan.ops.affine import Add, Bias
from fuseplan.tensor import TensorSpec


@dataclass
class Steps:
    """Operators and what each is given, gathered and run at once."""

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
        """Multiplies the last result.

        Raises:
            StatusError: beta is not 0.
        """
        self.given[-1] |= factor_of(ACTIVATION, alpha, beta)

    def run(self, call: Call) -> None:
        """Compiles and launches.

        Raises:
            FuseplanError: as `checked` and `Call.launch` do.
        """
        call.launch(self.checked(call.src[0]), self.given)

    def checked(self, src: TensorSpec) -> Lowered:
        """The plan, with everything that is given checked.

        Raises:
            PlanError: an operator cannot take what comes before it.
            ArgumentError: a tensor or a number is not what an operator takes.
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

"""Functions that do all in one call: operators, their arguments, the kernel, which the handle keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fuseplan.miopen.activations import miopenActivationDescriptor_t
from fuseplan.miopen.arguments import factor_of
from fuseplan.miopen.call import Pointer, Scalar, api, bad_parameter
from fuseplan.miopen.convolutions import miopenConvolutionDescriptor_t
from fuseplan.miopen.enums import miopenBatchNormMode_t, miopenConvFwdAlgorithm_t
from fuseplan.miopen.execute import Call, check_same, scaled, workspace_size
from fuseplan.miopen.handle import miopenHandle_t
from fuseplan.miopen.operators import ACTIVATION, BIAS, CONVOLUTION, RESIDUAL, Lowered, Operator, lowered
from fuseplan.miopen.plan import backward, check_parameters, forward
from fuseplan.miopen.tensors import miopenTensorDescriptor_t
from fuseplan.ops.affine import Add, Bias
from fuseplan.tensor import TensorSpec


@dataclass
class Steps:
    """Operators and what each is given, gathered and run at once."""

    operators: list[Operator] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)

    def add(self, operator: Operator, **values: Any) -> None:
        """Appends an operator; a result that is None is not given."""
        self.operators.append(operator)
        self.given.append({name: value for name, value in values.items() if value is not None})

    def activate(
        self, activDesc: miopenActivationDescriptor_t | None, dtype: str, *, is_backward: bool = False
    ) -> None:
        """Appends an activation with its numbers, or its backward pass, where there is one."""
        if activDesc is not None:
            mode, *numbers = activDesc.told
            made = (backward if is_backward else forward)(mode, dtype)
            self.add(made, **made.numbers(*numbers))

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


@api
def miopenConvolutionBiasActivationForward(
    handle: miopenHandle_t,
    alpha1: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    wDesc: miopenTensorDescriptor_t,
    w: Pointer,
    convDesc: miopenConvolutionDescriptor_t,
    algo: miopenConvFwdAlgorithm_t,
    workspace: Pointer | None,
    workspaceSizeInBytes: int,
    alpha2: Scalar | None,
    zDesc: miopenTensorDescriptor_t | None,
    z: Pointer | None,
    biasDesc: miopenTensorDescriptor_t,
    bias: Pointer,
    activationDesc: miopenActivationDescriptor_t,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
) -> None:
    """Computes y = activation(alpha1 * convolution(x, w) + alpha2 * z + bias), without z if that is null.

    `algo` binds: its templates run it, or the refusal says why none can.
    """
    src = xDesc.spec
    convolution = convDesc.operator(src, wDesc.spec)
    place = convolution.output(src)
    check_parameters("biasDesc", biasDesc.spec, place, miopenBatchNormMode_t.miopenBNSpatial)
    steps = Steps()
    steps.add(Operator(CONVOLUTION, convolution), weight=w)
    if z is None:
        steps.scale(alpha1, None)
    elif zDesc is None:
        raise bad_parameter("`zDesc` is null and `z` is not")
    else:
        check_same("z", zDesc.spec, place)
        steps.add(Operator(RESIDUAL, Add()), other=z, alpha1=alpha1, alpha2=alpha2)
    steps.add(Operator(BIAS, Bias()), bias=bias)
    steps.activate(activationDesc, src.dtype)
    size = workspace_size(workspace, workspaceSizeInBytes)
    steps.run(Call(handle, (src, x), (yDesc.spec, y), algo, size))


@api
def miopenActivationForward(
    handle: miopenHandle_t,
    activDesc: miopenActivationDescriptor_t,
    alpha: Scalar | None,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    beta: Scalar | None,
    yDesc: miopenTensorDescriptor_t,
    y: Pointer,
) -> None:
    """Computes y = alpha * activation(x)."""
    steps = Steps()
    steps.activate(activDesc, xDesc.spec.dtype)
    steps.scale(alpha, beta)
    steps.run(Call(handle, (xDesc.spec, x), (yDesc.spec, y)))


@api
def miopenActivationBackward(
    handle: miopenHandle_t,
    activDesc: miopenActivationDescriptor_t,
    alpha: Scalar | None,
    yDesc: miopenTensorDescriptor_t | None,
    y: Pointer | None,
    dyDesc: miopenTensorDescriptor_t,
    dy: Pointer,
    xDesc: miopenTensorDescriptor_t,
    x: Pointer,
    beta: Scalar | None,
    dxDesc: miopenTensorDescriptor_t,
    dx: Pointer,
) -> None:
    """Computes dx = alpha * dy * activation'(x); y is not read."""
    check_same("x", xDesc.spec, dyDesc.spec)
    steps = Steps()
    steps.activate(activDesc, dyDesc.spec.dtype, is_backward=True)
    steps.given[-1] |= {"input": x}
    steps.scale(alpha, beta)
    steps.run(Call(handle, (dyDesc.spec, dy), (dxDesc.spec, dx)))

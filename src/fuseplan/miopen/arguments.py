"""The arguments of a plan's operators: tensors and numbers, by the operator's place, checked when set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fuseplan.miopen.call import Object, Pointer, Ref, Scalar, api, bad_parameter
from fuseplan.miopen.operators import (
    ACTIVATION,
    ACTIVATION_BACKWARD,
    ALPHA,
    BACKWARD,
    BIAS,
    CONVOLUTION,
    INFERENCE,
    TRAINING,
    Kind,
    Operator,
)
from fuseplan.miopen.plan import miopenFusionOpDescriptor_t
from fuseplan.ops.training import BatchNormTraining


@dataclass(frozen=True)
class Given:
    """What one operator is given: by the names of its operands, results and parameters."""

    operator: Operator
    values: Mapping[str, Any]


class miopenOperatorArgs_t(Object):
    """Arguments of operators; what is set again is overwritten, and any number of executions may use them."""

    def __init__(self) -> None:
        super().__init__()
        self._given: dict[int, Given] = {}

    def set(
        self,
        descriptor: miopenFusionOpDescriptor_t,
        kind: Kind,
        alpha: float | None,
        beta: float | None,
        values: Mapping[str, Any],
    ) -> None:
        """Sets what an operator is given.

        Raises:
            StatusError: the operator is of another kind; alpha or beta is not honoured.
            ArgumentError: a tensor or a number is not what the operator takes.
        """
        descriptor.check(kind)
        factor = factor_of(kind, alpha, beta)
        descriptor.plan.lowered().check(descriptor.index, values)
        self._given[descriptor.index] = Given(descriptor.operator, {**values, **factor})

    def of(self, descriptor: miopenFusionOpDescriptor_t) -> Mapping[str, Any]:
        """What was set for an operator of a plan, or for its equal at the same place of another.

        Raises:
            StatusError: nothing was, or it was set for another operator.
        """
        given, operator = self._given.get(descriptor.index), descriptor.operator
        if given is None:
            raise bad_parameter(
                f"operator {descriptor.index} ({operator.kind.name}) has no arguments: "
                f"{operator.kind.set_args} sets them"
            )
        if given.operator != operator:
            raise bad_parameter(
                f"the arguments of operator {descriptor.index} were set for another plan's "
                f"{given.operator.op}; this plan has {operator.op}"
            )
        return given.values


def factor_of(kind: Kind, alpha: float | None, beta: float | None) -> dict[str, float]:
    """Alpha, where it is not 1.

    Raises:
        StatusError: alpha or beta is not honoured.
    """
    if beta:
        raise bad_parameter(
            f"beta = {beta}: a result overwrites its tensor and is never added to the old values; "
            "want 0 or null (miopenConvolutionBiasActivationForward adds a tensor, z)"
        )
    if alpha is None or alpha == 1:
        return {}
    if kind.refuses_alpha:
        raise bad_parameter(f"alpha = {alpha} of a {kind.name}: {kind.refuses_alpha}")
    return {ALPHA: alpha}


@api
def miopenCreateOperatorArgs(args: Ref) -> None:
    """Makes an arguments object."""
    args.value = miopenOperatorArgs_t()


@api
def miopenDestroyOperatorArgs(args: miopenOperatorArgs_t) -> None:
    """Ends an arguments object; the tensors are their owners'."""
    args.destroy()


@api
def miopenSetOpArgsConvForward(
    args: miopenOperatorArgs_t,
    convOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    w: Pointer,
) -> None:
    """Sets a convolution's weight; its result is multiplied by alpha."""
    args.set(convOp, CONVOLUTION, alpha, beta, {"weight": w})


@api
def miopenSetOpArgsBiasForward(
    args: miopenOperatorArgs_t,
    biasOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    bias: Pointer,
) -> None:
    """Sets a bias; alpha is 1."""
    args.set(biasOp, BIAS, alpha, beta, {"bias": bias})


@api
def miopenSetOpArgsActivForward(
    args: miopenOperatorArgs_t,
    activFwdOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    activAlpha: float,
    activBeta: float,
    activGamma: float,
) -> None:
    """Sets an activation's numbers; its result is multiplied by alpha."""
    numbers = activFwdOp.operator.numbers(activAlpha, activBeta, activGamma)
    args.set(activFwdOp, ACTIVATION, alpha, beta, numbers)


@api
def miopenSetOpArgsBatchNormInference(
    args: miopenOperatorArgs_t,
    bnOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    bnScale: Pointer,
    bnBias: Pointer,
    estimatedMean: Pointer,
    estimatedVariance: Pointer,
    epsilon: float,
) -> None:
    """Sets frozen statistics; the result is multiplied by alpha."""
    values = {
        "scale": bnScale,
        "shift": bnBias,
        "mean": estimatedMean,
        "variance": estimatedVariance,
        "epsilon": epsilon,
    }
    args.set(bnOp, INFERENCE, alpha, beta, values)


@api
def miopenSetOpArgsBatchNormForward(
    args: miopenOperatorArgs_t,
    bnOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    bnScale: Pointer,
    bnBias: Pointer,
    savedMean: Pointer | None,
    savedInvVariance: Pointer | None,
    runningMean: Pointer | None,
    runningVariance: Pointer | None,
    expAvgFactor: float,
    epsilon: float,
) -> None:
    """Sets what training normalizes by and where statistics go; y is multiplied by alpha.

    Saved statistics may be null, both of them. Running ones are given if, and only if, the operator was
    created with them.
    """
    saved = together(savedMean=savedMean, savedInvVariance=savedInvVariance)
    running = together(runningMean=runningMean, runningVariance=runningVariance)
    op = bnOp.operator.op
    if isinstance(op, BatchNormTraining) and op.running != running:
        wanted = "want running statistics" if op.running else "want null for running statistics"
        raise bad_parameter(f"the operator was created with runningMeanVariance={op.running}: {wanted}")
    values = {"scale": bnScale, "shift": bnBias, "epsilon": epsilon}
    if saved:
        values |= {"saved_mean": savedMean, "saved_inverse_variance": savedInvVariance}
    if running:
        values |= {"running_mean": runningMean, "running_variance": runningVariance, "momentum": expAvgFactor}
    args.set(bnOp, TRAINING, alpha, beta, values)


def together(**pointers: Any) -> bool:
    """Whether tensors that go together are given.

    Raises:
        StatusError: some are, and some are null.
    """
    absent = [name for name, value in pointers.items() if value is None]
    if absent and len(absent) < len(pointers):
        raise bad_parameter(f"`{'`, `'.join(absent)}` is null; `{'`, `'.join(pointers)}` go together")
    return not absent


@api
def miopenSetOpArgsBatchNormBackward(
    args: miopenOperatorArgs_t,
    bnOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    x: Pointer,
    bnScale: Pointer,
    bnBias: Pointer,
    resultBnScaleDiff: Pointer,
    resultBnBiasDiff: Pointer,
    savedMean: Pointer,
    savedInvVariance: Pointer,
) -> None:
    """Sets what the forward pass had and where gradients go; alpha is 1."""
    values = {
        "input": x,
        "scale": bnScale,
        "shift": bnBias,
        "mean": savedMean,
        "inverse_variance": savedInvVariance,
        "scale_gradient": resultBnScaleDiff,
        "shift_gradient": resultBnBiasDiff,
    }
    args.set(bnOp, BACKWARD, alpha, beta, values)


@api
def miopenSetOpArgsActivBackward(
    args: miopenOperatorArgs_t,
    activBwdOp: miopenFusionOpDescriptor_t,
    alpha: Scalar | None,
    beta: Scalar | None,
    y: Pointer | None,
    reserved: Pointer | None,
    activAlpha: float,
    activBeta: float,
    activGamma: float,
) -> None:
    """Sets an activation's numbers and, in `reserved`, what it was applied to; dx is multiplied by alpha.

    Behind a batch normalization's backward pass `reserved` is null: that is computed again from its x. `y`
    is not read: the derivative is taken where the activation was applied.
    """
    activBwdOp.check(ACTIVATION_BACKWARD)
    values: dict[str, Any] = activBwdOp.operator.numbers(activAlpha, activBeta, activGamma)
    if not activBwdOp.follows(BACKWARD):
        if reserved is None:
            raise bad_parameter("`reserved` is null: want the activation's input; y alone is not enough")
        values |= {"input": reserved}
    elif reserved is not None:
        raise bad_parameter(
            "`reserved` is not null; want null: the x of the batch normalization before it is used"
        )
    args.set(activBwdOp, ACTIVATION_BACKWARD, alpha, beta, values)

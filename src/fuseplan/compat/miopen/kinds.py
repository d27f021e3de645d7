"""Kinds of operators: names, and MIOpen's arguments as an operator's operands, results and parameters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fuseplan.errors import ArgumentError
from fuseplan.tensors.arguments import Tensor


def pairs(text: str) -> dict[str, str]:
    """A table of `name=name`, separated by spaces."""
    left_and_right = (each.partition("=") for each in text.split())
    return {left: right for left, _, right in left_and_right}


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of operator.

    Attributes:
        set_args: the function that sets its arguments.
        takes: the operator's operands, results and parameters, by the names of MIOpen's arguments.
        refuses_alpha: why a factor other than 1 has no meaning; empty where it multiplies the result.
        unread: names of `takes` that the operator does not have in every plan.
    """

    name: str
    set_args: str
    takes: dict[str, str]
    refuses_alpha: str = ""
    unread: tuple[str, ...] = ()


SCALE_AND_BIAS = "bnScale=scale bnBias=shift epsilon=epsilon"
CONVOLUTION = Kind("convolution forward", "miopenSetOpArgsConvForward", pairs("w=weight"))
BIAS = Kind(
    "bias forward",
    "miopenSetOpArgsBiasForward",
    pairs("bias=bias"),
    "MIOpen does not say whether it would multiply the bias or the sum: scale the bias itself",
)
ACTIVATION = Kind("activation forward", "miopenSetOpArgsActivForward", {})
ACTIVATION_BACKWARD = Kind(
    "activation backward", "miopenSetOpArgsActivBackward", pairs("reserved=input x=input")
)
INFERENCE = Kind(
    "batch normalization inference",
    "miopenSetOpArgsBatchNormInference",
    pairs(
        f"{SCALE_AND_BIAS} estimatedMean=mean estimatedVariance=variance "
        "estimatedInvVariance=inverse_variance"
    ),
)
TRAINING = Kind(
    "batch normalization forward training",
    "miopenSetOpArgsBatchNormForward",
    pairs(
        f"{SCALE_AND_BIAS} expAvgFactor=momentum savedMean=saved_mean resultSaveMean=saved_mean "
        "savedInvVariance=saved_inverse_variance resultSaveInvVariance=saved_inverse_variance "
        "runningMean=running_mean resultRunningMean=running_mean nextResultRunningMean=running_mean "
        "runningVariance=running_variance resultRunningVariance=running_variance "
        "nextResultRunningVariance=running_variance"
    ),
    unread=("momentum",),  # without running statistics
)
BACKWARD = Kind(
    "batch normalization backward",
    "miopenSetOpArgsBatchNormBackward",
    pairs(
        f"x=input {SCALE_AND_BIAS} savedMean=mean savedInvVariance=inverse_variance "
        "resultBnScaleDiff=scale_gradient resultBnBiasDiff=shift_gradient"
    ),
    "MIOpen does not say whether it would multiply dx alone or the gradients of scale and bias too",
    unread=("shift", "epsilon"),  # for an activation behind it alone; without saved statistics alone
)
RESIDUAL = Kind("tensor scale add", "miopenConvolutionBiasActivationForward", pairs("z=other"))
ENDS = pairs("dy=src x=src input=src dx=out y=out output=out")
KINDS = (CONVOLUTION, BIAS, ACTIVATION, ACTIVATION_BACKWARD, INFERENCE, TRAINING, BACKWARD, RESIDUAL)
# Every argument of MIOpen's with our name for the same tensor. The first argument that a function has counts.
SPELLED = [pair for names in (ENDS, *(kind.takes for kind in KINDS)) for pair in names.items()]


def spelled(error: ArgumentError, parameters: Collection[str]) -> str:
    """An error's message, in which a tensor that is an argument of the call has its name there."""

    def name(tensor: Tensor) -> str:
        theirs = (each for each, ours in SPELLED if ours == tensor.name and each in parameters)
        return next((f"`{each}`" for each in theirs), str(tensor))

    return error.told(name)

"""What errors of this library call a tensor, by the name that it has in the call that was made."""

from __future__ import annotations

from collections.abc import Collection

from fuseplan.arguments import Tensor
from fuseplan.errors import ArgumentError

# Our names, and MIOpen's for it: the first that the function has.
SPELLED = {
    "src": ("dy", "x", "input"),
    "out": ("dx", "y", "output"),
    "weight": ("w",),
    "bias": ("bias",),
    "other": ("z",),
    "input": ("reserved", "x"),
    "scale": ("bnScale",),
    "shift": ("bnBias",),
    "mean": ("estimatedMean", "savedMean"),
    "variance": ("estimatedVariance",),
    "inverse_variance": ("estimatedInvVariance", "savedInvVariance"),
    "saved_mean": ("savedMean", "resultSaveMean"),
    "saved_inverse_variance": ("savedInvVariance", "resultSaveInvVariance"),
    "running_mean": ("runningMean", "resultRunningMean", "nextResultRunningMean"),
    "running_variance": ("runningVariance", "resultRunningVariance", "nextResultRunningVariance"),
    "scale_gradient": ("resultBnScaleDiff",),
    "shift_gradient": ("resultBnBiasDiff",),
}


def spelled(error: ArgumentError, parameters: Collection[str]) -> str:
    """An error's message, in which a tensor that is an argument of the call has its name there."""

    def name(tensor: Tensor) -> str:
        theirs = (each for each in SPELLED.get(tensor.name, ()) if each in parameters)
        return next((f"`{each}`" for each in theirs), str(tensor))

    return error.told(name)

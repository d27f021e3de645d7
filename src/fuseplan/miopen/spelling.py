"""What errors of this library call a tensor, by the name that it has in the call that was made."""

from __future__ import annotations

import re
from collections.abc import Collection

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
_NAME = re.compile(rf"(?:operand |result )?`({'|'.join(SPELLED)})(?:_\d+)?`")


def spelled(text: str, parameters: Collection[str]) -> str:
    """A message, in which what is an argument of the call has its name there."""

    def name(match: re.Match[str]) -> str:
        return next((f"`{each}`" for each in SPELLED[match[1]] if each in parameters), match[0])

    return _NAME.sub(name, text)

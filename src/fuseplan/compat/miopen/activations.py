"""Activations: the operator of each mode, and its parameters for activAlpha, activBeta and activGamma."""

from __future__ import annotations

from math import inf

from fuseplan.compat.miopen.call import Object, not_initialized
from fuseplan.compat.miopen.enums import miopenActivationMode_t
from fuseplan.compat.miopen.kinds import ACTIVATION, ACTIVATION_BACKWARD
from fuseplan.compat.miopen.operators import Operator
from fuseplan.compat.miopen_driver import letters
from fuseplan.op import Elementwise
from fuseplan.ops.activation import Clamp, Power
from fuseplan.ops.training import ActivationBackward

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
        """Mode, alpha, beta and gamma.

        Raises:
            StatusError: nothing was set yet.
        """
        if self._told is None:
            raise not_initialized(
                "the activation descriptor was never set: miopenSetActivationDescriptor sets its mode"
            )
        return self._told

    def set(self, mode: Mode, alpha: float, beta: float, gamma: float) -> None:
        """Sets it."""
        self._told = (mode, alpha, beta, gamma)

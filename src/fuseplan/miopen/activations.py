"""Activations: which operator each mode is, and what activAlpha, activBeta and activGamma are of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fuseplan.driver import letters
from fuseplan.miopen.call import Object, Ref, StatusError, api, write
from fuseplan.miopen.enums import miopenActivationMode_t, miopenStatus_t
from fuseplan.op import Elementwise
from fuseplan.ops.activation import Clamp, Power


@dataclass(frozen=True)
class Activation:
    """An operator, and its parameters in the order of activAlpha, activBeta, activGamma."""

    op: Elementwise
    parameters: tuple[str, ...] = ()


def _default(kind: type[Elementwise]) -> Elementwise:
    """The operator; its numbers are given with each call."""
    return Clamp(-inf, inf) if kind is Clamp else kind()


Mode = miopenActivationMode_t
ACTIVATIONS: dict[Mode, Activation] = {
    mode: Activation(_default(kind), names)
    for mode, (kind, names) in zip(Mode, letters.ACTIVATIONS.values(), strict=True)
}


def activation(mode: Mode, dtype: str) -> Activation:
    """The operator of a mode for tensors of that dtype; below its threshold POWER is 0."""
    known = ACTIVATIONS[mode]
    if mode is Mode.miopenActivationPOWER and dtype in letters.POWER_THRESHOLD:
        return Activation(Power(threshold=letters.POWER_THRESHOLD[dtype]), known.parameters)
    return known


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
            raise StatusError(
                miopenStatus_t.miopenStatusNotInitialized,
                "the activation descriptor was never set: miopenSetActivationDescriptor sets its mode",
            )
        return self._told

    def set(self, mode: Mode, alpha: float, beta: float, gamma: float) -> None:
        """Sets it."""
        self._told = (mode, alpha, beta, gamma)


@api
def miopenCreateActivationDescriptor(activDesc: Ref) -> None:
    """Makes an activation descriptor; miopenSetActivationDescriptor sets its mode."""
    activDesc.value = miopenActivationDescriptor_t()


@api
def miopenSetActivationDescriptor(
    activDesc: miopenActivationDescriptor_t,
    mode: miopenActivationMode_t,
    activAlpha: float,
    activBeta: float,
    activGamma: float,
) -> None:
    """Sets an activation and its numbers."""
    activDesc.set(mode, activAlpha, activBeta, activGamma)


@api
def miopenGetActivationDescriptor(
    activDesc: miopenActivationDescriptor_t, mode: Ref, activAlpha: Ref, activBeta: Ref, activGamma: Ref
) -> None:
    """Reads an activation and its numbers."""
    write((mode, activAlpha, activBeta, activGamma), activDesc.told)


@api
def miopenDestroyActivationDescriptor(activDesc: miopenActivationDescriptor_t) -> None:
    """Ends an activation descriptor."""
    activDesc.destroy()

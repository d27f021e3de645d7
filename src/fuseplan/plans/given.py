"""Arrays and numbers given for a plan by its keys, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from fuseplan.errors import ArgumentError, did_you_mean
from fuseplan.language.declarations import Array
from fuseplan.language.fields import as_float
from fuseplan.messages.excerpt import shown
from fuseplan.plans.step import Step


def given_by_key(
    steps: Sequence[Step], operands: Mapping[str, ArrayLike], parameters: Mapping[str, float]
) -> tuple[dict[str, Array], dict[str, float]]:
    """Operands and old values of updated results in float64, and parameters, of a plan's steps.

    Raises:
        ArgumentError: an array is missing, unknown or of another shape, or a number is unknown or none.
    """
    shapes = {each.key: each.shape for step in steps for each in step.operands}
    shapes |= {each.key: each.shape for step in steps for each in step.results if each.updated}
    titles = {each.key: step.title for step in steps for each in step.parameters}
    _check_keys("operand", operands, shapes, required=True)
    _check_keys("parameter", parameters, titles, required=False)
    arrays = {key: wide(key, operands[key], shape) for key, shape in shapes.items()}
    return arrays, {key: number(key, titles[key], value) for key, value in parameters.items()}


def _check_keys(what: str, given: Collection[str], known: Collection[str], *, required: bool) -> None:
    """Refuses names that the plan does not have and, if they are required, that some are missing.

    Raises:
        ArgumentError: there is such a name, or one is missing.
    """
    for key in given:
        if key not in known:
            raise ArgumentError(f"the plan has no {what} {shown(key)}. {did_you_mean(str(key), known)}")
    missing = [key for key in known if key not in given]
    if required and missing:
        raise ArgumentError(f"the plan's {what}s {', '.join(missing)} are missing")


def wide(name: str, value: ArrayLike, shape: tuple[int, ...]) -> Array:
    """The array in float64; an ArgumentError where it has another shape."""
    array = np.asarray(value)
    if array.shape != shape:
        raise ArgumentError(f"{name} has shape {array.shape}; want {shape}")
    return array.astype(np.float64)


def number(key: str, operator: str, value: object) -> float:
    """The number given for a parameter; NaN and infinities are numbers.

    Raises:
        ArgumentError: it is none, or too large for a float.
    """
    try:
        return as_float(value)
    except ValueError as error:
        raise ArgumentError(f"parameter `{key}` of {operator} {error}; got {shown(value)}") from None

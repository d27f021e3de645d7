"""Checks of the values that an operator's fields are given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fuseplan.errors import PlanError, near_miss
from fuseplan.tensor import is_integer


def refused(operator: str, field: str, problem: str, **details: Any) -> PlanError:
    """The error about one field of an operator; `details` are PlanError's own."""
    return PlanError(f"{operator}: {field} {problem}", field=field, **details)


def real(operator: str, field: str, value: object) -> float:
    """The value of an operator's field as a float.

    Raises:
        PlanError: it is no number, or NaN, or too large for a float.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise refused(operator, field, "is a number", got=repr(value))
    try:
        number = float(value) + 0.0  # negative zero prints as zero, so it is zero
    except OverflowError:
        raise refused(operator, field, "is a number that fits in a float", want="at most 1.8e308") from None
    if math.isnan(number):
        raise refused(operator, field, "is a number", got="nan", want="a number or an infinity")
    return number


def one_of(operator: str, field: str, value: object, known: Iterable[str]) -> None:
    """Checks that the value of an operator's field is one of the known words.

    Raises:
        PlanError: it is not.
    """
    names = list(known)
    if value not in names:
        near = near_miss(str(value), names)
        raise refused(operator, field, f"is not {value!r}", want=" or ".join(names), remedy=near)


def positive(operator: str, field: str, value: Any) -> int:
    """The value of an operator's field as an int.

    Raises:
        PlanError: it is no integer from 1 to 2^31 - 1.
    """
    if not is_integer(value) or not 1 <= value < 2**31:
        want = "a whole number from 1 to 2^31 - 1"
        raise refused(operator, field, "is a positive integer", got=repr(value), want=want)
    return int(value)


def true_or_false(operator: str, field: str, value: object) -> None:
    """Checks that the value of an operator's field is True or False.

    Raises:
        PlanError: it is not.
    """
    if not isinstance(value, bool):
        raise refused(operator, field, "is True or False", got=repr(value))

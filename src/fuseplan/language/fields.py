"""Checks of the values that an operator's fields are given."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import keyword
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import Field
from typing import Any

import numpy as np

from fuseplan.errors import PlanError, counted, did_you_mean, near_miss
from fuseplan.language.extents import is_integer
from fuseplan.messages.elsewhere import answers
from fuseplan.messages.excerpt import shown


def refused(operator: str, field: str, problem: str, **details: Any) -> PlanError:
    """The error about one field of an operator; `details` are PlanError's own."""
    return PlanError(f"{operator}: {field} {problem}", field=field, **details)


@functools.cache
def declared_fields(kind: Any) -> tuple[Field[Any], ...]:
    """The fields of a dataclass: plans ask for those of their operators thousands of times."""
    return dataclasses.fields(kind)


@functools.cache
def _values_of(kind: Any) -> Callable[[Any], Any]:
    """What gives an object's fields, and its class, of a dataclass."""
    return operator.attrgetter(*(each.name for each in declared_fields(kind)), "__class__")


class Record:
    """What operators inherit: they are compared, hashed and printed by their fields.

    `dataclass` would make these three methods for each class, which took a fifth of `import fuseplan`.
    """

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        kind: Any = type(self)
        values = _values_of(kind)
        return bool(values(self) == values(other))

    def __hash__(self) -> int:
        kind: Any = type(self)
        return hash(_values_of(kind)(self))

    def __repr__(self) -> str:
        kind: Any = type(self)
        told = (f"{each.name}={getattr(self, each.name)!r}" for each in declared_fields(kind))
        return f"{kind.__qualname__}({', '.join(told)})"


# Words that have a meaning already where a plan is run.
RESERVED = ("x", "self", "src", "dst", "out")
NAME = "letters, digits and _, and no word that has a meaning already"
signature: Callable[[Any], inspect.Signature] = functools.cache(inspect.signature)


def is_name(name: object, taken: Collection[str] = RESERVED) -> bool:
    """Whether a plan may use the name for a value or a parameter of its own."""
    if not isinstance(name, str) or keyword.iskeyword(name):
        return False
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name, re.ASCII) is not None and name not in taken


def as_float(value: object) -> float:
    """A number as a float; NaN and infinities are numbers.

    Raises:
        ValueError: the value is no number, or too large for a float; the message is the end of a sentence.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.floating | np.integer):
        raise ValueError("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("must be a number that fits in a float, at most 1.8e308") from None


def real(operator: str, field: str, value: object) -> float:
    """The value of an operator's field as a float.

    Raises:
        PlanError: the value is no number, is NaN, or is too large for a float.
    """
    try:
        number = as_float(value) + 0.0  # negative zero prints as zero, so it is zero
    except ValueError as error:
        raise refused(operator, field, str(error), got=shown(value)) from None
    if math.isnan(number):
        remedy = "A plan is compared by value, and NaN equals nothing: a call may give it"
        raise refused(operator, field, "must be a number", got="nan", remedy=remedy)
    return number


def one_of(operator: str, field: str, value: object, known: Iterable[str]) -> None:
    """Checks that the value of an operator's field is one of the known words.

    Raises:
        PlanError: the value is another one.
    """
    names = list(known)
    if value not in names:
        near = near_miss(str(value), names)
        raise refused(operator, field, f"is not {shown(value)}", want=" or ".join(names), remedy=near)


def positive(operator: str, field: str, value: Any) -> int:
    """The value of an operator's field as an int.

    Raises:
        PlanError: the value is no integer from 1 to 2^31 - 1.
    """
    if not is_integer(value) or not 1 <= value < 2**31:
        is_large = is_integer(value) and value >= 2**31
        problem = "must be at most 2^31 - 1" if is_large else "must be a positive integer"
        want = "a whole number from 1 to 2^31 - 1"
        raise refused(operator, field, problem, got=shown(value), want=want)
    return int(value)


def checked(operator: str, declared: Field[Any], value: Any, *, applies: bool) -> Any:
    """The value of an operator's field in its canonical form, by the field's declaration.

    Args:
        declared: a truth value, a word, a count or a parameter; any other field is as it is given.
        applies: whether the operator has the parameter.

    Raises:
        PlanError: the field cannot have the value.
    """
    name, marks = declared.name, declared.metadata
    if declared.type in ("bool", bool):
        if not isinstance(value, bool):
            raise refused(operator, name, "must be True or False", got=shown(value))
    elif "words" in marks:
        one_of(operator, name, value, marks["words"])
    elif "count" in marks:
        return positive(operator, name, value)
    elif "parameter" in marks:
        number = real(operator, name, value)
        if not applies and value != declared.default:
            raise refused(operator, name, "has no meaning here", got=value)
        return number
    return value


def fields_of(kind: type[Any]) -> tuple[list[str], list[str], bool]:
    """An operator's fields, its required fields, and whether it accepts other names as well."""
    taken = signature(kind).parameters.values()
    named = [each for each in taken if each.kind is not inspect.Parameter.VAR_KEYWORD]
    required = [each.name for each in named if each.default is inspect.Parameter.empty]
    return [each.name for each in named], required, len(named) < len(taken)


def no_field(kind: type[Any], name: str) -> PlanError:
    """The error about a field that an operator of the class does not have."""
    names, _, _ = fields_of(kind)
    advise = did_you_mean if names else near_miss
    remedy = advise(name, names, answers("fields"))
    return PlanError(f"{kind.name} has no field {shown(name)}", remedy=remedy)


def explained(made: Callable[..., None]) -> Callable[..., None]:
    """An operator's `__init__` that answers wrong fields by a PlanError, not by Python's TypeError."""

    @functools.wraps(made)
    def init(self: Any, /, *given: Any, **named: Any) -> None:
        try:
            made(self, *given, **named)
        except TypeError:
            error = _misused(type(self), len(given), named)
            if error is None:
                raise  # the operator's own: the call fits
            raise error from None

    return init


def _misused(kind: type[Any], given: int, named: Collection[str]) -> PlanError | None:
    """The error in a call of the class with a number of bare values and with names; None if the call fits."""
    names, required, is_open = fields_of(kind)
    unknown = [name for name in named if name not in names]
    if unknown and not is_open:
        return no_field(kind, unknown[0])
    parameters = signature(kind).parameters.values()
    bare = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    if given > len(bare):
        remedy = "src says the channels: PyTorch's Conv2d(16, 32, 3) is Conv2d(32, kernel=3) here"
        return PlanError(
            f"{kind.name} takes {counted(len(bare), 'value')} without a name",
            got=given,
            want=_sample(kind),
            remedy=remedy if kind.kind == "contraction" else None,
        )
    for name in bare[:given]:
        if name in named:
            return PlanError(f"{kind.name}: {name} is given twice")
    missing = [name for name in required if name not in bare[:given] and name not in named]
    return PlanError(f"{kind.name} needs {' and '.join(missing)}", want=_sample(kind)) if missing else None


def _sample(kind: type[Any]) -> str:
    """An operator of the class as Python writes it."""
    _, sample = next(iter(kind.samples()))
    written = [(name, value) for name, value, is_default in sample.written() if not is_default]
    values = [f"{name}={value!r}" if place else repr(value) for place, (name, value) in enumerate(written)]
    return f"such as {kind.__name__}({', '.join(values)})"

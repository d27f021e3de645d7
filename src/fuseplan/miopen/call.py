"""What every call has in common: its signature is the declaration by which arguments are checked.

A function of the API is written with `@api` and annotated; the decorator turns what was passed into what the
annotations say, and errors into statuses:

- `Ref` takes the cell that stands for an out-pointer;
- a class of `Object` takes such an object, alive, or a `Ref` that holds it;
- an enumeration takes a member, or its number;
- `int`, `float`, `bool`, `bytes`, `str` take such values; `Extents` a sequence of integers;
- `Pointer` takes a tensor, a stream, ...: a pointer in C; `Scalar` a number where C takes its address;
- with `| None`, null is taken too.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import threading
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Any

import numpy as np

from fuseplan.errors import ArgumentError, BuildError, FuseplanError, PlanError, Unsupported
from fuseplan.miopen.enums import miopenStatus_t
from fuseplan.miopen.spelling import spelled

Check = Callable[[str, Any], Any]  # (name, value, of which a Ref is opened) -> what the function is given


class StatusError(FuseplanError):
    """An error that knows its status."""

    def __init__(self, status: miopenStatus_t, what: str) -> None:
        super().__init__(what)
        self.status = status


def bad_parameter(what: str) -> StatusError:
    """The error of an argument that cannot be."""
    return StatusError(miopenStatus_t.miopenStatusBadParm, what)


def not_implemented(what: str) -> StatusError:
    """The error of what MIOpen's API can say and nothing computes."""
    return StatusError(miopenStatus_t.miopenStatusNotImplemented, what)


STATUS_OF: tuple[tuple[type[Exception], miopenStatus_t], ...] = (
    (PlanError, miopenStatus_t.miopenStatusBadParm),
    (ArgumentError, miopenStatus_t.miopenStatusBadParm),
    (Unsupported, miopenStatus_t.miopenStatusUnsupportedOp),
    (BuildError, miopenStatus_t.miopenStatusInternalError),
    (MemoryError, miopenStatus_t.miopenStatusAllocFailed),
)
_ERRORS: tuple[type[Exception], ...] = (StatusError, *(kind for kind, _ in STATUS_OF))


class Ref:
    """A variable of C: what its address is passed for is written into `value`.

    It is passed as it is wherever C passes the variable's address or the variable itself.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Ref({self.value!r})"


def write(cells: Iterable[Ref | None], values: Iterable[Any]) -> None:
    """Writes through out-pointers; what is null is not wanted."""
    for cell, value in zip(cells, values, strict=True):
        if cell is not None:
            cell.value = value


class Object:
    """Something that a create call makes and a destroy call ends."""

    def __init__(self) -> None:
        self._is_destroyed = False

    @property
    def is_alive(self) -> bool:
        """Whether it may be used."""
        return not self._is_destroyed

    def destroy(self) -> None:
        """Ends its use."""
        self._is_destroyed = True


_thread = threading.local()


def last_message() -> str:
    """The whole text of this thread's last call that failed; empty where none has."""
    return str(getattr(_thread, "message", ""))


def api(function: Callable[..., None]) -> Callable[..., miopenStatus_t]:
    """Makes a function of the API: checked arguments in, a status out.

    Errors that fuseplan raises on purpose become statuses; any other is a defect of fuseplan and is raised.
    """
    signature = inspect.signature(function)
    checks = functools.cache(lambda: _checks(function))

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> miopenStatus_t:
        try:
            given = signature.bind(*args, **named)
        except TypeError as error:
            return _failed(function, bad_parameter(f"{error}; it is called as {_written(signature)}"))
        given.apply_defaults()
        try:
            for name, value in given.arguments.items():
                given.arguments[name] = checks()[name](name, value)
            function(*given.args, **given.kwargs)
        except _ERRORS as error:
            return _failed(function, error)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is imported only where it is used
                raise
            return _failed(function, MemoryError(str(error)))
        return miopenStatus_t.miopenStatusSuccess

    return call


def _written(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"


def _failed(function: Callable[..., None], error: Exception) -> miopenStatus_t:
    names = inspect.signature(function).parameters
    told = spelled(error, names) if isinstance(error, ArgumentError) else str(error)
    _thread.message = f"{function.__name__}: {told}"
    if isinstance(error, StatusError):
        return error.status
    return next(status for kind, status in STATUS_OF if isinstance(error, kind))


def _checks(function: Callable[..., None]) -> dict[str, Check]:
    hints = typing.get_type_hints(function, include_extras=True)
    return {name: check_of(hint) for name, hint in hints.items() if name != "return"}


def check_of(hint: Any) -> Check:
    """How a value for a parameter of that annotation is checked."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    wanted = next(each for each in options if each is not types.NoneType)
    check = _check_of_one(wanted)
    is_nullable = types.NoneType in options

    def checked(name: str, value: Any) -> Any:
        given = value if wanted is Ref else held(value)
        if given is None and not is_nullable:
            raise bad_parameter(f"`{name}` is null{_unset(value)}")
        return None if given is None else check(name, given)

    return checked


def _unset(value: Any) -> str:
    return ": nothing was written into this Ref yet" if isinstance(value, Ref) else ""


def held(value: Any) -> Any:
    """What a `Ref` holds; any other value is itself."""
    return value.value if isinstance(value, Ref) else value


def _check_of_one(wanted: Any) -> Check:
    if typing.get_origin(wanted) is Annotated:
        check: Check = wanted.__metadata__[0]
        return check
    if wanted is Ref:
        return _reference
    if issubclass(wanted, IntEnum):
        return functools.partial(_member, wanted)
    if wanted in _NUMBERS:
        return functools.partial(_number, wanted)
    return functools.partial(_instance, wanted)


def _reference(name: str, value: Any) -> Ref:
    if not isinstance(value, Ref):
        raise bad_parameter(
            f"`{name}` is written to: want a Ref(), the variable's address in C; got {told(value)}"
        )
    return value


def _instance(kind: type[Any], name: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise bad_parameter(f"`{name}` is a {kind.__name__}; got {told(value)}")
    if isinstance(value, Object) and not value.is_alive:
        raise bad_parameter(f"`{name}` is a {kind.__name__} that was destroyed")
    return value


def _member(kind: type[IntEnum], name: str, value: Any) -> IntEnum:
    is_number = isinstance(value, int) and not isinstance(value, bool | IntEnum)
    if not (isinstance(value, kind) or is_number):
        raise bad_parameter(f"`{name}` is a {kind.__name__}; got {told(value)}")
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{each.name} = {each.value}" for each in kind)
        raise bad_parameter(f"`{name}` is a {kind.__name__}; {value} is none of {known}") from None


_NUMBERS: dict[type[Any], Any] = {
    int: int | np.integer,
    float: numbers.Real | np.floating | np.integer,
    bool: int | np.bool_,
}


def _number(kind: type[Any], name: str, value: Any) -> Any:
    is_flag = isinstance(value, bool | np.bool_)
    is_taken = isinstance(value, _NUMBERS[kind]) and (value in (0, 1) if kind is bool else not is_flag)
    if not is_taken:
        raise bad_parameter(f"`{name}` is of type {kind.__name__}; got {told(value)}")
    try:
        return kind(value)
    except OverflowError:
        raise bad_parameter(f"`{name}` is larger than a {kind.__name__} can be") from None


_SHORT = (bool, int, float, str)


def _pointer(name: str, value: Any) -> Any:
    return value


def _extents(name: str, value: Any) -> tuple[int, ...]:
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise bad_parameter(f"`{name}` is a sequence of integers; got {told(value)}")
    return tuple(_number(int, f"{name}[{place}]", each) for place, each in enumerate(listed))


def told(value: Any) -> str:
    """The value's type, behind the value where that is short."""
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, _SHORT) else kind


Pointer = Annotated[Any, _pointer]
Scalar = Annotated[float, functools.partial(_number, float)]
Extents = Annotated[tuple[int, ...], _extents]

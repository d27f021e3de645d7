"""The declarations of MIOpen's functions, read from `functions.txt`, and the frame of every call.

A declaration becomes a function, which checks arguments and returns a status. Everything follows from that
text: the function objects, the checks of arguments, the stub for editors, the reference, and the tests of bad
arguments. Its parts:

- `types`: by type, the arguments that have it. `Pointer` is a tensor, a stream, ...: a pointer in C; `Scalar`
  is a number where C takes its address; `Extents` is a sequence of integers.
- `lists`: arguments that many functions for batch normalization have; `{NAME}` stands for a list.
- `functions`. In a declaration
    - `*name` is an out-pointer: a result of the function is written there;
    - `name?` may be null;
    - `type name` gives an argument's type where `types` has another for that name;
    - `1<=name<=3` gives the least and the most of a number;
    - `name[count]` names the argument with the length of a sequence;
    - `name=value` is an argument that MIOpen does not have.
"""

from __future__ import annotations

import ast
import functools
import inspect
import numbers
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from fuseplan.compat.miopen.enums import miopenStatus_t
from fuseplan.compat.miopen.kinds import spelled
from fuseplan.errors import ArgumentError, BuildError, FuseplanError, PlanError, Unsupported, counted

_TEXT = (Path(__file__).parent / "functions.txt").read_text(encoding="utf-8")
TYPES, LISTS, FUNCTIONS = re.split(r"^== \w+\n", _TEXT, flags=re.M)[1:]
NULL = " | None"  # behind the type of an argument that may be null


@dataclass(frozen=True)
class Declaration:
    """A declared function.

    Attributes:
        signature: its parameters; the annotation of each is its type as text.
        bounds: the least and the most of numbers; None for no limit.
        lengths: by the name of a sequence, that of the argument with its length.
    """

    name: str
    section: str
    signature: inspect.Signature
    text: str
    bounds: dict[str, tuple[int, int | None]]
    lengths: dict[str, str]


def declarations() -> Iterator[Declaration]:
    """All functions, in the order in which they are declared."""
    section = ""
    lists = dict(re.findall(r"^(\w+): ((?:.+(?:\n    )?)+)$", LISTS, re.M))
    for match in _FUNCTION.finditer(FUNCTIONS.format(**lists)):
        if match["section"]:
            section = match["section"]
            continue
        found = list(_PARAMETER.finditer(match["parameters"]))
        yield Declaration(
            name=match["name"],
            section=section,
            signature=inspect.Signature([*map(_parameter, found)], return_annotation="miopenStatus_t"),
            text=inspect.cleandoc(match["text"]),
            bounds={each["name"]: _bounds(each) for each in found if each["least"]},
            lengths={each["name"]: each["length"] for each in found if each["length"]},
        )


_FUNCTION = re.compile(
    r"^(?:# (?P<section>.+)|(?P<name>\w+)\((?P<parameters>[^)]*)\)\n(?P<text>(?: {4}.*\n|\n(?= {4}))+))", re.M
)
_PARAMETER = re.compile(
    r"\s*(?:(?P<least>\d+)<=)?(?:(?P<type>\w+) )?(?P<out>\*?)(?P<name>\w+)(?:\[(?P<length>\w+)\])?"
    r"(?P<null>\??)(?:<=(?P<most>\d+))?(?:=(?P<default>[^,]+))?(?:,|$)"
)
_TYPE_OF = {
    name: kind
    for kind, names in re.findall(r"^(\w+):((?:\s+\w+\b(?!:))+)", TYPES, re.M)
    for name in names.split()
}


def _bounds(match: re.Match[str]) -> tuple[int, int | None]:
    return int(match["least"]), int(match["most"]) if match["most"] else None


def _parameter(match: re.Match[str]) -> inspect.Parameter:
    kind = "Ref" if match["out"] else match["type"] or _TYPE_OF[match["name"]]
    return inspect.Parameter(
        match["name"],
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=ast.literal_eval(match["default"]) if match["default"] else inspect.Parameter.empty,
        annotation=f"{kind}{NULL}" if match["null"] else kind,
    )


Check = Callable[[str, Any], Any]  # (name, value, not a Ref) -> the value for the function


class StatusError(FuseplanError):
    """An error that knows its status."""

    def __init__(self, status: miopenStatus_t, what: str) -> None:
        super().__init__(what)
        self.status = status


Status = miopenStatus_t
bad_parameter = functools.partial(StatusError, Status.miopenStatusBadParm)
not_initialized = functools.partial(StatusError, Status.miopenStatusNotInitialized)
invalid_value = functools.partial(StatusError, Status.miopenStatusInvalidValue)
not_implemented = functools.partial(StatusError, Status.miopenStatusNotImplemented)

STATUS_OF: tuple[tuple[type[Exception], miopenStatus_t], ...] = (
    (PlanError, miopenStatus_t.miopenStatusBadParm),
    (ArgumentError, miopenStatus_t.miopenStatusBadParm),
    (Unsupported, miopenStatus_t.miopenStatusUnsupportedOp),
    (BuildError, miopenStatus_t.miopenStatusInternalError),
    (MemoryError, miopenStatus_t.miopenStatusAllocFailed),
)
_ERRORS: tuple[type[Exception], ...] = (StatusError, *(kind for kind, _ in STATUS_OF))


class Ref:
    """A variable of C: a function writes its result into `value`.

    The same `Ref` is passed wherever C passes the variable or its address.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Ref({self.value!r})"


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


PUBLIC = "fuseplan.miopen"  # where users find the functions
_thread = threading.local()


def miopenGetLastErrorMessage() -> str:
    """Why this thread's last call that failed did: the refusal's or error's whole text. MIOpen has none."""
    return str(getattr(_thread, "message", ""))


def function(
    declared: Declaration, run: Callable[[dict[str, Any]], Any], checks: Mapping[str, Check]
) -> Callable[..., miopenStatus_t]:
    """Makes a declared function of the API: checked arguments in, results through out-pointers, a status out.

    `run` takes the arguments that are not out-pointers, by their names, and returns the result, or a tuple of
    as many results as there are out-pointers. Errors that fuseplan raises on purpose become statuses; any
    other is a defect of fuseplan and is raised.
    """
    types = {name: each.annotation for name, each in declared.signature.parameters.items()}
    check_of_name = {name: checks[kind.removesuffix(NULL)] for name, kind in types.items()}
    nullable = {name for name, kind in types.items() if kind.endswith(NULL)}
    outs = [name for name, check in check_of_name.items() if check is _reference]

    def call(*args: Any, **named: Any) -> miopenStatus_t:
        try:
            given = _bound(declared.signature, args, named)
            for name, value in given.items():
                given[name] = checked(name, value, check_of_name[name], is_nullable=name in nullable)
            _check_numbers(declared, given)
            cells = [given.pop(name) for name in outs]
            result = run(given)
            _write(cells, result if len(outs) > 1 else (result,) * len(outs))
        except _ERRORS as error:
            return _failed(declared, error)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is imported only where it is used
                raise
            return _failed(declared, MemoryError(str(error)))
        return miopenStatus_t.miopenStatusSuccess

    call.__name__ = call.__qualname__ = declared.name
    call.__module__, call.__doc__ = PUBLIC, declared.text
    call.__signature__ = declared.signature  # type: ignore[attr-defined]
    return call


def _bound(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    try:
        given = signature.bind(*args, **named)
    except TypeError as error:
        raise bad_parameter(f"{error}; it is called as ({', '.join(signature.parameters)})") from None
    given.apply_defaults()
    return dict(given.arguments)


def _check_numbers(declared: Declaration, given: Mapping[str, Any]) -> None:
    """Checks bounds of numbers, and lengths of sequences."""
    for name, (least, most) in declared.bounds.items():
        wanted = "or more" if most is None else f"{'or' if most == least + 1 else 'to'} {most}"
        if given[name] < least or (most is not None and given[name] > most):
            raise bad_parameter(f"`{name}` is {least} {wanted}; got {given[name]}")
    for name, count in declared.lengths.items():
        length = None if given[name] is None else len(given[name])
        if length not in (None, given[count]):
            raise bad_parameter(f"`{name}` has {counted(length, 'number')}; want {count} = {given[count]}")


def _write(cells: Sequence[Ref | None], values: Sequence[Any]) -> None:
    """Writes through out-pointers; a result whose out-pointer is null is not wanted."""
    for cell, value in zip(cells, values, strict=True):
        if cell is not None:
            cell.value = value


def _failed(declared: Declaration, error: Exception) -> miopenStatus_t:
    names = declared.signature.parameters
    told = spelled(error, names) if isinstance(error, ArgumentError) else str(error)
    _thread.message = f"{declared.name}: {told}"
    if isinstance(error, StatusError):
        return error.status
    return next(status for kind, status in STATUS_OF if isinstance(error, kind))


def checked(name: str, value: Any, check: Check, *, is_nullable: bool = False) -> Any:
    """The value of an argument, of which a `Ref` is opened unless it is an out-pointer.

    Raises:
        StatusError: it is null and may not be, or is of another type than `check` takes.
    """
    given = value if check is _reference else held(value)
    if given is not None:
        return check(name, given)
    if not is_nullable:
        unset = ": nothing was written into this Ref yet" if isinstance(value, Ref) else ""
        raise bad_parameter(f"`{name}` is null{unset}")
    return None


def held(value: Any) -> Any:
    """The value of a `Ref`; any other value is itself."""
    return value.value if isinstance(value, Ref) else value


def check_of(kind: type[Any]) -> Check:
    """How a value of an enumeration, or of a class of objects, is checked."""
    return functools.partial(_member if issubclass(kind, IntEnum) else _instance, kind)


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


def _extents(name: str, value: Any) -> tuple[int, ...]:
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise bad_parameter(f"`{name}` is a sequence of integers; got {told(value)}")
    return tuple(_number(int, f"{name}[{place}]", each) for place, each in enumerate(listed))


def told(value: Any) -> str:
    """The value's type, behind the value where that is short."""
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, _SHORT) else kind


# By the names of types in declarations.
CHECKS: dict[str, Check] = {
    "Ref": _reference,
    "Pointer": lambda name, value: value,
    "Extents": _extents,
    "Scalar": functools.partial(_number, float),
    **{kind.__name__: functools.partial(_number, kind) for kind in _NUMBERS},
    "bytes": functools.partial(_instance, bytes),
}

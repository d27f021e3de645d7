"""Files and JSON from outside: read within bounds, and checked against the record that they should be.

A record is a frozen dataclass: its fields' types say which members an object has. Every function here raises
OSError or ValueError with a sentence; the caller adds the file's name and the consequence.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fuseplan.errors import counted
from fuseplan.system import limits

R = TypeVar("R")

WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a finite number"}
_PIECES = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)  # strings, even without an end, and brackets
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


class Record:
    """A frozen dataclass whose fields are its JSON, and the properties that `derived` names."""

    derived: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields, and what follows from them, as JSON values."""
        return {**asdict(cast(Any, self)), **{name: getattr(self, name) for name in self.derived}}


def bytes_of(place: Path, most: int) -> bytes:
    """A file's bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it has more than `most` bytes.
    """
    with place.open("rb") as file:
        data = file.read(most + 1)  # a device or a pipe has no size that could be asked before
    if len(data) > most:
        raise ValueError(f"it has more than {counted(most, 'byte')}")
    return data


def text_of(data: bytes) -> str:
    """The text of bytes in UTF-8; the mark that some editors put in front is left out.

    Raises:
        ValueError: they are no UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte 0x{data[error.start]:02x} is not UTF-8 text") from None


def json_of(data: bytes) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: the text is no JSON, has NaN or an infinity, or has more than `limits.JSON_LEVELS` levels.
    """
    text = text_of(data)
    if _levels(data) > limits.JSON_LEVELS:
        raise ValueError(f"objects and lists are nested deeper than {limits.JSON_LEVELS} levels")
    return json.loads(text, parse_constant=_no_constant)


def json_lines(data: bytes) -> Iterator[tuple[int, Callable[[], Any]]]:
    """The number of each line that is not empty, and a function that gives its value as `json_of` does."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, partial(_line, line)


def record(kind: type[R], told: Any, where: str = "it") -> R:
    """The record that an object tells, with its lists as tuples.

    Args:
        told: the object; a member for a field that is a dataclass is an object too.
        where: its place in the file, for the message.

    Raises:
        ValueError: a member is missing, unknown, or of another type.
    """
    if not isinstance(told, Mapping):
        raise ValueError(f"{where} is {_shown(told)}; want an object")
    declared = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for name in told:
        if name not in declared:
            raise ValueError(f"{where} has an unknown member {name!r}; want {', '.join(declared)}")
    hints, given = _hints(cast("Hashable", kind)), {}
    for name, field in declared.items():
        if name in told:
            given[name] = _taken(told[name], hints[name], name if where == "it" else f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} has no {name!r}")
    return kind(**given)


_hints = functools.cache(get_type_hints)


def _taken(value: Any, hint: Any, where: str) -> Any:
    """A value as a field of that type holds it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else _taken(value, inner[0], where)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise ValueError(f"{where} is {_shown(value)}; want {len(kinds)} values")
        places = (f"{where}[{number}]" for number in range(len(value)))
        return tuple(map(_taken, value, kinds, places))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {_taken(key, inner[0], where): _taken(each, inner[1], where) for key, each in value.items()}
    if is_dataclass(hint):
        return value if isinstance(value, hint) else record(hint, value, where)  # type: ignore[arg-type]
    return _scalar(value, hint, where)


def _scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if hint in (str, bool, int) and type(value) is hint and (hint is not str or _is_plain(value)):
        return value
    raise ValueError(f"{where} is {_shown(value)}; want {WORDS.get(hint, 'a list')}")


def _is_plain(text: str) -> bool:
    """Whether a text holds nothing that a terminal would obey, and nothing that has no UTF-8."""
    return text.replace("\n", " ").replace("\t", " ").isprintable()


def _shown(value: Any) -> str:
    told = ascii(value)
    return told if len(told) <= 60 else f"{told[:57]}..."


def _levels(data: bytes) -> int:
    """How many objects and lists of JSON are inside each other at most."""
    if data.count(b"[") + data.count(b"{") <= limits.JSON_LEVELS:
        return 0  # there are not enough of them; nearly every line ends here
    steps = (_STEPS.get(piece, 0) for piece in _PIECES.findall(data))
    return max(itertools.accumulate(steps), default=0)


def _line(line: bytes) -> Any:
    if len(line) > limits.LINE_BYTES:
        raise ValueError(f"it has more than {counted(limits.LINE_BYTES, 'byte')}")
    return json_of(line)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number in JSON")

"""Files of lines in the cache folder, one JSON object a line: measured choices, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from fuseplan.errors import counted
from fuseplan.stores import cache
from fuseplan.system import limits, private
from fuseplan.system.reading import Record, json_lines, record

R = TypeVar("R")


class Stored(Record):
    """A record that is a line of such a file."""

    @classmethod
    def from_json(cls, told: Any) -> Self:
        """The record that `to_json` told; a ValueError where it did not."""
        if not isinstance(told, dict):
            raise ValueError("it is not an object")
        return record(cls, {name: told[name] for name in told if name not in cls.derived})


class Newest(Generic[R]):
    """The newest record of each key: of a file, and of this process in case that the file cannot be written.

    A record has a `key`, the `date` when it was made in UTC, and `to_json()`.

    Attributes:
        unsaved: this process's own, by key.

    Args:
        made: makes a record of a line's value; raises ValueError where it is none.
    """

    def __init__(self, name: str, made: Callable[[Any], R]) -> None:
        self._name, self._made = name, made
        self.unsaved: dict[Any, R] = {}
        self._known: dict[Path, tuple[tuple[int, int], dict[Any, R]]] = {}

    def keep(self, record: Any) -> None:
        """Appends a record to the file; where there is none it lasts as long as the process."""
        self.unsaved[record.key] = record
        append(self._name, record.to_json())

    def records(self) -> Mapping[Any, R]:
        """The records by key; the file is read again when it has changed."""
        where = cache.folder()
        try:
            found = None if where is None else (where / self._name).stat()
        except OSError:
            found = None
        if where is None or found is None:
            return self.unsaved
        stamp = (found.st_mtime_ns, found.st_size)
        if where not in self._known or self._known[where][0] != stamp:
            self._known[where] = stamp, newest(read(self._name, self._made))
        return self.unsaved | self._known[where][1]


def newest(records: Iterable[R]) -> dict[Any, R]:
    """The record of the last date of each key."""
    found: dict[Any, Any] = {}
    record: Any
    for record in records:
        known = found.get(record.key)
        if known is None or known.date <= record.date:
            found[record.key] = record
    return found


def append(name: str, told: Mapping[str, Any]) -> None:
    """Appends an object as a whole line; where it cannot, says so once and goes on."""
    where = cache.folder()
    if where is None or not cache.is_usable(where, private.make):
        return
    try:
        with cache.lock(cache.key_of(name)):
            private.append(where / name, json.dumps(told), limits.LINES_BYTES)
    except OSError as error:
        cache.report(where / name, f"{where / name} cannot be written ({error}): the result is not kept")


def read(name: str, made: Callable[[Any], R]) -> list[R]:
    """The records in a file, oldest first; a line or a file that is broken costs itself and one warning.

    Args:
        made: makes a record of a line's value; raises ValueError where it is none.
    """
    where = cache.folder()
    if where is None:
        return []
    place = where / name
    try:
        data = private.read(place, limits.LINES_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        if cache.is_usable(where, private.check):
            cache.report(place, f"{place} is not used: {error}")
        return []
    found, bad = [], []
    for number, told in json_lines(data):
        try:
            found.append(made(told()))
        except ValueError as error:
            bad.append(f"line {number}: {error}")
    if bad:
        skipped = counted(len(bad), "line")
        cache.report(place, f"{place}: {skipped} skipped; the first is {bad[0]}. Remove such lines")
    return found

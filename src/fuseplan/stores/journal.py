"""Files of lines in the cache folder, one JSON object a line: measured choices, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fuseplan.errors import counted
from fuseplan.stores import cache
from fuseplan.system import limits, private
from fuseplan.system.reading import json_lines

R = TypeVar("R")


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
        name: of the file.
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

"""Small measurements that are kept in the cache folder, a JSON file each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fuseplan import cache, limits, private
from fuseplan.reading import json_of, record

FORMAT = 1  # of the files; what has another number is measured again

R = TypeVar("R")
# Those that no folder took last as long as the process.
_unkept: dict[tuple[Path | None, str], Mapping[str, Any]] = {}


def place_of(*words: str) -> str:
    """The name of a measurement's file; what no file name may have is replaced."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-").lower()
    return f"{name}.json"


def read_kept(place: str, kind: type[R]) -> R | None:
    """The measurement in a file; None where it is absent, unreadable, or of another format."""
    try:
        told = _told(cache.folder(), place)
        return None if told is None else record(kind, told)
    except (OSError, ValueError):
        return None


def _told(where: Path | None, place: str) -> Mapping[str, Any] | None:
    if where is None or (where, place) in _unkept:
        return _unkept.get((where, place))
    told = json_of(private.read(where / place, limits.MEASUREMENT_BYTES))
    return told if isinstance(told, dict) and told.pop("format", None) == FORMAT else None


def write_kept(place: str, found: Mapping[str, Any]) -> None:
    """Keeps a measurement; where that is not possible, says so once, and this process alone knows it."""
    where = cache.folder()
    _unkept.pop((where, place), None)
    data = json.dumps({"format": FORMAT, **found}, indent=1).encode()
    if where is None or not cache.stored(where / place, data):
        _unkept[where, place] = found

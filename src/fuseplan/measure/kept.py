"""Small measurements that are kept in the cache directory, a JSON file each."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseplan.cache import report_unusable
from fuseplan.settings import settings

FORMAT = 1  # of the files; what has another number is measured again

_unkept: dict[Path, dict[str, Any]] = {}  # by their places: what no folder took lasts as long as the process


def place_of(*words: str) -> Path:
    """The file of a measurement; words that no file name may have are put in its place."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-").lower()
    return settings().cache_dir / f"{name}.json"


def read_kept(place: Path) -> dict[str, Any] | None:
    """What is stored; None where it is absent, unreadable, or of another format."""
    try:
        stored = json.loads(place.read_text())
        return stored if stored.pop("format") == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return _unkept.get(place)


def write_kept(place: Path, found: Mapping[str, object]) -> None:
    """Keeps what was measured; where it cannot, says so once, and this process alone knows it."""
    beside = place.with_suffix(f".{os.getpid()}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({"format": FORMAT, **found}, indent=1))
        beside.replace(place)
    except OSError as error:
        _unkept[place] = dict(found)
        report_unusable(place.parent, error)
        with contextlib.suppress(OSError):
            beside.unlink()

"""The files in the cache folder: the longest unused go, and files that were left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fuseplan.stores import cache
from fuseplan.system import private, stock

KEY = cache.key_of("one")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_tally", cache._Tally())
    return tmp_path / "kernels"


def aged(place: Path, days: int) -> Path:
    used = time.time() - days * private.DAY_SECONDS
    os.utime(place, (used, used))
    return place


def test_the_longest_unused_entries_go_when_the_size_is_reached(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_SIZE", "10K")
    keys = [cache.key_of(str(number)) for number in range(12)]
    for number, key in enumerate(keys[:9]):
        cache.write(key, b"x" * 1000)
        aged(folder / f"{key.hex()}{stock.SUFFIX}", 30 - number)
    assert cache.read(keys[0]) is not None  # used today
    cache.write(keys[9], b"x" * 1000)
    left = {place.stem for place in folder.glob(f"*{stock.SUFFIX}")}
    assert left == {key.hex() for key in (keys[0], *keys[4:10])}
    assert cache.cache_info().nbytes <= 10 << 10
    cache.write(keys[10], b"x" * (11 << 10))
    assert cache.read(keys[10]) is None, "one that is larger than all is not kept"
    assert len(list(folder.glob(f"*{stock.SUFFIX}"))) == 7


def test_about_one_write_in_sixteen_looks_at_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(stock, "evict", lambda where, most: looks.append(most))
    keys = [bytes([first]) + bytes(31) for first in range(2 * cache.LOOKS)]
    for key in keys:
        cache.write(key, b"small")
    assert looks == [1 << 30, 1 << 30]
    cache.write(keys[1], bytes((1 << 30) // cache.LOOKS**2))
    assert len(looks) == 3, "a large one looks by itself"


def test_files_that_a_dead_process_left_are_removed(folder: Path) -> None:
    cache.write(KEY, b"code")
    left, fresh = folder / f"{private.WRITING}left", folder / f"{private.WRITING}fresh"
    for place in (left, fresh):
        place.write_bytes(b"half")
    aged(left, 1)
    stock.evict(folder, 1 << 30)
    assert (left.exists(), fresh.exists()) == (False, True)
    assert cache.clear_cache() == 1
    assert list(folder.iterdir()) == []

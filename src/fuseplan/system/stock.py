"""The files in the cache folder: listed, counted, and the longest unused removed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuseplan.system.private import WRITING

OURS = SUFFIX, SUFFIX_OF_PARTS = ".kernel", ".part"
LEFT_SECONDS = 3600.0  # a file that is written longer was left behind by a process that died
EMPTIED_TO = 0.75  # of the size that is too much, so that the next kernel does not look again


@dataclass(frozen=True)
class Held:
    """One file: its path, its bytes, and when it was last used."""

    path: Path
    nbytes: int
    used: float

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel: neither a backend's own part nor a file that is not in its place yet."""
        return self.path.suffix == SUFFIX

    def remove(self) -> None:
        """Removes the file; another process may have done so.

        Raises:
            OSError: it cannot be removed.
        """
        self.path.unlink(missing_ok=True)


def held(where: Path) -> Iterator[Held]:
    """The kernels, parts and unfinished files in a folder; none where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        with os.scandir(where) as found:
            entries = [each for each in found if each.name.endswith(OURS) or each.name.startswith(WRITING)]
    except FileNotFoundError:
        return
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            told = entry.stat(follow_symlinks=False)
            yield Held(Path(entry.path), told.st_size, told.st_mtime)


def evict(where: Path, most: int) -> None:
    """Removes files that were left unfinished; above `most` bytes, also the longest unused of the others.

    Raises:
        OSError: the folder cannot be read, or a file not removed.
    """
    now = time.time()
    every = sorted(held(where), key=lambda each: each.used)
    left = [each for each in every if each.path.name.startswith(WRITING)]
    for each in left:
        if now - each.used > LEFT_SECONDS:
            each.remove()
    total = sum(each.nbytes for each in every)
    goal = total if total <= most else EMPTIED_TO * most
    for each in every:
        if total <= goal:
            return
        if each not in left:
            each.remove()
            total -= each.nbytes

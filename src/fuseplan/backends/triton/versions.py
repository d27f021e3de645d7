"""The versions of Triton that the backend compiles with, and everything in which they differ.

Templates write the names of the newest version; nothing else of a text depends on the version. Neither
importing this module nor finding the version imports triton.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

Version = tuple[int, ...]

# The tests compile with both. `make` installs the newest beside the oldest, and reads its number here.
OLDEST = "3.6.0"
NEWEST = "3.9.0"

# The version that has a name first, the name, and the name before it.
RENAMED: tuple[tuple[Version, str, str], ...] = (
    ((3, 7), "gl.barrier(", "gl.thread_barrier("),
    ((3, 8), "tma.async_load(", "tma.async_copy_global_to_shared("),
    ((3, 8), "tma.async_store(", "tma.async_copy_shared_to_global("),
    ((3, 9), ".reinterpret(", "._reinterpret("),
)
# The version that compiles some choices no more, and the knob that they have set. `reaching` views several
# lines of a ring, from any line on: 3.8 wants a view as large as the line that it begins at, 3.9 none larger.
REMOVED: tuple[tuple[Version, str], ...] = (((3, 8), "reaching"),)
# Options whose defaults change from version to version, or that the environment sets.
OPTIONS = {"enable_fp_fusion": True}  # 3.9 warns where it is not given: from 3.10 on it is to be off


def parsed(text: str) -> Version:
    """The numbers of a version: `3.6.0+git1234` is (3, 6, 0).

    Raises:
        ValueError: the text begins with no number.
    """
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a version")
    return tuple(map(int, found[0].split(".")))


def spelled(text: str, version: Version) -> str:
    """A kernel's text with the names of a version of Triton."""
    for since, name, before in RENAMED:
        if version < since:
            text = text.replace(name, before)
    return text


def makes(version: Version, template: object) -> bool:
    """Whether a version of Triton compiles a template's choice."""
    return not any(version >= since and getattr(template, knob, False) for since, knob in REMOVED)


def is_untested(version: Version) -> bool:
    """Whether a version is newer than all that the tests compile with; patches of the newest are not."""
    return version[:2] > parsed(NEWEST)[:2]


@functools.cache
def package() -> Path | None:
    """The folder of the installed Triton; None without one."""
    try:
        found = importlib.util.find_spec("triton")
    except (ImportError, ValueError):
        return None
    return Path(found.origin).parent if found is not None and found.origin else None


@functools.cache
def text_of(folder: Path) -> str | None:
    """The version of the Triton in a folder, as it tells it; None where it does not.

    It is read from the package's text: importing it takes 0.3 s, its metadata 20 ms, this 2 ms.
    """
    try:
        head = (folder / "__init__.py").read_text()[:4096]
    except OSError:
        return None
    found = re.search(r"""^__version__ = ["']([^"']+)["']""", head, re.MULTILINE)
    return found[1] if found else None


@functools.cache
def version_of(place: Path | None = None) -> Version | None:
    """The version of the installed Triton, or of the one in a folder of `pip install --target`; or None."""
    folder = package() if place is None else place / "triton"
    told = None if folder is None else text_of(folder)
    return parsed(told) if told else None


def dotted(version: Version) -> str:
    """`3.6.0`."""
    return ".".join(map(str, version))

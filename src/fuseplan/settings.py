"""Every environment variable that fuseplan reads, in one table; nothing else reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fuseplan.errors import ArgumentError
from fuseplan.system import limits

PTXAS = "FUSEPLAN_PTXAS"


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Attributes:
        cache_dir: folder of the disk cache; it begins with `~` where no such home directory is known.
        cache_size: bytes that kernels may take there.
        disable_cache: neither read nor write the disk cache.
        threads: threads a launch uses unless told otherwise; None for as many as there are processors.
        ptxas: NVIDIA's assembler, for kernels of its GPUs; None to look for one.
    """

    cache_dir: Path
    cache_size: int
    disable_cache: bool
    threads: int | None
    ptxas: Path | None = None


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field of `Settings` it sets, how its text is read, and what it means."""

    name: str
    field: str
    read: Callable[[str], object]
    default: Callable[[], object]
    meaning: str


def _flag(text: str) -> bool:
    known = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    if text.lower() not in known:
        raise ValueError("1 or 0")
    return known[text.lower()]


def _threads(text: str) -> int:
    count = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= count <= limits.THREADS:
        raise ValueError(f"a whole number from 1 to {limits.THREADS}")
    return count


def _place(text: str) -> Path:
    return Path(os.path.expanduser(text))  # pathlib's raises where there is no home


def _default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else _place("~/.cache")) / "fuseplan"


def parse_size(text: str) -> int:
    """Bytes of `48K`, `2M`, `1G` or `512`; a ValueError where it is none of these."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text, re.ASCII)
    if not match:
        raise ValueError(f"not a size: {text!r}")
    return int(match[1]) * int(1024 ** " KMG".index(match[2] or " "))


def _size(text: str) -> int:
    try:
        found = parse_size(text)
    except ValueError:
        found = 0
    if not found:
        raise ValueError("bytes, such as 512M or 2G")
    return found


VARIABLES = (
    Variable(
        "FUSEPLAN_CACHE_DIR",
        "cache_dir",
        _place,
        _default_cache_dir,
        "folder of the disk cache; unset: the folder fuseplan in XDG_CACHE_HOME, or in ~/.cache without it",
    ),
    Variable(
        "FUSEPLAN_CACHE_SIZE",
        "cache_size",
        _size,
        lambda: parse_size("1G"),
        "the most bytes of kernels on disk, such as 512M; the least recently used are removed; unset: 1G",
    ),
    Variable(
        "FUSEPLAN_DISABLE_CACHE",
        "disable_cache",
        _flag,
        lambda: False,
        "1: keep compiled kernels in memory only",
    ),
    Variable(
        "FUSEPLAN_THREADS",
        "threads",
        _threads,
        lambda: None,
        "threads of a launch on a CPU, unless the call gives a number; unset: one per processor",
    ),
    Variable(
        PTXAS,
        "ptxas",
        _place,
        lambda: None,
        "path of the assembler ptxas for NVIDIA's GPUs; unset: one of CUDA 13.3 or later in the package "
        "triton or nvidia-cuda-nvcc, or else Triton's own",
    ),
)


def settings() -> Settings:
    """The settings as the environment is now; an ArgumentError where a variable's text cannot be read."""
    return Settings(**{variable.field: _value(variable) for variable in VARIABLES})  # type: ignore[arg-type]


def _value(variable: Variable) -> object:
    text = os.environ.get(variable.name)
    if not text:  # set to nothing is how a shell unsets for one command
        return variable.default()
    try:
        return variable.read(text)
    except ValueError as error:
        raise ArgumentError(f"{variable.name}={text}; want {error}: {variable.meaning}") from error


def environment(**changes: str) -> dict[str, str]:
    """The environment as it is now with some variables set: what a child process is started with."""
    return {**os.environ, **changes}

"""Measured choices: which template and knobs were fastest for a kernel, in files that can be merged.

A file holds one JSON object a line. Two kinds of files are read: those that ship with the package, and the
user's own, in the cache folder, which win. A choice counts where kernel, accuracy, target and processor are
those that it was measured with; nothing is guessed from another machine's. Where none was measured with the
installed versions of the toolchain, the last one of other versions is a preference, until the plan is tuned:
the cost model knows no more of the versions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fuseplan.errors import counted, refusing
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.target import Target
from fuseplan.stores import journal
from fuseplan.system import limits
from fuseplan.system.reading import bytes_of, json_lines, record

SHIPPED = Path(__file__).parents[1] / "data" / "tuned"
OWN_FILE = "tuned.jsonl"


@dataclass(frozen=True)
class Key:
    """What a choice is stored by.

    Attributes:
        kernel: SHA-256 of the kernel's text, and of src's extents where one is open, in hexadecimal.
        accuracy: as compile was given it.
        target: the kind of machine, `triton:sm_90`.
        processor: its name, `NVIDIA H100 80GB HBM3`; of a CPU with the number of threads.
        toolchain: the backend's versions.
    """

    kernel: str
    accuracy: str
    target: str
    processor: str
    toolchain: str


@dataclass(frozen=True)
class Tuned:
    """One measured choice.

    Attributes:
        key: the kernel, the machine and the versions that the choice is for.
        plan: the text of the plan it was measured with.
        template: the choice, as `explain` prints it.
        seconds: time of the fused kernel, median.
        untuned: the cost model's choice, and `untuned_seconds` its time in the same run.
        tried: how many candidates were timed.
        rejected: the candidates that were not timed, each with its reason (a wrong result, spills, ...).
        date: when, in UTC.
        disturbance: which other use of the machine makes the times unreliable; None where there was none.
        times: the last round's medians in seconds, by candidate.
        is_near: whether only the candidates were measured that the cost model does not tell apart.
    """

    key: Key
    plan: str
    template: str
    seconds: float
    untuned: str
    untuned_seconds: float | None
    tried: int
    rejected: tuple[tuple[str, str], ...]
    date: str
    disturbance: str | None = None
    times: Mapping[str, float] = field(default_factory=dict)
    is_near: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, the key's among them."""
        told = asdict(self)
        return {**told.pop("key"), **told}

    @classmethod
    def from_json(cls, told: Any) -> Tuned:
        """The choice that `to_json` told; a ValueError where it did not."""
        if not isinstance(told, dict):
            raise ValueError("it is not an object")
        names = [each.name for each in fields(Key)]
        key = record(Key, {name: told[name] for name in names if name in told})
        return record(cls, {"key": key, **{name: told[name] for name in told if name not in names}})


def key_of(kernel: Kernel, target: Target, accuracy: object, toolchain: str) -> Key:
    """The key of a kernel's choice on a target."""
    extents = "" if kernel.open_axis is None else f"\n{kernel.src.shape}"  # the text has none of an open axis
    digest = hashlib.sha256(f"{kernel.text}{extents}".encode()).hexdigest()
    return Key(digest, str(accuracy), str(target), processor_of(target), toolchain)


def processor_of(target: Target) -> str:
    """What measurements are kept by: the GPU's name, or the CPU's with the number of threads."""
    if target.processors:
        return target.cpu
    return f"{target.cpu or target.backend}, {counted(target.threads, 'thread')}"


def lookup(
    kernel: Kernel, target: Target, accuracy: object, toolchain: Callable[[], str | None]
) -> Tuned | None:
    """The stored choice of these versions, the user's own before a shipped one; else the last of others.

    None where there is none. `toolchain` is asked for its versions only if something is stored for the
    target: it may take an import.
    """
    stored = [choices for choices in (OWN.records(), _shipped()) if choices]
    if not any(key.target == str(target) for choices in stored for key in choices):
        return None
    versions = toolchain()
    if versions is None:
        return None
    key = key_of(kernel, target, accuracy, versions)
    found = next((choices[key] for choices in stored if key in choices), None)
    return found or max(_of_other_versions(key, stored), key=lambda choice: choice.date, default=None)


def _of_other_versions(key: Key, stored: Iterable[Mapping[Key, Tuned]]) -> Iterator[Tuned]:
    for choices in stored:
        for other, choice in choices.items():
            if other.kernel == key.kernel and replace(other, toolchain=key.toolchain) == key:
                yield choice


def keep(choice: Tuned) -> None:
    """Appends a choice to the user's file; where there is none it lasts as long as the process."""
    OWN.keep(choice)


def merged(files: Iterable[Path]) -> list[Tuned]:
    """The choices of several files: of those with one key, the one measured last.

    Raises:
        ArgumentError: a file cannot be read, or holds something else.
    """
    found = journal.newest(choice for place in files for choice in read(place))
    return sorted(found.values(), key=lambda choice: (choice.key.target, choice.plan, choice.key.accuracy))


def read(place: Path) -> Iterator[Tuned]:
    """The choices in a file; an ArgumentError where it cannot be read, or a line is no choice."""
    with refusing(f"{place} cannot be read", (OSError, ValueError)):
        data = bytes_of(place, limits.LINES_BYTES)
    for number, told in json_lines(data):
        with refusing(f"{place}, line {number}: not a tuned choice", ValueError):
            choice = Tuned.from_json(told())
        yield choice


def write(place: Path, choices: Iterable[Tuned]) -> None:
    """Writes a file of choices beside its place, then renames it.

    Raises:
        ArgumentError: it cannot be written.
    """
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    with refusing(f"{place} cannot be written"):
        beside.write_text("".join(json.dumps(choice.to_json()) + "\n" for choice in choices))
        beside.replace(place)


OWN = journal.Newest(OWN_FILE, Tuned.from_json)


@functools.cache
def _shipped() -> dict[Key, Tuned]:
    return journal.newest(choice for place in sorted(SHIPPED.glob("*.jsonl")) for choice in read(place))

"""What was measured: one JSON object a line, stamped so that it can be read years later.

Every table is made from these lines; no number is typed into prose. A line is one peer's (or our own) time
for one plan in one run; a peer that refused or was wrong has a line too, which says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuseplan.errors import ArgumentError

FOLDER = Path("benchmarks/results")
OURS = "fuseplan"


@dataclass(frozen=True)
class Row:
    """One measurement. Times are seconds a call, sizes bytes; what does not apply is None.

    Attributes:
        run: when the run began, UTC; all lines of one interleaved run share it.
        suite, case, group, model, plan: what was measured.
        peer: who ran it: `fuseplan`, or the peer's name with its layout, such as `torch:nhwc`.
        threads: how many threads it was given; 1 on a GPU.
        copies: of its buffers, taken in turn; more than one keeps them out of the caches. 1 on a GPU, whose
            cache is overwritten between calls.
        template, knobs, target: our kernel; None for a peer.
        n, blocks, minimum, median, p90, p99, spread: see `fuseplan.measure.stats.Timing`.
        setup: seconds from the plan to the first result: compiling, packing weights.
        nbytes, flops: what the kernel moves and computes; a peer's are the least the plan needs.
        floor, bound: the least time this machine could take for them, and what sets it.
        wall: seconds that the host takes to enqueue a call on a GPU.
        latency: seconds of the host's clock from a call until its result is there, on a GPU. On a CPU a call
            returns when it is there: that is the median.
        replay: seconds a call takes in a CUDA graph of many, its tensors in the cache where they fit.
        added: seconds that the bytes take which a plainer plan does not move; comparisons add them.
        error: the largest deviation from float64, over the largest output.
        others: the share of the machine that other programs used meanwhile.
        refused: why there is no time: the peer's limit, or a wrong result.
        machine, versions, commit, clock: the stamp.
    """

    run: str
    suite: str
    case: str
    group: str
    model: str
    plan: str
    peer: str
    threads: int
    copies: int = 1
    template: str | None = None
    knobs: dict[str, Any] | None = None
    target: str | None = None
    n: int | None = None
    blocks: int | None = None
    minimum: float | None = None
    median: float | None = None
    p90: float | None = None
    p99: float | None = None
    spread: float | None = None
    setup: float | None = None
    nbytes: int | None = None
    flops: int | None = None
    floor: float | None = None
    bound: str | None = None
    wall: float | None = None
    latency: float | None = None
    replay: float | None = None
    added: float | None = None
    error: float | None = None
    others: float | None = None
    refused: str | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    clock: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields that apply, as JSON values."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def append(rows: Iterable[Row], name: str, folder: Path = FOLDER) -> Path:
    """Adds lines to the file of that name and gives its path.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    return append_json((row.to_json() for row in rows), name, folder)


def append_json(rows: Iterable[Mapping[str, Any]], name: str, folder: Path = FOLDER) -> Path:
    """Adds JSON objects as lines, as `append` does rows.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    place = folder / f"{name}.jsonl"
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with place.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise ArgumentError(
            f"cannot write results to {place}: {error}; name another folder with --results"
        ) from error
    return place


def read(place: Path) -> Iterator[Row]:
    """The lines of a file, oldest first.

    Raises:
        ArgumentError: a line is not a measurement; the message has its number.
    """
    for number, line in enumerate(place.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Row(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"{place}:{number} is not a measurement: {error}") from error


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of each case, on each processor, number of threads and copies, the lines of its last run.

    The peers of a case take turns in one run; two cases need not be of the same.
    """
    listed = list(rows)
    last: dict[tuple[str, ...], str] = {}
    for row in listed:
        last[_of(row)] = max(last.get(_of(row), ""), row.run)
    return [row for row in listed if row.run == last[_of(row)]]


def _of(row: Row) -> tuple[str, ...]:
    return row.suite, row.case, row.plan, str(row.threads), str(row.copies), device_of(row.machine)


def device_of(machine: Mapping[str, Any]) -> str:
    """The processor that a machine's stamp is about: its GPU where it names one."""
    return str(machine.get("gpu") or machine.get("cpu") or "")


def commits(rows: Iterable[Row]) -> str:
    """What rows were measured at, the earliest run's first: `commit a`, or `commits a, b`."""
    found = dict.fromkeys(row.commit or "unknown" for row in sorted(rows, key=lambda row: row.run))
    return f"commit{'s' * (len(found) > 1)} {', '.join(found)}"

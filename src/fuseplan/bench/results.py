"""What was measured: one JSON object a line, stamped so that it can be read years later.

Every table is made from these lines; no number is typed into prose. A line is one peer's (or our own) time
for one plan in one run; a peer that refused or was wrong has a line too, which says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fuseplan.errors import ArgumentError
from fuseplan.kernels.kernel import Kernel
from fuseplan.measure.peaks import Floor
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import FusionPlan

OURS = "fuseplan"
# A deviation above it is no result to time; of fp8 a step between the largest elements.
WORST = {"f64": 1e-12, "f32": 1e-4, "f16": 2e-2, "bf16": 1e-1, "f8e4m3": 2**-3, "f8e5m2": 2**-2}


@dataclass(frozen=True)
class Row:
    """One measurement. Times are seconds a call, sizes bytes; what does not apply is None.

    Attributes:
        run: when the run began, UTC; all lines of one interleaved run share it.
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


def append(rows: Iterable[Row], name: str, folder: Path) -> Path:
    """Adds lines to the file of that name and gives its path.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    return append_json((row.to_json() for row in rows), name, folder)


def append_json(rows: Iterable[Mapping[str, Any]], name: str, folder: Path) -> Path:
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


def dtypes_of(plan: FusionPlan) -> tuple[str, ...]:
    """The dtypes of what a plan gives: the output's, then its results'."""
    return plan.output.dtype, *(each.spec.dtype for each in plan.results)


def wrong(errors: Sequence[float], dtypes: Sequence[str], src: str) -> str | None:
    """Why results with these deviations from float64 are none to time; None where they are right."""
    for error, dtype in zip(errors, dtypes, strict=True):
        allowed = max((WORST[each] for each in (src, dtype) if each in WORST), default=WORST["f32"])
        if not error <= allowed:
            return f"wrong: off by {error:.1e} of the largest output"
    return None


def timed_row(
    told: Mapping[str, Any],
    kernels: Sequence[Kernel],
    facts: Mapping[str, Any],
    timing: Timing,
    floor: Callable[[int], Floor],
) -> Row:
    """A row with times.

    Args:
        told: its other fields.
        facts: what the peer says of its own kernel; what it does not say is the least that the plan needs.
        floor: the least time for so many operations of these kernels.
    """
    nbytes, flops = sum(each.minimum_bytes for each in kernels), sum(each.flops for each in kernels)
    known = {"nbytes": nbytes, "flops": flops, **facts}
    least = floor(known["flops"])
    return Row(**told, **timing.to_json(), **known, floor=least.seconds, bound=least.bound)

"""Finds the fastest candidate of a kernel: checked against float64 first, then timed, within a budget.

Candidates are taken in the cost model's order, a batch at a time. One that spills registers, that gives a
wrong result even once, or that cannot be built is recorded with the reason and never timed. What is left runs
in short rounds; the best of all batches meet once more in long ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fuseplan.errors import ArgumentError, FuseplanError
from fuseplan.execution.stages import Records
from fuseplan.kernels.template import Template
from fuseplan.measure.ground import Ground, first_wrong
from fuseplan.measure.quiet import unsteady
from fuseplan.measure.stats import Timing
from fuseplan.stores.tuned import Tuned, key_of

BATCH = 16
CHECKS = 3  # launches into NaN-filled results: a race need not show in the first
SHORT_ROUNDS, LONG_ROUNDS = 2, 7
FINALISTS = 6
FINAL_SHARE = 0.25  # of the budget: what the long rounds may take
NEAR = 1.3  # times the best: a candidate beyond it in short rounds is not timed again


@dataclass(frozen=True)
class Ready:
    """A candidate that is built.

    Attributes:
        run: writes the output for the ground's tensors into a tensor, and the results into others, which
            are given by key or bound; gives the output, or a tuple of it and the results.
        spilled: bytes of registers that its code keeps in memory.
    """

    run: Callable[..., object]
    spilled: int = 0


Prepare = Callable[[Sequence[Template]], Iterator[tuple[Template, Ready | FuseplanError]]]
Progress = Callable[[str], object]


@dataclass
class _Found:
    """What the search has met: calls that are right, their times, and what was rejected and why."""

    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rejected: list[tuple[str, str]] = field(default_factory=list)


def search(
    records: Records,
    ground: Ground,
    prepare: Prepare,
    toolchain: str,
    seconds: float,
    progress: Progress = lambda _: None,
) -> Tuned:
    """The measured choice.

    Args:
        records: of the plan, chosen by the cost model.
        prepare: builds candidates, many at once where the toolchain can.
        toolchain: the backend's versions, for the choice's key.
        seconds: about how long to search; the cost model's own choice is measured however short that is.
        progress: called with a line about every batch.

    Raises:
        ArgumentError: no candidate gave the right result: each one's reason is told.
    """
    untuned = records.choice.candidates[0].text
    found = _explored(records, ground, prepare, seconds * (1 - FINAL_SHARE), progress)
    if not found.seconds:
        reasons = "\n  ".join(f"{text}: {why}" for text, why in found.rejected)
        raise ArgumentError(f"no candidate computes {records.plan} rightly on {records.target}\n  {reasons}")
    looking = ground.watch()
    final = _final(ground, found, untuned)
    seconds_of = {text: timing.median for text, timing in final.items()}
    best = min(seconds_of, key=lambda text: seconds_of[text])
    return Tuned(
        key=key_of(records.kernel, records.target, records.accuracy, toolchain),
        plan=str(records.plan),
        template=best,
        seconds=seconds_of[best],
        untuned=untuned,
        untuned_seconds=seconds_of.get(untuned),
        tried=len(found.seconds),
        rejected=tuple(found.rejected),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        disturbance=looking.disturbance() or unsteady(final),
    )


def _explored(
    records: Records, ground: Ground, prepare: Prepare, seconds: float, progress: Progress
) -> _Found:
    """Candidates in the cost model's order, a batch at a time, checked and timed in short rounds."""
    begin, candidates, found = time.monotonic(), records.choice.candidates, _Found()
    for start in range(0, len(candidates), BATCH):
        batch = candidates[start : start + BATCH]
        _check(records, ground, prepare(batch), found)
        fresh = {text: found.calls[text] for each in batch if (text := each.text) in found.calls}
        timed = ground.times(fresh, SHORT_ROUNDS) if fresh else {}
        found.seconds |= {text: timing.median for text, timing in timed.items()}
        progress(f"{len(found.seconds)} of {len(candidates)} timed, {len(found.rejected)} rejected")
        if time.monotonic() - begin > seconds:
            break
    return found


def _check(
    records: Records,
    ground: Ground,
    built: Iterator[tuple[Template, Ready | FuseplanError]],
    found: _Found,
) -> None:
    """Sorts candidates into those that are right and those that are rejected."""
    out = ground.out()
    for template, ready in built:
        reason = _fault(records, ground, template, ready)
        if reason is not None:
            found.rejected.append((template.text, reason))
        elif isinstance(ready, Ready):
            found.calls[template.text] = _bound(ready, out)


def _bound(ready: Ready, out: Any) -> Callable[[], object]:
    return lambda: ready.run(out)


def _fault(records: Records, ground: Ground, template: Template, ready: Ready | FuseplanError) -> str | None:
    """Why a candidate is not timed; None if it may be."""
    if not isinstance(ready, Ready):
        return str(ready).splitlines()[0]
    if ready.spilled:
        return f"spills {ready.spilled} bytes of registers"
    for _ in range(CHECKS):
        out = ground.out()
        try:
            got = ready.run(out, **ground.results())
        except FuseplanError as error:
            return str(error).splitlines()[0]
        wrong = first_wrong(records.kernel, template, ground.deviations(got))
        if wrong is not None:
            return f"wrong: {wrong}"
    return None


def _final(ground: Ground, found: _Found, untuned: str) -> Mapping[str, Timing]:
    """Times of the best candidates, and of the cost model's, in long rounds side by side."""
    ranked = sorted(found.seconds, key=lambda text: found.seconds[text])
    near = [text for text in ranked if found.seconds[text] <= NEAR * found.seconds[ranked[0]]][:FINALISTS]
    chosen = near if untuned in near or untuned not in found.calls else [*near, untuned]
    return ground.times({text: found.calls[text] for text in chosen}, LONG_ROUNDS)

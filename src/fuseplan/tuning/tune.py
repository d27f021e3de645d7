"""Tunes one plan on this machine: candidates are built, checked against float64, then timed, within a budget.

Candidates are taken in the cost model's order, a batch at a time. One that spills registers, that gives a
wrong result even once, or that cannot be built is recorded with the reason and never timed. What is left runs
in short rounds; the best of all batches meet once more in long ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

from fuseplan.backends import backend_of
from fuseplan.errors import ArgumentError, BuildError, FuseplanError
from fuseplan.execution.build import compile_all, load
from fuseplan.execution.run import BoundPlan
from fuseplan.execution.runner import runner_of
from fuseplan.execution.select import Choice, ranked
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.emit import Source
from fuseplan.kernels.target import Target, available_threads, parse_target
from fuseplan.kernels.template import Accuracy, Template
from fuseplan.language.fields import as_float
from fuseplan.measure.ground import Ground, first_wrong, ground_of
from fuseplan.measure.quiet import unsteady
from fuseplan.measure.stats import Timing
from fuseplan.messages.excerpt import shown
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores import tuned
from fuseplan.stores.tuned import Tuned, key_of
from fuseplan.system.gathering import gathered

COMPILE_SECONDS = 30.0  # most kernels take one or two; what takes longer is not worth the search
LEAST_A_TEMPLATE = 3  # candidates of each in a short list, whatever the cost model thinks of them
NEAR: Literal["near"] = "near"  # a budget: the candidates that the cost model does not tell apart
# Of 365 row plans, times on an H200 over the best candidate's: the model's own choice 1.051 (4.5 at worst),
# the best of 3 within 1.2 of its estimate 1.017 (1.3), of 5 1.010 (1.3), of 8 within 1.5 1.001 (1.2).
NEAREST, ERROR = 8, 1.5


def silent(_: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Search:
    """How a plan is searched.

    Attributes:
        seconds: about how long; the cost model's own choice is measured however short that is.
        most: how many candidates to try; all there are, in the budget, unless given; `NEAR`: those that the
            model does not tell apart, spilling ones too; where the times are disturbed, its choice stays.
        skipped: candidates not to touch, and why.
        begins: called with a candidate's text before its code is loaded and run.
        progress: called with a line about every batch.
    """

    seconds: float
    most: int | Literal["near"] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    begins: Callable[[str], object] = silent
    progress: Progress = silent


def tune(
    plan: FusionPlan | str,
    target: Target | str = "cpu",
    *,
    seconds: float | Literal["near"] = 10.0,
    accuracy: Accuracy = "default",
    threads: int | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Measures a plan's candidates on this machine and keeps the fastest right one for later compiles.

    Each candidate is checked against float64 before it is timed. Wrong candidates are never chosen.

    Args:
        plan: the plan, or its text.
        target: `cpu` or `cuda`, a target of this machine.
        seconds: about how long to search; `near`: measure only the candidates, at most 8, that the cost model
            estimates within 1.5 times its best.
        accuracy: as for `compile`.
        threads: as for `compile`.
        progress: called with a line about every batch of candidates.

    Raises:
        PlanError: the text is no plan.
        Unsupported: nothing fuses the plan, or no template of the target computes it.
        ArgumentError: the target is another machine or has nothing to choose between; the budget is none;
            or no candidate is right.
        BuildError: the toolchain is missing.
        MemoryError: the plan's tensors, or what float64 needs besides, do not fit.
    """
    records = undecided(plan, target, accuracy, threads)
    how = Search(0.0, NEAR) if seconds == NEAR else Search(checked_seconds(seconds))
    found = measured(records, replace(how, progress=progress))
    tuned.keep(found)
    return found


def undecided(
    plan: FusionPlan | str, target: Target | str, accuracy: Accuracy = "default", threads: int | None = None
) -> Records:
    """The records of a plan as the cost model alone decides, on one of this machine's targets.

    Raises:
        PlanError, Unsupported, ArgumentError: as `tune` does.
    """
    known = parse_target(target)
    backend = backend_of(known.backend)
    refusal = backend.refuses(known)
    if refusal:
        raise ArgumentError(
            f"tuning measures on this machine, and code for {known} does not run here: {refusal}; leave "
            "tune= out, or take choices that were measured on such a machine (`fuseplan tune --merge`)"
        )
    if not backend.templates or backend.fingerprint() is None:
        raise ArgumentError(f"target {known} has nothing to tune: want cpu or cuda")
    return decide(plan, backend.placed(known), threads=threads, accuracy=accuracy, tuned=False)


def measured(records: Records, how: Search) -> Tuned:
    """The measured choice; it is not kept.

    Raises:
        ArgumentError: no candidate is right.
        BuildError: the toolchain is missing.
        MemoryError: the plan's tensors do not fit.
    """
    choice = records.choice
    short = _near(choice) if how.most == NEAR else shortlist(choice.candidates, how.most)
    records = replace(records, choice=ranked(choice.template, choice.considered, short))
    ground = ground_of(records.plan, records.target)
    toolchain = backend_of(records.target.backend).fingerprint()
    assert toolchain is not None  # `undecided` saw to it
    prepare = partial(prepared, records, {**ground.tensors, **ground.results()}, how)
    found = search(records, ground, prepare, toolchain, how.seconds, how.progress)
    if how.most != NEAR:
        return found
    kept = found.untuned if found.disturbance and found.untuned_seconds else found.template
    return replace(found, template=kept, seconds=found.times[kept], is_near=True)


def _near(choice: Choice) -> tuple[Template, ...]:
    """The candidates that the cost model does not tell apart."""
    pairs = zip(choice.considered, choice.candidates, strict=False)
    return tuple(each for known, each in pairs if (known.seconds or 0.0) <= ERROR * choice.seconds)[:NEAREST]


def near(records: Records) -> Iterator[Records]:
    """The records with each of these candidates, to be compiled ahead."""
    for each in () if records.choice.is_current else _near(records.choice):
        yield replace(records, choice=replace(records.choice, template=each))


def shortlist(candidates: Sequence[Template], most: int | None) -> tuple[Template, ...]:
    """The first `most` in the cost model's order, but each template's best few among them.

    The cost model's own choice stays in front.
    """
    if most is None or len(candidates) <= most:
        return tuple(candidates)
    by_name = gathered((each.name, each) for each in candidates)
    turns = zip_longest(*(group[:LEAST_A_TEMPLATE] for group in by_name.values()))
    best = [each for turn in turns for each in turn if each is not None][:most]
    rest = [each for each in candidates if each not in best][: most - len(best)]
    chosen = {each.text for each in [*best, *rest]}
    return tuple(each for each in candidates if each.text in chosen)


def tuned_records(
    plan: FusionPlan | str,
    target: Target | str,
    seconds: float | Literal["near"],
    *,
    threads: int | None = None,
    accuracy: Accuracy,
    template: str | None = None,
) -> Records:
    """A plan's records, decided by a measurement: the stored one, or one that is made now.

    One of near candidates alone does not count where `seconds` are given.

    Raises:
        PlanError, Unsupported, ArgumentError, BuildError, MemoryError: as `tune` does; or a template is
            named, which leaves nothing to tune.
    """
    budget = seconds if seconds == NEAR else checked_seconds(seconds)
    records = decide(plan, target, threads=threads, accuracy=accuracy, template=template)
    known = records.choice.tuned
    if known is not None and records.choice.is_current and (budget == NEAR or not known.is_near):
        return records
    if template is not None:
        raise ArgumentError(f"template={template!r} leaves nothing to tune: give template or tune, not both")
    tune(records.plan, records.target, seconds=budget, accuracy=accuracy)
    return decide(records.plan, records.target, accuracy=accuracy)


def checked_seconds(seconds: float) -> float:
    """A budget in seconds; an ArgumentError where it is no finite number of 0 or more."""
    try:
        made = as_float(seconds)
    except ValueError:
        made = math.nan
    if not 0 <= made < math.inf:
        raise ArgumentError(f"a budget of {shown(seconds)}; want seconds, a number that is not negative")
    return made


def prepared(
    records: Records, tensors: Mapping[str, Any], how: Search, batch: Sequence[Template]
) -> Iterator[tuple[Template, Ready | FuseplanError]]:
    """The candidates of a batch, compiled at once, loaded and bound one after the other."""
    wanted = [each for each in batch if each.text not in how.skipped]
    pairs = [(records.kernel, each) for each in wanted]
    made = compile_all(pairs, records.target, workers=available_threads(), seconds=COMPILE_SECONDS)
    for template in batch:
        if template.text in how.skipped:
            yield template, BuildError(how.skipped[template.text])
            continue
        result = next(made)
        if isinstance(result, BuildError):
            yield template, result
            continue
        how.begins(template.text)
        yield template, _ready(records, tensors, template, result, how)


def _ready(
    records: Records, tensors: Mapping[str, Any], template: Template, made: tuple[Source, bytes], how: Search
) -> Ready | FuseplanError:
    """A candidate bound to the tensors, or why it cannot be."""
    spilled = backend_of(records.target.backend).resources(made[1]).get("spill_bytes", 0)
    if spilled and how.most != NEAR:
        return Ready(lambda _: None, spilled)
    try:
        program = load(template, records.kernel, records.target, *made)
        runner = runner_of(records.plan, records.kernel, template, program)
        assert runner is not None  # the target is this machine's
        bound = BoundPlan(runner, {key: value for key, value in tensors.items() if key != "src"})
    except FuseplanError as error:
        return error
    return Ready(partial(bound, tensors["src"]))


BATCH = 16
CHECKS = 3  # launches into NaN-filled results: a race need not show in the first
SHORT_ROUNDS, LONG_ROUNDS = 2, 7
FINALISTS = 6
FINAL_SHARE = 0.25  # of the budget: what the long rounds may take
FINAL_FACTOR = 1.3  # times the best: a candidate beyond it in short rounds is not timed again


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
class Found:
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
    found = explored(records, ground, prepare, seconds * (1 - FINAL_SHARE), progress)
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
        times=seconds_of,
    )


def explored(records: Records, ground: Ground, prepare: Prepare, seconds: float, progress: Progress) -> Found:
    """Candidates in the cost model's order, a batch at a time, checked and timed in short rounds."""
    begin, candidates, found = time.monotonic(), records.choice.candidates, Found()
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
    records: Records, ground: Ground, built: Iterator[tuple[Template, Ready | FuseplanError]], found: Found
) -> None:
    """Sorts candidates into those that are right and those that are rejected."""
    out = ground.out()
    for template, ready in built:
        reason = _fault(records, ground, template, ready)
        if reason is not None:
            found.rejected.append((template.text, reason))
        elif isinstance(ready, Ready):
            found.calls[template.text] = partial(ready.run, out)


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


def _final(ground: Ground, found: Found, untuned: str) -> Mapping[str, Timing]:
    """Times of the best candidates, and of the cost model's, in long rounds side by side."""
    ranked = sorted(found.seconds, key=lambda text: found.seconds[text])
    most = FINAL_FACTOR * found.seconds[ranked[0]]
    fast = [text for text in ranked if found.seconds[text] <= most][:FINALISTS]
    chosen = fast if untuned in fast or untuned not in found.calls else [*fast, untuned]
    return ground.times({text: found.calls[text] for text in chosen}, LONG_ROUNDS)

"""Tunes many plans: all compiled ahead, measured one after the other in a process that may die."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from fuseplan.errors import ArgumentError, FuseplanError, PlanError, Unsupported, counted
from fuseplan.execution.build import compile_all
from fuseplan.execution.stages import Records
from fuseplan.kernels.target import Target, available_threads
from fuseplan.kernels.template import Accuracy
from fuseplan.measure.cases import PLANS, Case, of_plan
from fuseplan.messages.excerpt import ARROW
from fuseplan.stores import tuned
from fuseplan.stores.tuned import Tuned
from fuseplan.system import checkout
from fuseplan.system.child import Child
from fuseplan.system.declared import option
from fuseplan.tuning.tune import COMPILE_SECONDS, shortlist, undecided

Labelled = Sequence[tuple[str, Case]]
WORKER = ("-m", "fuseplan.tuning.worker")
ATTEMPTS = 4  # of a case: each loses a candidate that killed its process


@dataclass(frozen=True)
class TuneOptions:
    """The options of `fuseplan tune`."""

    target: str = option("cpu", "target", "The machine: cpu, or cuda for this machine's GPU.")
    seconds: float = option(4.0, "number", "Seconds for the search of one case, about.")
    most: int = option(16, "count", "The most candidates of one case; 0 for all.", least=0)
    accuracy: Accuracy = option(
        "default", "accuracy", "default, strict, or a number: the largest error bound that is allowed."
    )
    threads: int | None = option(
        None, "threads", "The most threads of a launch on a CPU; one per processor unless given."
    )
    workers: int = option(
        0, "count", "Compiling processes for a GPU; one per processor unless given.", least=0
    )
    timeout: float = option(60.0, "number", "Seconds after which the process of a case is stopped.")
    within: float | None = option(
        None, "number", "Seconds after which no further case begins; no limit unless given."
    )
    only: str = option("", "text", "Tune the cases of suites whose name or group contains this text.")
    output: Path | None = option(None, "file", "A file for the choices, to ship or merge.")
    is_merge: bool = option(False, "flag", "Merge files of choices into --output instead.")


@dataclass(frozen=True)
class Outcome:
    """A case, and its choice or why there is none."""

    case: Case
    tuned: Tuned | None
    why: str = ""
    seconds: float = 0.0

    @property
    def ratio(self) -> float | None:
        """The cost model's choice's time over the tuned one's; None where either is missing."""
        if self.tuned is None or self.tuned.untuned_seconds is None:
            return None
        return self.tuned.untuned_seconds / self.tuned.seconds

    def to_json(self) -> dict[str, Any]:
        """The case, and its choice or why there is none, as JSON values."""
        case = {"case": self.case.name, "group": self.case.group, "plan": self.case.plan}
        found = self.tuned.to_json() if self.tuned else None
        return {**case, "tuned": found, "why": self.why or None, "search_seconds": self.seconds}

    def __str__(self) -> str:
        head = f"{self.case.name} ({self.case.group})"
        if self.tuned is None:
            return f"{head}: not tuned: {self.why}"
        found, ratio = self.tuned, self.ratio
        untuned = "rejected" if found.untuned_seconds is None else f"{found.untuned_seconds * 1e6:.2f} us"
        lines = [
            f"{head}: {found.seconds * 1e6:.2f} us" + (f", untuned {ratio:.3f}x" if ratio else ""),
            f"    tuned    {found.template}",
            f"    untuned  {untuned} {found.untuned}",
            f"    search   {found.tried} tried, {len(found.rejected)} rejected, {self.seconds:.1f} s",
            *([f"    unreliable: {found.disturbance}"] if found.disturbance else ()),
            *(f"    {text}: {why}" for text, why in found.rejected if not why.startswith("spills")),
        ]
        return "\n".join(lines)


def tune_cases(cases: Sequence[Case], options: TuneOptions) -> Iterator[Outcome]:
    """The outcome of each case as it is done.

    Compilers go on with later cases while earlier ones are measured; only one case is measured at a time.

    Raises:
        ArgumentError: the target is not this machine's, or there is nothing to tune.
        BuildError: the toolchain is missing.
    """
    begin = time.monotonic()
    decided = [_decided(case, options) for case in cases]
    worker = _Worker(options.target)
    try:
        ready = _compiled([each for each in decided if isinstance(each, Records)], options)
        for case, records in zip(cases, decided, strict=True):
            started = time.monotonic()
            if isinstance(records, FuseplanError):
                yield Outcome(case, None, str(records).splitlines()[0])
            elif options.within is not None and started - begin > options.within:
                yield Outcome(case, None, f"{options.within:g} s were over")
            else:
                next(ready)
                asked = time.monotonic()
                found, why = worker.tune(case.plan, options)
                yield Outcome(case, found, why, time.monotonic() - asked)
    finally:
        worker.stop()


def cases_of(asked: Sequence[str], only: str = "") -> Labelled:
    """The cases of plans by their text, and of a checkout's suites; each with its suite, or `plans`.

    `only` chooses the cases of suites whose name or group contains it.

    Raises:
        ArgumentError: there is no such suite or case, or the package is installed without suites.
        PlanError: a text is no plan.
    """
    return [(PLANS if ARROW in name else name, case) for name in asked for case in _cases(name, only)]


def _cases(name: str, only: str) -> tuple[Case, ...]:
    if ARROW in name:
        return of_plan(name).cases
    suites = checkout.tool("suite", f"the suite {name!r}")
    found: tuple[Case, ...] = suites.chosen(suites.load(name), only).cases
    return found


def tune_all(
    labelled: Labelled, options: TuneOptions, done: Callable[[Outcome], object]
) -> dict[str, list[Outcome]]:
    """Tunes cases and keeps what was found.

    Args:
        options: how; the file of choices is written anew after each case.

    Returns:
        The outcomes by label.

    Raises:
        ArgumentError: the target is not this machine's, or the file cannot be written.
    """
    found: dict[str, list[Outcome]] = {}
    choices: list[Tuned] = []
    for (label, _), outcome in zip(
        labelled, tune_cases([case for _, case in labelled], options), strict=True
    ):
        found.setdefault(label, []).append(outcome)
        done(outcome)
        if outcome.tuned is None:
            continue
        choices.append(outcome.tuned)
        tuned.keep(outcome.tuned)
        if options.output is not None:
            tuned.write(options.output, choices)
    return found


def merge(files: Sequence[Path], output: Path | None, show: Callable[[str], object]) -> int:
    """Writes the choices of several files into one; of those with one key, the one measured last.

    Raises:
        ArgumentError: there is no output; a file cannot be read or written, or holds something else.
    """
    if output is None:
        raise ArgumentError("--merge writes a file: name it with --output")
    choices = tuned.merged(files)
    tuned.write(output, choices)
    show(f"{counted(len(choices), 'choice')} in {output}")
    return len(choices)


def mean_ratio(outcomes: Sequence[Outcome]) -> float | None:
    """The geometric mean of untuned over tuned time; None where nothing has both."""
    ratios = [each.ratio for each in outcomes if each.ratio]
    return geometric_mean(ratios) if ratios else None


def summary(name: str, outcomes: Sequence[Outcome]) -> str:
    """How good the cost model was in a suite's cases."""
    mean = mean_ratio(outcomes)
    tuned_count = sum(each.tuned is not None for each in outcomes)
    told = "nothing to compare" if mean is None else f"untuned over tuned {mean:.3f}, geometric mean"
    worst = max((each for each in outcomes if each.ratio), key=lambda each: each.ratio or 0.0, default=None)
    last = "" if worst is None else f"; at worst {worst.ratio:.3f}, {worst.case.name} ({worst.case.group})"
    return f"{name}: {tuned_count} of {len(outcomes)} tuned; {told}{last}"


def status(found: Mapping[str, Sequence[Outcome]]) -> int:
    """0 where a case was tuned, 1 where none was."""
    return 0 if any(each.tuned for outcomes in found.values() for each in outcomes) else 1


def _decided(case: Case, options: TuneOptions) -> Records | FuseplanError:
    """The case's records, or why there are none; what is wrong with the options is an error of all cases."""
    try:
        return undecided(case.plan, options.target, options.accuracy, options.threads)
    except (PlanError, Unsupported) as error:
        return error


def _compiled(every: Sequence[Records], options: TuneOptions) -> Iterator[None]:
    """One item a plan, when its candidates lie in the disk cache; on a CPU the measuring process compiles."""
    if not every or not every[0].target.processors:
        yield from (None for _ in every)
        return
    target: Target = every[0].target
    lists = [shortlist(records.choice.candidates, options.most or None) for records in every]
    pairs = [(records.kernel, each) for records, short in zip(every, lists, strict=True) for each in short]
    workers = options.workers or available_threads()
    made = compile_all(pairs, target, workers=workers, seconds=COMPILE_SECONDS)
    with contextlib.closing(made):
        for short in lists:
            for _ in short:
                next(made)
            yield


class _Worker:
    """A measuring process, started ahead, and again after it died."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `stop` closes it
        self._child = self._started()

    def tune(self, plan: str, options: TuneOptions) -> tuple[Tuned | None, str]:
        """The choice, or why there is none; a candidate that kills the process is skipped the next time."""
        skipped: dict[str, str] = {}
        why = ""
        for _ in range(ATTEMPTS):
            request = {
                "plan": plan, "target": options.target, "accuracy": options.accuracy,
                "threads": options.threads, "seconds": options.seconds, "most": options.most or None,
                "skipped": skipped,
            }  # fmt: skip
            answer, trying = self._asked(request, options.timeout)
            if "found" in answer:
                return Tuned.from_json(answer["found"]), ""
            why = answer.get("refused") or answer["died"]
            if "refused" in answer:
                return None, why.splitlines()[0]
            self._child.end()
            self._child = self._started()
            if not trying:
                return None, f"while candidates were timed: {why}"
            skipped[trying] = f"wrong: {why}"
        return None, f"{ATTEMPTS} candidates killed the process; the last: {why}"

    def _started(self) -> Child:
        child = Child(WORKER, self._log)
        child.send({"warm": self._target})
        return child

    def _asked(self, request: Mapping[str, Any], timeout: float) -> tuple[dict[str, Any], str]:
        """The last answer, and the candidate that was being checked; empty while they are timed."""
        process, trying = self._child.process, ""
        with self._child.within(timeout) as late, contextlib.suppress(OSError):  # it died before it read
            self._child.send(request)
            for answer in self._child.answers():
                if "trying" not in answer and answer:
                    return answer, trying
                trying = answer.get("trying", trying)
        why = f"hung for {timeout:g} s" if late.is_set() else f"died with status {process.wait()}"
        return {"died": f"its process {why}"}, trying

    def stop(self) -> None:
        """Ends the process."""
        self._child.end()
        self._log.close()

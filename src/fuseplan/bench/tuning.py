"""Tunes many plans: all compiled ahead, measured one after the other in a process that may die."""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuseplan.bench.lines import Child
from fuseplan.bench.suite import Case
from fuseplan.build import compile_all
from fuseplan.errors import FuseplanError, PlanError, Unsupported
from fuseplan.stages import Records
from fuseplan.target import Target, available_threads
from fuseplan.template import Accuracy, Template
from fuseplan.tuned import Tuned
from fuseplan.tuning.tune import COMPILE_SECONDS, shortlist, undecided

MOST = 16  # candidates of a case
WORKER = ("-m", "fuseplan.bench.tune_worker")
ATTEMPTS = 4  # of a case: each loses a candidate that killed its process


@dataclass(frozen=True)
class TuneOptions:
    """How cases are tuned.

    Attributes:
        target: one of this machine's, as its text.
        seconds: a case's search, about, once its candidates are compiled.
        most: candidates of a case that are tried; None for all.
        accuracy, threads: as for `compile`.
        workers: compilers at a time, on a GPU.
        timeout: seconds after which a case's process is taken to hang.
        within: seconds after which no further case begins.
    """

    target: str = "cpu"
    seconds: float = 4.0
    most: int | None = MOST
    accuracy: Accuracy = "default"
    threads: int | None = None
    workers: int = 0
    timeout: float = 60.0
    within: float = math.inf


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
            elif started - begin > options.within:
                yield Outcome(case, None, f"{options.within:g} s were over")
            else:
                next(ready)
                asked = time.monotonic()
                found, why = worker.tune(case.plan, options)
                yield Outcome(case, found, why, time.monotonic() - asked)
    finally:
        worker.stop()


def mean_ratio(outcomes: Sequence[Outcome]) -> float | None:
    """The geometric mean of untuned over tuned time; None where nothing has both."""
    logs = [math.log(each.ratio) for each in outcomes if each.ratio]
    return math.exp(sum(logs) / len(logs)) if logs else None


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
    lists = [shortlist(records.choice.candidates, options.most) for records in every]
    pairs = [(records.kernel, each) for records, short in zip(every, lists, strict=True) for each in short]
    workers = options.workers or available_threads()
    made = compile_all(pairs, target, workers=workers, seconds=COMPILE_SECONDS)
    with contextlib.closing(made):
        for short in lists:
            _take(made, short)
            yield


def _take(made: Iterator[Any], short: Sequence[Template]) -> None:
    for _ in short:
        next(made)


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
                "threads": options.threads, "seconds": options.seconds, "most": options.most,
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
        process, late = self._child.process, threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        trying = ""
        try:
            self._child.send(request)
            for answer in self._child.answers():
                if "trying" not in answer and answer:
                    return answer, trying
                trying = answer.get("trying", trying)
        except OSError:
            pass  # it died before it read
        finally:
            timer.cancel()
        why = f"hung for {timeout:g} s" if late.is_set() else f"died with status {process.wait()}"
        return {"died": f"its process {why}"}, trying

    def stop(self) -> None:
        """Ends the process."""
        self._child.end()
        self._log.close()

"""Runs a suite: every result checked against float64 before it is timed, all peers in interleaved rounds."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.bench.options import Options, Step, now
from fuseplan.bench.peers import known
from fuseplan.bench.results import Row, dtypes_of, timed_row, wrong
from fuseplan.bench.worker import part
from fuseplan.errors import ArgumentError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.measure.cases import Case, Cases
from fuseplan.measure.clock import CLOCK, copies_past, turns
from fuseplan.measure.data import deviation, evaluated, random_arrays
from fuseplan.measure.machine import machine, others, processor_seconds, versions
from fuseplan.measure.peaks import Floor, Peaks, bytes_of_passes, measured_peaks, multiplied_dtype
from fuseplan.measure.quiet import Patience
from fuseplan.measure.stats import summarize
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.child import Child

SHOWN = 200
PATIENCE = 5.0  # seconds for a worker to end


class Process:
    """A worker process."""

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name = name
        self._words = ("-m", "fuseplan.bench.worker", name, str(threads))
        self._child: Child | None = None
        self._log = log

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's answer; starts the process where none runs."""
        if self._child is None:
            with self._log.open("w") as log:
                self._child = Child(self._words, log)
            started = self._answer(self._child)
            if "refused" in started:
                self.stop()
                return started
        try:
            self._child.send(request)
        except OSError:
            return self._died()
        return self._answer(self._child)

    def stop(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.end(PATIENCE)

    def _answer(self, child: Child) -> dict[str, Any]:
        answer = next(child.answers(), None)
        return self._died() if answer is None else answer

    def _died(self) -> dict[str, Any]:
        self.stop()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return {"refused": f"its process died: {said[-1][:SHOWN] if said else 'without a message'}"}


@contextlib.contextmanager
def processes(names: Sequence[str], threads: int) -> Iterator[tuple[dict[str, Process], Path]]:
    """A process a name, and a folder for outputs, where what they print goes: all are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="fuseplan-bench-") as scratch:
        folder = Path(scratch)
        made = {name: Process(name, threads, folder / f"{number}.log") for number, name in enumerate(names)}
        try:
            yield made, folder
        finally:
            for process in made.values():
                process.stop()


ARRAYS = "arrays.npz"  # drawn once for all peers
SETTLE = 0.02  # seconds for the threads of the peer before to stop spinning


def run(suite: Cases, options: Options, progress: Step = lambda _: None) -> Iterator[list[Row]]:
    """The rows of each case as it is done; `progress` is called `steps(options)` times a case.

    Raises:
        ArgumentError: a case is of gradients.
    """
    if any(case.gradients for case in suite.cases):
        raise ArgumentError("gradients of plans are measured on a GPU: --target cuda")
    began = now()
    machine_peaks, _ = measured_peaks(options.threads[0])
    patience = Patience(options.patience)
    with processes(options.names, options.threads[0]) as (started, folder):
        for case in suite.cases:
            prepared = _Measured(suite, case, options, began, machine_peaks)
            yield prepared.rows(started, folder, patience, progress)


def steps(options: Options) -> int:
    """How often `progress` is called for a case."""
    return (1 + options.protocol.rounds) * len(options.names)


class _Measured:
    """One case on its way to rows."""

    def __init__(self, suite: Cases, case: Case, options: Options, began: str, machine_peaks: Peaks) -> None:
        self._case, self._options, self._peaks = case, options, machine_peaks
        self._plan = FusionPlan.parse(case.plan)
        buffers = self._plan.src.nbytes + self._plan.output.nbytes
        self._copies = copies_past(parse_target("cpu").l3_bytes, buffers) if options.is_cold else 1
        self._stamp = options.stamp(suite.name, case, machine().to_json(), began)
        self._stamp |= {"copies": self._copies, "clock": CLOCK}

    def rows(
        self, started: Mapping[str, Process], folder: Path, patience: Patience, progress: Step
    ) -> list[Row]:
        """Prepares the plan in every process, times those that are right, and tells of the others."""
        prepared = {}
        arrays = random_arrays(self._plan, self._options.seed)
        out, results = evaluated(self._plan, arrays)
        want = (out, *results.values())
        np.savez(folder / ARRAYS, **arrays)
        for name, process in started.items():
            progress(f"{self._case.name}: {name}")
            prepared[name] = self._prepare(process, folder / f"{name.replace(':', '-')}.npy", want)
        live = [name for name, answer in prepared.items() if "refused" not in answer]
        blocks: dict[str, list[list[float]]] = {name: [] for name in live}
        disturbed: dict[str, list[float]] = {name: [] for name in live}
        for place, (number, name) in enumerate(turns(live, self._options.protocol.rounds) if live else ()):
            progress(f"{self._case.name}: round {number + 1}")
            if place % len(live) == 0:
                patience.wait()
            time.sleep(SETTLE)
            before = processor_seconds()
            answer = started[name].ask(do="block", seconds=self._options.protocol.block_seconds)
            if "samples" in answer:
                blocks[name].append(answer["samples"])
                disturbed[name].append(others(before, processor_seconds(), answer["busy"]))
            else:
                prepared[name] = answer
        for name in live:
            started[name].ask(do="release")
        return [self._row(name, prepared[name], blocks.get(name), disturbed.get(name)) for name in started]

    def _prepare(self, process: Process, place: Path, want: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
        answer = process.ask(
            do="prepare",
            plan=str(self._plan),
            arrays=str(place.with_name(ARRAYS)),
            copies=self._copies,
            result=str(place),
        )
        if "refused" in answer:
            return answer
        if answer["outputs"] != len(want):
            return {"refused": f"it returned {answer['outputs']} of {len(want)} tensors"}
        parts = [part(place, number) for number in range(len(want))]
        dtypes = dtypes_of(self._plan)
        errors = [
            deviation(np.load(each), exact, dtype=dtype)
            for each, exact, dtype in zip(parts, want, dtypes, strict=True)
        ]
        for each in parts:
            each.unlink()
        why, error = wrong(errors, dtypes, self._plan.src.dtype), max(errors)
        return {**answer, "error": error} if why is None else {"refused": why, "error": error}

    def _row(
        self,
        name: str,
        answer: Mapping[str, Any],
        blocks: list[list[float]] | None,
        disturbed: list[float] | None,
    ) -> Row:
        told: dict[str, Any] = {
            **self._stamp,
            "peer": name,
            "versions": versions(*known(False).by_name[name].packages),
        }
        if "refused" in answer or not blocks or not disturbed:
            why = answer.get("refused", "it returned no samples")
            return Row(**told, refused=why, error=answer.get("error"))
        kernel = lower(match(self._plan))

        def floor(flops: int) -> Floor:
            footprint = kernel.minimum_bytes * self._copies
            moved, dtype = bytes_of_passes(kernel), multiplied_dtype(kernel)
            return self._peaks.floor(flops, moved, footprint=footprint, dtype=dtype)

        told |= {"setup": answer["setup"], "error": answer["error"], "others": fmean(disturbed)}
        return timed_row(told, [kernel], answer["facts"], summarize(blocks), floor)

"""How a benchmark is run: the options of `fuseplan bench`, and where it tells what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fuseplan.bench.peers import known
from fuseplan.errors import ArgumentError
from fuseplan.measure.cases import Case
from fuseplan.measure.clock import GPU_PROTOCOL, Protocol
from fuseplan.measure.machine import commit
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.declared import option

HERE = ("cpu", "cuda", "cuda:0")

Step = Callable[[str], object]


@dataclass(frozen=True)
class Display:
    """Where a benchmark tells what it does.

    Attributes:
        show: takes tables and paragraphs in Markdown; nothing is shown where JSON is printed.
        tell: takes a line.
        steps: makes progress of so many steps, of None where their number is not known; a step takes a line.
    """

    show: Callable[[str], object]
    tell: Callable[[str], object]
    steps: Callable[[int | None], AbstractContextManager[Step]]


@dataclass(frozen=True)
class Options:
    """The options; what is of a CPU or of a GPU is not looked at on the other.

    Attributes:
        chosen: the names of all that is measured, in place of `peers`.
    """

    target: str = option("cpu", "target", "The machine: cpu or cuda.")
    threads: tuple[int, ...] = option(
        (1,), "counts", "Thread counts on a CPU, with commas between them; each is a run."
    )
    peers: str | None = option(
        None, "peers", "The peers to measure, with commas between them; all that are installed unless given."
    )
    rounds: int = option(7, "count", "Blocks of samples per peer.")
    block_ms: float = option(
        0.0, "number", "Milliseconds per block; 40 on a CPU and 10 on a GPU unless given."
    )
    is_cold: bool = option(False, "flag", "On a CPU, rotate the buffers past the last cache.")
    is_twice: bool = option(False, "flag", "On a CPU, measure fuseplan twice, which shows the noise.")
    is_unfused: bool = option(False, "flag", "On a CPU, also measure fuseplan's operators one at a time.")
    only: str = option(
        "", "text", "Measure the cases whose name or group contains this text; `a & b` wants both."
    )
    patience: float = option(0.0, "number", "Seconds to wait, in all, until other programs rest.")
    run: str = option("", "text", "A name that several commands share as one run.")
    is_host: bool = option(False, "flag", "On a GPU, also measure the host's time, and CUDA graphs.")
    results: Path | None = option(
        None,
        "folder",
        "A folder that the results are appended to; a checkout's benchmarks/results unless given.",
    )
    device: int = option(0, "count", "The GPU's index.", least=0)
    commit: str = option("", "text", "The commit that results name; the checkout's unless given.")
    as_json: bool = False
    seed: int = 1
    chosen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in HERE:
            raise ArgumentError(f"benchmarks run on this machine: --target cpu or cuda, not {self.target}")

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.target != "cpu"

    @property
    def protocol(self) -> Protocol:
        """How long and how often to measure."""
        usual = GPU_PROTOCOL if self.is_on_gpu else Protocol()
        seconds = self.block_ms / 1e3 or usual.block_seconds
        return replace(usual, rounds=self.rounds, block_seconds=seconds)

    @property
    def names(self) -> list[str]:
        """Names of all that is measured, in order; an ArgumentError where there is no such peer."""
        if self.chosen:
            return [*self.chosen]
        return known(self.is_on_gpu).named(self.peers, is_twice=self.is_twice, is_unfused=self.is_unfused)

    @property
    def runs(self) -> list[Options]:
        """A run for each thread count; on a GPU one."""
        return [replace(self, threads=(count,)) for count in ((1,) if self.is_on_gpu else self.threads)]

    def stamp(self, suite: str, case: Case, machine: Mapping[str, Any], began: str) -> dict[str, Any]:
        """The fields of a case's rows that all peers share."""
        return {
            "run": self.run or began, "suite": suite, "case": case.name, "group": case.group,
            "model": case.model, "plan": str(FusionPlan.parse(case.plan)), "threads": self.threads[0],
            "machine": dict(machine), "commit": self.commit or commit(),
        }  # fmt: skip


def now() -> str:
    """The time, as runs are stamped with it."""
    return datetime.now(UTC).isoformat(timespec="seconds")

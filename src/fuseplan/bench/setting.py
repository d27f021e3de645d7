"""How a suite is run, and its rows: what runs on a CPU and on a GPU share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fuseplan.bench.results import Row
from fuseplan.bench.suite import Case, Suite
from fuseplan.kernel import Kernel
from fuseplan.measure.clock import Protocol
from fuseplan.measure.peaks import Floor
from fuseplan.measure.stats import Timing
from fuseplan.measure.versions import commit
from fuseplan.plan import FusionPlan

WORST = {"f64": 1e-12, "f32": 1e-4, "f16": 2e-2, "bf16": 1e-1}  # a deviation above it is no result to time

Progress = Callable[[str], object]


@dataclass(frozen=True)
class Setting:
    """How to run a suite.

    Attributes:
        threads: of every peer; 1 on a GPU.
        peers: names of what is measured, in order.
        protocol: rounds and blocks.
        is_cold: on a CPU, rotate buffers past the last cache, so that every call reads memory.
        patience: on a CPU, seconds a suite may spend waiting for other programs to rest.
        seed: of the random data.
        run: the stamp of the run; runs that are to count as one are given the same.
        commit: what rows say was measured; the checkout's unless given.
        is_host: on a GPU, also time the host, and a CUDA graph.
        device: the GPU's index.
    """

    threads: int
    peers: Sequence[str]
    protocol: Protocol = field(default_factory=Protocol)
    is_cold: bool = False
    patience: float = 0.0
    seed: int = 1
    run: str = ""
    commit: str = ""
    is_host: bool = False
    device: int = 0

    def stamp(self, suite: Suite, case: Case, machine: Mapping[str, Any], began: str) -> dict[str, Any]:
        """The fields of a case's rows that all peers share."""
        return {
            "run": self.run or began, "suite": suite.name, "case": case.name, "group": case.group,
            "model": case.model, "plan": str(FusionPlan.parse(case.plan)), "threads": self.threads,
            "machine": dict(machine), "commit": self.commit or commit(),
        }  # fmt: skip


def now() -> str:
    """The time, as runs are stamped with it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def wrong(error: float, plan: FusionPlan) -> str | None:
    """Why a result with that deviation from float64 is none to time; None where it is right."""
    return None if error <= WORST[plan.src.dtype] else f"wrong: off by {error:.1e} of the largest output"


def timed_row(
    told: Mapping[str, Any],
    kernel: Kernel,
    facts: Mapping[str, Any],
    timing: Timing,
    floor: Callable[[int], Floor],
) -> Row:
    """A row with times.

    Args:
        told: its other fields.
        kernel: the plan's.
        facts: what the peer says of its own kernel; what it does not say is the least that the plan needs.
        timing: of a call.
        floor: the least time for so many operations of this kernel.
    """
    known = {"nbytes": kernel.minimum_bytes, "flops": kernel.flops, **facts}
    least = floor(known["flops"])
    return Row(**told, **timing.to_json(), **known, floor=least.seconds, bound=least.bound)

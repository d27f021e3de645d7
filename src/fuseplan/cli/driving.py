"""A driver's line, run: compiled, checked against float64, timed, and compared with running it unfused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.ground import allowed_deviation, ground_of
from fuseplan.plan import FusionPlan
from fuseplan.tune.verdict import Verdict
from fuseplan.tuned import processor_of


@dataclass(frozen=True)
class How:
    """What to do with a plan.

    Attributes:
        target, threads: as for `compile`.
        is_verified: compare with float64.
        is_timed: take the kernel's time.
        is_walled: take the host's time too, until the result is there.
        iterations: how many calls are timed.
        is_compared: measure the unfused runs beside it.
    """

    target: str = "cpu"
    threads: int | None = None
    is_verified: bool = True
    is_timed: bool = False
    is_walled: bool = False
    iterations: int = 1
    is_compared: bool = False


@dataclass(frozen=True)
class Seconds:
    """Times of single calls."""

    least: float
    mean: float
    calls: int

    @classmethod
    def of(cls, taken: Sequence[float]) -> Seconds:
        """Their least and mean."""
        return cls(min(taken), fmean(taken), len(taken))

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, seconds."""
        return {"least": self.least, "mean": self.mean, "calls": self.calls}


@dataclass(frozen=True)
class Driven:
    """How a plan did.

    Attributes:
        compiled: the plan.
        error: the largest deviation from float64, over the largest output; None where it was not compared.
        allowed: the most that is right.
        kernel, wall: times; None where they were not taken.
        verdict: the unfused runs beside it; None where it was not compared.
    """

    compiled: CompiledPlan
    error: float | None
    allowed: float
    kernel: Seconds | None
    wall: Seconds | None
    verdict: Verdict | None

    @property
    def is_right(self) -> bool:
        """Whether nothing was found wrong."""
        return self.error is None or self.error <= self.allowed

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        compiled = self.compiled
        return {
            "plan": str(compiled.plan),
            "command": compiled.plan.to_command(),
            "target": str(compiled.target),
            "processor": processor_of(compiled.target),
            "threads": compiled.threads,
            "template": str(compiled.choice),
            "kernels": compiled.kernels,
            "right": self.is_right,
            "error": self.error,
            "allowed": self.allowed,
            "kernel_seconds": self.kernel.to_json() if self.kernel else None,
            "wall_seconds": self.wall.to_json() if self.wall else None,
            "unfused": self.verdict.to_json() if self.verdict else None,
        }


def drive(plan: FusionPlan, how: How) -> Driven:
    """Compiles the plan and does with it what is asked, on random tensors.

    Raises:
        PlanError, Unsupported, BuildError, ArgumentError: as `compile` does.
        MemoryError: the tensors, or what float64 needs besides, do not fit.
    """
    compiled = compile_plan(plan, how.target, threads=how.threads)
    compiled.bind()  # which refuses to run another machine's code, before its tensors are made
    ground = ground_of(plan, compiled.target)
    operands = {key: tensor for key, tensor in ground.tensors.items() if key != "src"}
    out = ground.out()
    call = partial(compiled.bind(**operands), ground.tensors["src"], out)
    call()
    error = ground.deviation(out) if how.is_verified else None
    timed = ground.kernel_seconds(call, how.iterations) if how.is_timed else None
    walled = ground.wall_seconds(call, how.iterations) if how.is_walled else None
    return Driven(
        compiled=compiled,
        error=error,
        allowed=allowed_deviation(compiled.kernel, compiled.choice.template),
        kernel=Seconds.of(timed) if timed else None,
        wall=Seconds.of(walled) if walled else None,
        verdict=compiled.verdict() if how.is_compared else None,
    )

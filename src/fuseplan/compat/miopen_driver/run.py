"""A driver's line, run: compiled, checked against float64, timed, and compared with running it unfused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from fuseplan.compat.miopen_driver.problem import command_of
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.execution.runner import runner_of
from fuseplan.measure.ground import Check, Ground, checks_of, ground_of
from fuseplan.plans.plan import FusionPlan
from fuseplan.stores.tuned import processor_of
from fuseplan.tuning.verdict import Verdict, verdict_on


@dataclass(frozen=True)
class Seconds:
    """Times of single calls, in seconds."""

    least: float
    mean: float
    calls: int

    @classmethod
    def of(cls, taken: Sequence[float]) -> Seconds:
        """Their least and mean."""
        return cls(min(taken), fmean(taken), len(taken))


@dataclass(frozen=True)
class Driven:
    """How a plan did.

    Attributes:
        checks: of the output and of each result; none where they were not compared.
        kernel, wall: times; None where they were not taken.
        verdict: the unfused runs beside it; None where it was not compared, or is wrong.
    """

    compiled: CompiledPlan
    checks: tuple[Check, ...]
    kernel: Seconds | None
    wall: Seconds | None
    verdict: Verdict | None

    @property
    def is_right(self) -> bool:
        """Whether nothing was found wrong."""
        return all(each.is_right for each in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        compiled = self.compiled
        return {
            "plan": str(compiled.plan),
            "command": command_of(compiled.plan),
            "target": str(compiled.target),
            "processor": processor_of(compiled.target),
            "threads": compiled.threads,
            "template": str(compiled.choice),
            "kernels": compiled.kernels,
            "right": self.is_right,
            "checks": [each.to_json() for each in self.checks],
            "kernel_seconds": asdict(self.kernel) if self.kernel else None,
            "wall_seconds": asdict(self.wall) if self.wall else None,
            "unfused": self.verdict.to_json() if self.verdict else None,
        }


def drive(
    plan: FusionPlan,
    target: str,
    threads: int | None,
    *,
    verify: int,
    time: int,
    wall: int,
    iter: int,
    unfused: bool,
    patience: float,
) -> Driven:
    """Compiles the plan, runs it on random tensors, and checks and times it as asked.

    Args:
        verify: whether to compare with float64.
        time: whether to take the kernel's time.
        wall: whether to take the host's time too, until the result is there.
        iter: how many calls are timed.
        unfused: whether to measure the unfused runs beside it.
        patience: seconds to wait for other programs to rest before they are compared.

    Raises:
        PlanError, Unsupported, BuildError, ArgumentError: as `compile` does.
        MemoryError: the tensors, or the float64 reference, do not fit.
    """
    compiled = compile_plan(plan, target, threads=threads)
    compiled.bind()  # which refuses to run another machine's code, before its tensors are made
    ground = ground_of(plan, compiled.target)
    call = ground.call(compiled.bind)
    got = call()
    errors = ground.deviations(got) if verify else {}
    timed = ground.kernel_seconds(call, iter) if time else None
    walled = ground.wall_seconds(call, iter) if wall else None
    checks = checks_of(compiled.kernel, compiled.choice.template, errors)
    is_right = all(each.is_right for each in checks)
    return Driven(
        compiled=compiled,
        checks=checks,
        kernel=Seconds.of(timed) if timed else None,
        wall=Seconds.of(walled) if walled else None,
        verdict=_verdict(compiled, ground, patience) if unfused and is_right else None,
    )


def _verdict(compiled: CompiledPlan, ground: Ground, patience: float) -> Verdict:
    runner = runner_of(compiled.plan, compiled.kernel, compiled.choice.template, compiled.program)
    assert runner is not None  # it was bound
    return verdict_on(replace(compiled.records, target=compiled.target), runner, ground, patience)

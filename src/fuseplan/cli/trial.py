"""A plan compiled, run on random data, checked against float64 and timed; the machine's peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from fuseplan.cli.options import Asked
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import counted
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Accuracy
from fuseplan.measure.ground import Check, checks_of, ground_of
from fuseplan.measure.peaks import measured_gpu_peaks, measured_peaks
from fuseplan.measure.quiet import undisturbed, unsteady
from fuseplan.measure.stats import Timing
from fuseplan.plans.plan import as_plan
from fuseplan.tuning.verdict import OneAtATime


@dataclass(frozen=True)
class Trial:
    """How a plan did.

    Attributes:
        check: of the output and the results beside float64, that which is nearest to its bound.
        timed: a call of the bound plan.
        unfused: a call of its operators one at a time, each bound; None for other machines' targets.
        disturbance: which other use of the machine makes the times unreliable; None where there was none.
    """

    compiled: CompiledPlan
    check: Check
    timed: Timing
    unfused: Timing | None
    unfused_kernels: int
    disturbance: str | None

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return {
            "plan": str(self.compiled.plan),
            "target": str(self.compiled.target),
            "threads": self.compiled.threads,
            "template": str(self.compiled.choice),
            "kernels": self.compiled.kernels,
            "origin": self.compiled.program.origin,
            "load_seconds": self.compiled.program.load_seconds,
            "workspace_bytes": self.compiled.workspace_bytes,
            "right": self.check.is_right,
            **self.check.to_json(),
            "seconds": self.timed.median,
            "unfused_seconds": self.unfused.median if self.unfused else None,
            "unfused_kernels": self.unfused_kernels,
            "timing": self.timed.to_json(),
            "unfused_timing": self.unfused.to_json() if self.unfused else None,
            "disturbance": self.disturbance,
        }

    def __str__(self) -> str:
        compiled = self.compiled
        count = self.unfused_kernels
        compiling = f"{compiled.program.origin}, {compiled.program.load_seconds * 1e3:.1f} ms"
        lines = [
            f"plan       {compiled.plan}",
            f"target     {compiled.target}, {compiled.target.shape}",
            f"template   {compiled.choice} ({compiling})",
            f"kernels    {compiled.kernels} for {counted(count, 'operator')}",
            f"error      {self.check}: {'right' if self.check.is_right else 'WRONG'}",
            f"time       {_spread(self.timed)}",
        ]
        if self.unfused is not None:
            lines.append(f"unfused    {_spread(self.unfused)}")
        if self.disturbance:
            lines.append(f"unreliable {self.disturbance}: measure again when other programs rest")
        elif self.unfused is not None:
            lines.append(f"fused      {self.unfused.median / self.timed.median:.2f} times as fast as unfused")
        return "\n".join(lines)


def _spread(timing: Timing) -> str:
    """How long calls take: the median, and where the others lie."""
    least, median, most, last = (
        f"{each * 1e3:.4f}" for each in (timing.minimum, timing.median, timing.p90, timing.p99)
    )
    return f"{median} ms median, {least} least, {most} p90, {last} p99, of {counted(timing.n, 'sample')}"


def run_trial(
    plan: str,
    target: str,
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    template: str | None = None,
    seed: int = 0,
    inputs: str = "normal",
    patience: float = 0.0,
) -> Trial:
    """Compiles the plan, runs it on random arrays, checks and times it; `patience` as for a verdict.

    Raises:
        PlanError, Unsupported, BuildError, ArgumentError: as `compile` does.
    """
    known = as_plan(plan)
    compiled = compile_plan(known, target, threads=threads, accuracy=accuracy, template=template)
    compiled.bind()  # which refuses to run another machine's code, before its tensors are made
    ground = ground_of(known, compiled.target, seed, inputs)
    fused = ground.call(compiled.bind)
    checks = checks_of(compiled.kernel, compiled.choice.template, ground.deviations(fused()))
    variants: dict[str, Callable[[], object]] = {"fused": fused}
    if compiled.target.is_host:  # what stands in for another machine is not timed beside itself
        variants["unfused"] = OneAtATime(known, ground.tensors, target=compiled.target)
    timed, disturbance = undisturbed(partial(ground.times, variants), ground.watch, patience, unsteady)
    return Trial(
        compiled=compiled,
        check=max(checks, key=lambda check: check.error / check.allowed),
        timed=timed["fused"],
        unfused=timed.get("unfused"),
        unfused_kernels=len(known),
        disturbance=disturbance,
    )


def measure_peaks(asked: Asked, patience: float) -> None:
    """Measures this machine's peaks for the target, and says if they are not kept; not another machine's."""
    target, disturbance = parse_target(asked.target), None
    if target.device is not None:
        _, disturbance = measured_gpu_peaks(target.cpu, target.device, patience)
    elif target.is_host:
        _, disturbance = measured_peaks(asked.threads, patience)
    if disturbance:
        click.echo(
            f"the peaks are not kept: {disturbance}. Measure again when other programs rest, or wait for "
            "that with --patience 60",
            err=True,
        )

"""A plan compiled, run on random data, checked against float64 and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fuseplan.arrays import empty
from fuseplan.bench.unfused import OneAtATime
from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.clock import Protocol, interleave
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.stages import as_plan
from fuseplan.template import Accuracy
from fuseplan.tensor import dtype_of

PROTOCOL = Protocol(rounds=5, block_seconds=0.03)


@dataclass(frozen=True)
class Trial:
    """How a plan did.

    Attributes:
        compiled: the plan.
        error: the largest deviation from float64, over the largest output.
        allowed: the most that is right.
        seconds: a run of the bound plan, median.
        unfused_seconds: of its operators one at a time, each bound; None for other machines' targets.
        unfused_kernels: how many they are.
    """

    compiled: CompiledPlan
    error: float
    allowed: float
    seconds: float
    unfused_seconds: float | None
    unfused_kernels: int

    @property
    def is_right(self) -> bool:
        """Whether the result is within what rounding explains."""
        return self.error <= self.allowed

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
            "right": self.is_right,
            "error": self.error,
            "allowed": self.allowed,
            "seconds": self.seconds,
            "unfused_seconds": self.unfused_seconds,
            "unfused_kernels": self.unfused_kernels,
        }


def run_trial(
    plan: str,
    target: str,
    *,
    threads: int | None = None,
    accuracy: Accuracy = "default",
    template: str | None = None,
    seed: int | None = None,
    inputs: str = "normal",
) -> Trial:
    """Compiles the plan, runs it on random arrays, checks and times it.

    Raises:
        PlanError, Unsupported, BuildError, ArgumentError: as `compile` does.
    """
    known = as_plan(plan)
    compiled = compile_plan(known, target, threads=threads, accuracy=accuracy, template=template)
    arrays = random_arrays(known, seed, inputs=inputs)
    out = empty(known.output)
    operands = {key: array for key, array in arrays.items() if key != "src"}
    fused = partial(compiled.bind(**operands), arrays["src"], out)
    fused()
    error = deviation(np.array(out), reference(known, arrays))
    variants: dict[str, Callable[[], object]] = {"fused": fused}
    unfused = _one_at_a_time(compiled, arrays)
    if unfused is not None:
        variants["unfused"] = unfused
    timed = interleave(variants, PROTOCOL)
    return Trial(
        compiled=compiled,
        error=error,
        allowed=allowed_error(compiled),
        seconds=timed["fused"].median,
        unfused_seconds=timed["unfused"].median if unfused else None,
        unfused_kernels=len(known),
    )


def _one_at_a_time(compiled: CompiledPlan, arrays: Mapping[str, Any]) -> OneAtATime | None:
    """The operators by themselves, on this machine's CPU; other targets are not timed beside themselves."""
    if not compiled.target.is_host:
        return None
    return OneAtATime(compiled.plan, arrays, compiled.threads)


def allowed_error(compiled: CompiledPlan) -> float:
    """The largest right deviation over the largest output.

    One rounding to the output's dtype; four times the template's bound, since a sum's terms may add up to
    a few times the sum; and 64 roundings of the compute dtype for the elementwise operators.
    """
    kernel = compiled.kernel
    bound = compiled.choice.template.error_bound(kernel)
    return dtype_of(kernel.dst.dtype).epsilon + 4 * bound + 64 * dtype_of(kernel.compute_dtype).epsilon

"""Compiles what every GPU template emits for a set of plans, for any GPU, and judges what comes out.

No GPU is needed. Spills that are known and accepted stand in a TOML file, each with its reason:

    [[allowed]]
    target = "triton:sm_90"
    template = "product(rows=128, ...)"
    plan = "f16[...] -> ..."
    bytes = 16
    reason = "two registers of the epilogue, outside of the loop"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fuseplan import limits
from fuseplan.backends import backend_of
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.gate import faults
from fuseplan.backends.triton.pool import compile_many
from fuseplan.backends.triton.signature import types_of
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.worker import Job
from fuseplan.bench.suite import read_toml
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.kernel import Kernel
from fuseplan.lower import lower
from fuseplan.match import match
from fuseplan.plan import FusionPlan
from fuseplan.reasons import first_refusal
from fuseplan.target import Target


@dataclass(frozen=True)
class Build:
    """One kernel to compile: a plan's, by one choice of a template, for one target."""

    plan: str
    target: Target
    template: GpuTemplate
    kernel: Kernel = field(repr=False)

    @property
    def job(self) -> Job:
        """What the compiler is given."""
        source = self.template.emit(self.kernel, self.target)
        return Job(source, types_of(source, self.kernel, self.template), self.target)


@dataclass(frozen=True)
class Built:
    """A build's outcome: what the code uses, and what is wrong with it."""

    build: Build
    resources: Mapping[str, int]
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "plan": self.build.plan,
            "target": str(self.build.target),
            "template": self.build.template.text,
            "resources": dict(self.resources),
            "faults": list(self.faults),
        }


@dataclass(frozen=True)
class Allowance:
    """Spills that are accepted, and why."""

    target: str
    template: str
    plan: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class _Written:
    """A list of accepted spills as its file has it."""

    allowed: tuple[Allowance, ...] = ()


def allowances(place: Path) -> tuple[Allowance, ...]:
    """The accepted spills in a file.

    Raises:
        ArgumentError: there is no such file, or an entry lacks a field or a reason.
    """
    try:
        found = read_toml(place, _Written).allowed
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{place} is no list of accepted spills: {error}") from error
    silent = [each.template for each in found if not each.reason.strip()]
    if silent:
        raise ArgumentError(f"{place}: {silent[0]} gives no reason")
    return found


def builds(
    plans: Iterable[str], targets: Sequence[Target], *, candidates: int = 1, only: str = ""
) -> Iterator[Build]:
    """What there is to compile: of each template that takes a plan, its first candidates."""
    for plan in plans:
        kernel = lower(match(FusionPlan.parse(plan)))
        for target in targets:
            for chosen in _choices(kernel, target, candidates, only):
                yield Build(plan, target, chosen, kernel)


def _choices(kernel: Kernel, target: Target, count: int, only: str) -> Iterator[GpuTemplate]:
    """The first candidates of every template that takes the kernel."""
    for template in backend_of(target.backend).templates:
        refused = first_refusal(template.limits(kernel, target, "default")) is not None
        if refused or (only and only != template.name):
            continue
        for chosen in islice(template.candidates(kernel, target, "default"), count):
            if not isinstance(chosen, GpuTemplate):
                raise ArgumentError(f"{target} is no kind of GPU: name one, such as triton:sm_90")
            yield chosen


def crossbuild(
    asked: Sequence[Build],
    *,
    workers: int,
    seconds: float = limits.COMPILER_SECONDS,
    allowed: Sequence[Allowance] = (),
) -> Iterator[Built]:
    """The outcome of each build, in order."""
    jobs = [build.job for build in asked]
    results = compile_many(jobs, workers=workers, seconds=seconds)
    for build, job, result in zip(asked, jobs, results, strict=True):
        yield judged(build, job, result, allowed)


def judged(build: Build, job: Job, result: bytes | BuildError, allowed: Sequence[Allowance]) -> Built:
    """The outcome of what the compiler gave."""
    if isinstance(result, BuildError):
        return Built(build, {}, (str(result),))
    used = Artifact.unpack(result).resources
    own = (str(build.target), build.template.text, build.plan)
    spill = sum(each.bytes for each in allowed if (each.target, each.template, each.plan) == own)
    return Built(build, used, tuple(faults(job.source, job.types, used, build.target, spill)))

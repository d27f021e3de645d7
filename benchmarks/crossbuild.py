"""Compiles what every GPU template emits for a set of plans, for any GPU, and judges what comes out.

No GPU is needed. Spills that are known and accepted stand in a TOML file, each with its reason:

    [[allowed]]
    triton = ["3.6", "3.7"]
    target = "triton:sm_90"
    template = "product(rows=128, ...)"
    plan = "f16[...] -> ..."
    bytes = 16
    reason = "two registers of the epilogue, outside of the loop"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from benchmarks.gate import faults
from benchmarks.recorded import stamp
from benchmarks.suite import read_toml
from fuseplan.backends import backend_of
from fuseplan.backends.triton import versions
from fuseplan.backends.triton.artifact import Artifact
from fuseplan.backends.triton.assembler import assembler
from fuseplan.backends.triton.pool import Job, compile_many
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.toolchain import types_of
from fuseplan.backends.triton.versions import Version, dotted
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import Target
from fuseplan.messages.reasons import first_refusal
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits


@dataclass(frozen=True)
class Build:
    """One kernel to compile: a plan's, by one choice of a template, for one target.

    `triton` is a folder with another Triton than the installed one.
    """

    plan: str
    target: Target
    template: GpuTemplate
    kernel: Kernel = field(repr=False)
    triton: Path | None = None

    @property
    def version(self) -> Version:
        """Of Triton.

        Raises:
            ArgumentError: there is none.
        """
        return _version(self.triton)

    @property
    def job(self) -> Job:
        """What the compiler is given."""
        source = self.template.emit(self.kernel, self.target)
        return Job(source, types_of(source, self.kernel, self.template, self.target), self.target)


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
            "triton": dotted(self.build.version),
            "template": self.build.template.text,
            "resources": dict(self.resources),
            "faults": list(self.faults),
        }


@dataclass(frozen=True)
class Allowance:
    """Spills that are accepted, and why; `triton` lists the versions that spill, by two numbers each."""

    triton: tuple[str, ...]
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
        raise ArgumentError(f"{place} is not a list of accepted spills: {error}") from error
    silent = [each.template for each in found if not each.reason.strip()]
    if silent:
        raise ArgumentError(f"{place}: {silent[0]} gives no reason")
    return found


def builds(
    plans: Iterable[str],
    targets: Sequence[Target],
    *,
    candidates: int = 1,
    only: str = "",
    triton: Path | None = None,
) -> Iterator[Build]:
    """What there is to compile: of each template that takes a plan, its first candidates.

    Raises:
        ArgumentError: the folder `triton` holds no Triton, or none is installed.
    """
    version = _version(triton)
    for plan in plans:
        kernel = lower(match(FusionPlan.parse(plan)))
        for target in targets:
            for chosen in _choices(kernel, target, candidates, only, version):
                yield Build(plan, target, chosen, kernel, triton)


def _version(triton: Path | None) -> Version:
    version = versions.version_of(triton)
    if version is None:
        where = "no Triton is installed" if triton is None else f"there is no Triton in {triton}"
        raise ArgumentError(f"{where}: pip install --target FOLDER --no-deps triton=={versions.NEWEST}")
    return version


def _choices(
    kernel: Kernel, target: Target, count: int, only: str, version: Version
) -> Iterator[GpuTemplate]:
    """The first candidates of every template that takes the kernel."""
    for template in backend_of(target.backend).templates:
        refused = first_refusal(template.claims(kernel, target, "default")) is not None
        if refused or (only and only != template.name):
            continue
        every = template.candidates(kernel, target, "default")
        for chosen in islice((each for each in every if versions.makes(version, each)), count):
            if not isinstance(chosen, GpuTemplate):
                raise ArgumentError(f"{target} is not a kind of GPU: name a kind, such as triton:sm_90")
            yield chosen


def crossbuild(
    asked: Sequence[Build],
    *,
    workers: int,
    seconds: float = limits.COMPILER_SECONDS,
    allowed: Sequence[Allowance] = (),
) -> Iterator[Built]:
    """The outcome of each build, in order; each Triton has its own processes."""
    for triton, group in groupby(asked, key=lambda build: build.triton):
        own = list(group)
        jobs = [build.job for build in own]
        results = compile_many(jobs, workers=workers, seconds=seconds, triton=triton)
        for build, job, result in zip(own, jobs, results, strict=True):
            yield judged(build, job, result, allowed)


def judged(build: Build, job: Job, result: bytes | BuildError, allowed: Sequence[Allowance]) -> Built:
    """The outcome of what the compiler gave."""
    if isinstance(result, BuildError):
        return Built(build, {}, (str(result),))
    used = Artifact.unpack(result).resources
    own = (str(build.target), build.template.text, build.plan)
    known = [each for each in allowed if (each.target, each.template, each.plan) == own]
    spill = sum(each.bytes for each in known if dotted(build.version[:2]) in each.triton)
    return Built(build, used, tuple(faults(job.source, job.types, used, build.target, spill)))


def summaries(found: Iterable[Built], suites: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A record for each Triton: how many kernels it compiled, and those that are unsound."""
    for triton, group in groupby(found, key=lambda built: built.build.triton):
        own = list(group)
        package = versions.package() if triton is None else triton / "triton"
        assert package is not None  # it compiled
        made = stamp("crossbuild")
        made["versions"] |= {"triton": dotted(own[0].build.version), "ptxas": assembler(package).version}
        yield {
            **made,
            "suites": list(suites),
            "targets": sorted({built.build.target.name for built in own}),
            "kernels": len(own),
            "unsound": [built.to_json() for built in own if built.faults],
        }

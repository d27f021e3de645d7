"""Choices beside what they passed over: estimate and time of every candidate of a plan on this machine.

`python -m benchmarks.choices gpu_rows:20:7 --target cuda --results benchmarks/results` measures random plans
of a suite, which nothing was tuned on. The line that it appends to `choices.jsonl` has what a cost model is
fitted to, and docs/measured.md tells choices by it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.recorded import stamp
from benchmarks.suite import load
from fuseplan.backends import backend_of
from fuseplan.bench.results import append_json
from fuseplan.cli.options import PLAN
from fuseplan.errors import BuildError, FuseplanError
from fuseplan.execution.build import compile_all
from fuseplan.execution.select import ranked
from fuseplan.execution.stages import Records
from fuseplan.kernels.target import available_threads
from fuseplan.kernels.template import Template
from fuseplan.measure.ground import ground_of
from fuseplan.tuning.tune import COMPILE_SECONDS, Search, explored, prepared, shortlist, silent, undecided

NAME = "choices"


@dataclass(frozen=True)
class Passed:
    """What a choice passed over.

    Attributes:
        plan: the plan's text.
        choice: the text of the cost model's choice.
        candidates: estimated and measured seconds of each right candidate, by its text, and the registers of
            a thread; 0 on CPUs.
        rejected: the other candidates, and why they were not timed.
    """

    plan: str
    choice: str
    candidates: Mapping[str, tuple[float, float, int]]
    rejected: Mapping[str, str]

    @property
    def best(self) -> str:
        """The text of the fastest candidate."""
        return min(self.candidates, key=lambda text: self.candidates[text][1])

    @property
    def ratio(self) -> float:
        """The choice's time over the best one's; infinity where the choice was rejected."""
        if self.choice not in self.candidates:
            return math.inf
        return self.candidates[self.choice][1] / self.candidates[self.best][1]

    def to_json(self) -> dict[str, Any]:
        """JSON values, seconds with four digits."""
        times = {
            text: [*(float(f"{each:.4g}") for each in seconds), registers]
            for text, (*seconds, registers) in self.candidates.items()
        }
        return {
            "plan": self.plan, "choice": self.choice, "candidates": times, "rejected": dict(self.rejected)
        }  # fmt: skip


def passed(records: Records, most: int | None, registers: Mapping[str, int]) -> Passed:
    """Measures a plan's candidates, the first `most` in the cost model's order or all of them.

    Raises:
        BuildError: the toolchain is missing.
        MemoryError: the plan's tensors do not fit.
    """
    short = shortlist(records.choice.candidates, most)
    records = _of(records, short)
    ground = ground_of(records.plan, records.target)
    prepare = partial(prepared, records, {**ground.tensors, **ground.results()}, Search(math.inf))
    found = explored(records, ground, prepare, math.inf, silent)
    estimates = {each.text: each.seconds(records.kernel, records.target) for each in short}
    times = {
        text: (estimates[text], seconds, registers.get(text, 0)) for text, seconds in found.seconds.items()
    }
    return Passed(str(records.plan), short[0].text, times, dict(found.rejected))


def _of(records: Records, short: tuple[Template, ...]) -> Records:
    choice = records.choice
    return replace(records, choice=ranked(choice.template, choice.considered, short))


def _registers(records: Records, code: bytes) -> int:
    return backend_of(records.target.backend).resources(code).get("registers", 0)


@click.command()
@click.argument("suites", metavar="SUITE_OR_PLAN...", nargs=-1, required=True, type=PLAN)
@click.option("--target", default="cpu", show_default=True, help="A target of this machine: cpu or cuda.")
@click.option("--most", type=click.IntRange(1), help="The most candidates of a plan; all unless given.")
@click.option("--results", type=click.Path(path_type=Path, file_okay=False), help="The folder to append to.")
@click.option("--commit", default="", help="The measured commit; the checkout's unless given.")
def main(suites: tuple[str, ...], target: str, most: int | None, results: Path | None, commit: str) -> None:
    """Measure every candidate of the plans of SUITE, and tell how far each choice is from the best one."""
    every = [
        (suite.name, undecided(case.plan, target)) for suite in map(load, suites) for case in suite.cases
    ]
    pairs = [(each, kind) for _, each in every for kind in shortlist(each.choice.candidates, most)]
    made = compile_all(
        [(each.kernel, kind) for each, kind in pairs],
        every[0][1].target,
        workers=available_threads(),
        seconds=COMPILE_SECONDS,
    )  # all at once; what measures them finds them on disk
    used = {
        (str(each.plan), kind.text): 0 if isinstance(code, BuildError) else _registers(each, code[1])
        for (each, kind), code in zip(pairs, made, strict=True)
    }
    told: dict[str, list[dict[str, Any]]] = {}
    for name, records in every:
        registers = {text: number for (plan, text), number in used.items() if plan == str(records.plan)}
        found = passed(records, most, registers)
        click.echo(f"{found.ratio:5.2f}  {len(found.candidates):3} candidates  {found.plan}")
        told.setdefault(name, []).append(found.to_json())
    if results is not None:
        stamped = stamp(NAME, device=None if target.startswith("cpu") else 0, named=commit)
        append_json([{"suites": told, **stamped}], NAME, results)


if __name__ == "__main__":
    try:
        main()
    except FuseplanError as error:
        sys.exit(f"error: {error}")

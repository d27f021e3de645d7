"""Choices beside all candidates: the estimate and the time of every candidate of a plan on this machine.

`python -m benchmarks.choices gpu_rows:20:7 --target cuda --results benchmarks/results` measures random plans
of a suite; nothing was tuned on them. A run appends a line to `choices.jsonl`. Cost models are fitted to such
lines, and docs/measured.md shows the last one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.recorded import stamp
from benchmarks.report.records import over_best
from benchmarks.suite import load
from fuseplan.backends import backend_of
from fuseplan.bench.results import append_json
from fuseplan.cli.options import PLAN
from fuseplan.errors import BuildError, FuseplanError
from fuseplan.execution.build import compile_all
from fuseplan.execution.select import ranked
from fuseplan.execution.stages import Records
from fuseplan.kernels.target import available_threads
from fuseplan.measure.ground import ground_of
from fuseplan.tuning.tune import COMPILE_SECONDS, Search, explored, prepared, shortlist, silent, undecided

NAME = "choices"


def measured(records: Records, registers: Mapping[str, int]) -> dict[str, Any]:
    """Measures a plan's candidates.

    Args:
        records: of the plan, chosen by the cost model.
        registers: of a thread, by a candidate's text.

    Returns:
        JSON values. `plan`, and `choice`: the text of the cost model's choice. `candidates`: of each right
        candidate, by its text, the estimated and the measured seconds, and the registers of a thread; 0 on
        CPUs. `rejected`: the other candidates, each with the reason.

    Raises:
        BuildError: the toolchain is missing.
        MemoryError: the plan's tensors do not fit.
    """
    ground, candidates = ground_of(records.plan, records.target), records.choice.candidates
    prepare = partial(prepared, records, {**ground.tensors, **ground.results()}, Search(math.inf))
    found = explored(records, ground, prepare, math.inf, silent)
    estimates = {each.text: each.seconds(records.kernel, records.target) for each in candidates}
    times = {
        text: [_rounded(estimates[text]), _rounded(seconds), registers.get(text, 0)]
        for text, seconds in found.seconds.items()
    }
    return {
        "plan": str(records.plan), "choice": candidates[0].text, "candidates": times,
        "rejected": dict(found.rejected),
    }  # fmt: skip


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _shortened(records: Records, most: int | None) -> Records:
    """The records with the first `most` candidates in the cost model's order, or all of them."""
    choice = records.choice
    short = shortlist(choice.candidates, most)
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
        (suite.name, _shortened(undecided(case.plan, target), most))
        for suite in map(load, suites)
        for case in suite.cases
    ]
    pairs = [(each, kind) for _, each in every for kind in each.choice.candidates]
    made = compile_all(
        [(each.kernel, kind) for each, kind in pairs],
        every[0][1].target,
        workers=available_threads(),
        seconds=COMPILE_SECONDS,
    )  # all at once; the measurements find them on disk
    registers: dict[str, dict[str, int]] = {}
    for (each, kind), code in zip(pairs, made, strict=True):
        number = 0 if isinstance(code, BuildError) else _registers(each, code[1])
        registers.setdefault(str(each.plan), {})[kind.text] = number
    told: dict[str, list[dict[str, Any]]] = {}
    for name, records in every:
        found = measured(records, registers[str(records.plan)])
        click.echo(
            f"{over_best(found) or math.inf:5.2f}  {len(found['candidates']):3} candidates  {found['plan']}"
        )
        told.setdefault(name, []).append(found)
    if results is not None:
        stamped = stamp(NAME, device=None if target.startswith("cpu") else 0, named=commit)
        append_json([{"suites": told, **stamped}], NAME, results)


if __name__ == "__main__":
    try:
        main()
    except FuseplanError as error:
        sys.exit(f"error: {error}")

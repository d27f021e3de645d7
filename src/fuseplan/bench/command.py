"""Measures plans beside their peers, on the CPU or a GPU: shows progress and a table, appends results."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fuseplan.bench import gpu, results, runner, table
from fuseplan.bench.options import Display, Options
from fuseplan.bench.results import Row
from fuseplan.errors import counted
from fuseplan.measure.cases import Cases
from fuseplan.measure.machine import gpu_machine, machine
from fuseplan.measure.quiet import QUIET


def bench(
    suite: Cases,
    options: Options,
    display: Display,
    markdown: Callable[[Sequence[Row]], str] = table.markdown,
) -> list[Row]:
    """Measures cases beside their peers, shows a table, and appends the rows as they come.

    Raises:
        ArgumentError: there is no such peer, or results cannot be written; on a GPU, torch is not installed,
            or finds no GPU.
    """
    rows: list[Row] = []
    for run in options.runs:
        display.tell(f"{suite.title}: {where(run)}")
        done = measured(suite, run, display)
        display.show(markdown(done))
        display.show(_disturbed(done))
        rows += done
    printed([row.to_json() for row in rows], options)
    return rows


def where(options: Options) -> str:
    """The machine, and the unit of its tables.

    Raises:
        ArgumentError: it is a GPU, and torch is not installed, or finds none.
    """
    if options.is_on_gpu:
        gpu.needs_gpu()
        return f"{gpu_machine(options.device).gpu}; microseconds"
    return f"{machine().cpu}, {counted(options.threads[0], 'thread')}; milliseconds"


def measured(suite: Cases, options: Options, display: Display) -> list[Row]:
    """The rows of one run, appended to the results as they come."""
    run = gpu.run if options.is_on_gpu else runner.run
    total = None if options.is_on_gpu else len(suite.cases) * runner.steps(options)
    rows: list[Row] = []
    with display.steps(total) as step:
        for done in run(suite, options, step):
            if options.results is not None:
                results.append(done, suite.file, options.results)
            rows += done
    return rows


def _disturbed(rows: Sequence[Row]) -> str:
    """That other programs used the processors, where they did; else nothing."""
    share = max((row.others for row in rows if row.others is not None), default=0.0)
    if share <= QUIET:
        return ""
    return (
        f"The times are unreliable: other programs used up to {share:.0%} of the processors meanwhile. "
        "--patience 60 waits for them to rest."
    )


def printed(told: Any, options: Options) -> None:
    """Prints JSON, where that is wanted."""
    if options.as_json:
        print(json.dumps(told, indent=1))

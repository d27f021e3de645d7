"""The command `fuseplan tune`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from fuseplan.bench.tune_command import cases_of, merge, needed, status, summary, tune_all
from fuseplan.bench.tuning import MOST, Outcome, TuneOptions
from fuseplan.cli.options import ACCURACY, AS_JSON, DURATION, PLAN, TARGET, THREADS, loud_command
from fuseplan.cli.screen import Screen, progress


@click.command("tune")
@click.argument("asked", metavar="SUITE_OR_PLAN...", nargs=-1, required=True, type=PLAN)
@TARGET
@click.option(
    "--seconds",
    type=DURATION,
    default=TuneOptions.seconds,
    show_default=True,
    help="Seconds for the search of one case, about.",
)
@click.option(
    "--most",
    type=click.IntRange(0),
    default=MOST,
    show_default=True,
    help="The most candidates of one case; 0 for all.",
)
@ACCURACY
@THREADS
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    help="Compiling processes for a GPU; one per processor unless given.",
)
@click.option(
    "--timeout",
    type=DURATION,
    default=TuneOptions.timeout,
    show_default=True,
    help="Seconds after which the process of a case is stopped.",
)
@click.option(
    "--within", type=DURATION, help="Seconds after which no further case begins; no limit unless given."
)
@click.option("--only", default="", help="Tune the cases of suites whose name or group contains this text.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for the choices, to ship or merge.")
@click.option("--merge", "merges", is_flag=True, help="Merge files of choices into --output instead.")
@AS_JSON
@loud_command
@click.pass_context
def tune_command(
    ctx: click.Context,
    asked: tuple[str, ...],
    target: str,
    seconds: float,
    most: int,
    accuracy: str | float,
    threads: int | None,
    workers: int,
    timeout: float,
    within: float | None,
    only: str,
    output: Path | None,
    merges: bool,
    as_json: bool,
) -> None:
    """Measure the candidates of plans, and keep the fastest right one of each.

    SUITE_OR_PLAN is a suite, by its name or file, or a plan. With --json each case is one line.

    Exit status: 1 also if no case was tuned.
    """
    screen = Screen()
    if merges:
        merge([Path(each) for each in asked], needed(output), screen.tell)
        return
    limit = math.inf if within is None else within
    options = TuneOptions(target, seconds, most or None, accuracy, threads, workers, timeout, limit)
    cases = cases_of(asked, only)
    with progress(Screen(stderr=True), len(cases), is_shown=not ctx.meta.get("quiet")) as step:

        def done(outcome: Outcome) -> None:
            if as_json:
                click.echo(json.dumps(outcome.to_json()))
            else:
                screen.tell(str(outcome))
            step(outcome.case.name)

        found = tune_all(cases, options, output, done)
    if not as_json:
        for name, outcomes in found.items():
            screen.tell(summary(name, outcomes))
    ctx.exit(status(found))

"""The command `fuseplan tune`."""

from __future__ import annotations

import math
from pathlib import Path

import click

from fuseplan.bench.tune_command import accuracy_of, merge, needed, tune_all
from fuseplan.bench.tuning import MOST, TuneOptions
from fuseplan.cli.options import DURATION


@click.command("tune")
@click.argument("asked", metavar="SUITE_OR_PLAN...", nargs=-1, required=True)
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--seconds",
    type=DURATION,
    default=TuneOptions.seconds,
    show_default=True,
    help="A case's search, about.",
)
@click.option(
    "--most", type=click.IntRange(0), default=MOST, show_default=True, help="Candidates of a case; 0 for all."
)
@click.option("--accuracy", default="default", show_default=True, help="As for compile.")
@click.option("--threads", type=int, help="The most threads a launch on a CPU uses; all unless given.")
@click.option(
    "--workers",
    type=click.IntRange(0),
    default=0,
    help="Compilers at a time, on a GPU; one a processor unless given.",
)
@click.option(
    "--patience",
    type=DURATION,
    default=TuneOptions.patience,
    show_default=True,
    help="Seconds for a case.",
)
@click.option(
    "--within", type=DURATION, help="Seconds after which no further case begins; no limit unless given."
)
@click.option("--only", default="", help="Cases of suites whose name or group contains it.")
@click.option("--output", type=click.Path(path_type=Path), help="A file for the choices, to ship or merge.")
@click.option("--merge", "merges", is_flag=True, help="Merge files of choices into --output instead.")
@click.pass_context
def tune_command(
    ctx: click.Context,
    asked: tuple[str, ...],
    target: str,
    seconds: float,
    most: int,
    accuracy: str,
    threads: int | None,
    workers: int,
    patience: float,
    within: float | None,
    only: str,
    output: Path | None,
    merges: bool,
) -> None:
    """Measure candidates for every plan of suites, or for plans, and keep the fastest right ones.

    Exit status: 0 some were tuned, 1 none, 2 wrong options.
    """
    if merges:
        merge([Path(each) for each in asked], needed(output), click.echo)
        return
    options = TuneOptions(
        target,
        seconds,
        most or None,
        accuracy_of(accuracy),
        threads,
        workers,
        patience,
        math.inf if within is None else within,
    )
    outcomes = tune_all(asked, options, output, click.echo, only)
    ctx.exit(0 if any(each.tuned for each in outcomes) else 1)

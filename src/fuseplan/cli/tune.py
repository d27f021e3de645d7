"""The command `fuseplan tune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from fuseplan.cli.options import AS_JSON, PLAN, declared, loud_command
from fuseplan.cli.screen import Screen, progress
from fuseplan.tuning.cases import Outcome, TuneOptions, cases_of, merge, status, summary, tune_all


@click.command("tune")
@click.argument("asked", metavar="SUITE_OR_PLAN...", nargs=-1, required=True, type=PLAN)
@declared(TuneOptions)
@AS_JSON
@loud_command
@click.pass_context
def tune_command(ctx: click.Context, /, asked: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Measure the candidates of plans, and keep the fastest right one of each.

    SUITE_OR_PLAN is a plan; in a checkout also a suite, by its name or file. With --json each case is one
    line.

    Exit status: 1 also if no case was tuned.
    """
    screen, options = Screen(), TuneOptions(**given)
    if options.is_merge:
        merge([Path(each) for each in asked], options.output, screen.tell)
        return
    cases = [*cases_of(asked, options.only)]
    with progress(Screen(stderr=True), len(cases), is_shown=not ctx.meta.get("quiet")) as step:

        def done(outcome: Outcome) -> None:
            if as_json:
                click.echo(json.dumps(outcome.to_json()))
            else:
                screen.tell(str(outcome))
            step(outcome.case.name)

        found = tune_all(cases, options, done)
    if not as_json:
        for name, outcomes in found.items():
            screen.tell(summary(name, outcomes))
    ctx.exit(status(found))

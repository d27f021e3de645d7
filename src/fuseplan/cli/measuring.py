"""The commands that measure: `bench`, `tune` and `verdict`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from fuseplan.bench import command
from fuseplan.bench.options import Options
from fuseplan.bench.peers import known
from fuseplan.cli.options import (
    AS_JSON,
    PATIENCE,
    PLAN,
    SEED,
    Asked,
    completing,
    declared,
    loud_command,
    plan_command,
)  # fmt: skip
from fuseplan.cli.screen import Screen, display, progress, tell
from fuseplan.cli.statuses import DISTURBED, RIGHT
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.cases import of_plan
from fuseplan.messages.excerpt import ARROW
from fuseplan.system import checkout
from fuseplan.tuning.cases import Outcome, TuneOptions, cases_of, merge, status, summary, tune_all

PEERS = f" On a CPU: {', '.join(known(False).libraries)}. On a GPU: {', '.join(known(True).by_name)}."


def _suites() -> Iterable[str]:
    names: Iterable[str] = checkout.tool("command", "").names() if checkout.has_tools() else ()
    return names


@click.command("bench")
@click.argument("suite", metavar="SUITE_OR_PLAN", type=PLAN, **completing(_suites))
@declared(Options, {"peers": PEERS})
@click.option("--compile-times", is_flag=True, help="Measure compile times instead, cold and cached.")
@click.option("--no-results", is_flag=True, help="Append no results.")
@AS_JSON
@loud_command
@click.pass_context
def bench_command(
    ctx: click.Context, /, suite: str, compile_times: bool, no_results: bool, **given: Any
) -> None:
    """Measure a plan, or a suite of plans, beside the other libraries that are installed.

    SUITE_OR_PLAN is a plan; in a checkout also a suite's name, a FILE.toml, or one of overhead, footprint,
    accuracy, models, peaks and published. There results are appended to benchmarks/results.
    """
    options = Options(**given | {"results": None if no_results else given["results"]})
    shown = display(options.as_json, bool(ctx.meta.get("quiet")))
    if ARROW in suite and not compile_times:
        command.bench(of_plan(suite), options, shown)
        return
    asked = f"`fuseplan bench {'--compile-times' if compile_times else suite}`"
    checkout.tool("command", asked).bench_suite(
        suite, options, shown, is_compiling=compile_times, is_kept=not no_results
    )


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


@click.command("verdict")
@plan_command
@SEED
@PATIENCE
@click.pass_context
def verdict_command(ctx: click.Context, asked: Asked, seed: int, patience: float) -> None:
    """Measure whether fusing PLAN pays on this machine, and keep the answer for explain.

    The fused kernel runs beside the plan's operators one at a time and beside eager PyTorch. While other
    programs use the machine there is no verdict, and nothing is kept.
    """
    found = compile_plan(asked.plan, asked.target, **asked.how).verdict(seed, patience=patience)
    tell(found, as_json=asked.as_json)
    ctx.exit(DISTURBED if found.disturbance else RIGHT)

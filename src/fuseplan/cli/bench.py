"""The command `fuseplan bench`."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from fuseplan import checkout
from fuseplan.bench import command
from fuseplan.bench.options import Options
from fuseplan.bench.peers import known
from fuseplan.cli.options import AS_JSON, PlanText, completed, declared, loud_command
from fuseplan.cli.screen import display
from fuseplan.excerpt import ARROW
from fuseplan.measure.cases import of_plan


class SuiteName(PlanText):
    """A suite's name or file, or a plan; shells complete the names."""

    name = "suite"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The suites that begin so."""
        return completed(checkout.tool("command", "").names() if checkout.has_tools() else (), incomplete)


PEERS = f" On a CPU: {', '.join(known(False).libraries)}. On a GPU: {', '.join(known(True).by_name)}."


@click.command("bench")
@click.argument("suite", metavar="SUITE_OR_PLAN", type=SuiteName())
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
    accuracy, peaks and published. There the results of a suite are appended to benchmarks/results.
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

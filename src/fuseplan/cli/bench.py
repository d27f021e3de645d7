"""The command `fuseplan bench`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from fuseplan import limits
from fuseplan.bench import command
from fuseplan.bench.command import Options
from fuseplan.bench.peers import LIBRARIES
from fuseplan.bench.peers.gpu import BY_NAME as ON_GPU
from fuseplan.bench.results import FOLDER
from fuseplan.bench.special import SPECIAL, special, tool
from fuseplan.bench.suite import names
from fuseplan.cli.options import (
    AS_JSON,
    DURATION,
    PATIENCE,
    PlanText,
    TargetName,
    completed,
    loud_command,
)
from fuseplan.cli.screen import display
from fuseplan.errors import ArgumentError
from fuseplan.excerpt import ARROW


class SuiteName(PlanText):
    """A suite's name or file, or a plan; shells complete the names."""

    name = "suite"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The suites that begin so."""
        return completed(sorted({*names(), *SPECIAL[False]}), incomplete)


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        counts = tuple(int(word) for word in value.split(","))
        if all(0 < count <= limits.THREADS for count in counts):
            return counts
    raise click.BadParameter(f"want whole numbers from 1 to {limits.THREADS}, with commas between them")


@click.command("bench")
@click.argument("suite", metavar="SUITE_OR_PLAN", type=SuiteName())
@click.option(
    "--target", type=TargetName(), default="cpu", show_default=True, help="The machine: cpu or cuda."
)
@click.option(
    "--threads",
    default="1",
    show_default=True,
    callback=_counts,
    help="Thread counts on a CPU, with commas between them; each is a run.",
)
@click.option(
    "--peers",
    default="",
    help="The peers to measure, with commas between them; all that are installed unless given. "
    f"On a CPU: {', '.join(LIBRARIES)}. On a GPU: {', '.join(ON_GPU)}.",
)
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="Blocks of samples per peer."
)
@click.option(
    "--block-ms",
    type=DURATION,
    default=0.0,
    help="Milliseconds per block; 40 on a CPU and 10 on a GPU unless given.",
)
@click.option("--cold", is_flag=True, help="On a CPU, rotate the buffers past the last cache.")
@click.option("--twice", is_flag=True, help="On a CPU, measure fuseplan twice, which shows the noise.")
@click.option("--unfused", is_flag=True, help="On a CPU, also measure fuseplan's operators one at a time.")
@click.option("--compile-times", is_flag=True, help="Measure compile times instead, cold and cached.")
@PATIENCE
@click.option(
    "--only", default="", help="Measure the cases whose name or group contains this text; `a & b` wants both."
)
@click.option("--run", "stamp", default="", help="On a GPU, a name that several commands share as one run.")
@click.option("--host", is_flag=True, help="On a GPU, also measure the host's time, and CUDA graphs.")
@click.option(
    "--results",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder that the results are appended to; a checkout's benchmarks/results unless given.",
)
@click.option("--no-results", is_flag=True, help="Append no results.")
@AS_JSON
@loud_command
@click.pass_context
def bench_command(
    ctx: click.Context,
    /,
    suite: str,
    compile_times: bool,
    results: Path | None,
    no_results: bool,
    **given: Any,
) -> None:
    """Measure a suite of plans beside the other libraries that are installed.

    SUITE_OR_PLAN is a suite's name, a FILE.toml, a plan, or one of overhead, footprint, accuracy, peaks and
    published. In a checkout the results of a suite are appended to benchmarks/results.
    """
    usual = FOLDER if FOLDER.is_dir() and ARROW not in suite else None
    folder = None if no_results else results or usual
    if given["target"] not in ("cpu", "cuda", "cuda:0"):
        raise ArgumentError(f"benchmarks run on this machine: --target cpu or cuda, not {given['target']}")
    options = Options(
        is_on_gpu=given["target"] != "cpu",
        libraries=given["peers"] or None,
        rounds=given["rounds"],
        block_ms=given["block_ms"],
        only=given["only"],
        folder=folder,
        as_json=given["as_json"],
        run=given["stamp"],
        patience=given["patience"],
        threads=given["threads"],
        is_cold=given["cold"],
        is_twice=given["twice"],
        is_unfused=given["unfused"],
        is_host=given["host"],
    )
    measure = special(suite, options)
    if measure is None and compile_times and not options.is_on_gpu:
        measure = tool("benchmarks", "`fuseplan bench --compile-times`").bench_compile
    (measure or command.bench)(suite, options, display(options.as_json, bool(ctx.meta.get("quiet"))))

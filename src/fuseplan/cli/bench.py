"""The command `fuseplan bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from fuseplan import limits
from fuseplan.bench import command as benchmarks
from fuseplan.bench.gpu_command import GpuOptions
from fuseplan.bench.peers import LIBRARIES
from fuseplan.bench.peers.gpu import BY_NAME as ON_GPU
from fuseplan.bench.results import FOLDER
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
from fuseplan.errors import ArgumentError
from fuseplan.excerpt import ARROW

SPECIAL: dict[str, Callable[[benchmarks.Options], Any]] = {
    "overhead": benchmarks.bench_overhead,
    "footprint": benchmarks.bench_footprint,
    "accuracy": benchmarks.bench_accuracy,
    "peaks": benchmarks.bench_peaks,
    "published": benchmarks.bench_published,
}


class SuiteName(PlanText):
    """A suite's name or file, or a plan; shells complete the names."""

    name = "suite"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The suites that begin so."""
        return completed(sorted({*names(), *SPECIAL}), incomplete)


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
    if given["target"] != "cpu":
        benchmarks.bench_on_gpu(suite, _gpu_options(folder, given))
        return
    peers = benchmarks.PUBLISHED_LIBRARIES if suite == "published" else benchmarks.LIBRARIES
    options = benchmarks.Options(
        threads=given["threads"],
        libraries=given["peers"] or peers,
        rounds=given["rounds"],
        block_ms=given["block_ms"] or benchmarks.Options.block_ms,
        is_cold=given["cold"],
        is_twice=given["twice"],
        is_unfused=given["unfused"],
        patience=given["patience"],
        folder=folder,
        as_json=given["as_json"],
        only=given["only"],
        is_quiet=bool(ctx.meta.get("quiet")),
    )
    if suite in SPECIAL:
        SPECIAL[suite](options)
    elif compile_times:
        benchmarks.bench_compile(suite, options)
    else:
        benchmarks.bench(suite, options)


def _gpu_options(folder: Path | None, given: dict[str, Any]) -> GpuOptions:
    """The options of a benchmark on a GPU.

    Raises:
        ArgumentError: the target is not this machine's GPU.
    """
    if given["target"] not in ("cuda", "cuda:0"):
        raise ArgumentError(f"benchmarks run on this machine: --target cpu or cuda, not {given['target']}")
    return GpuOptions(
        libraries=given["peers"] or GpuOptions.libraries,
        rounds=given["rounds"],
        block_ms=given["block_ms"] or GpuOptions.block_ms,
        only=given["only"],
        run=given["stamp"],
        is_host=given["host"],
        folder=folder,
        as_json=given["as_json"],
    )

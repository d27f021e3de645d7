"""The command `fuseplan bench`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import click

from fuseplan import limits
from fuseplan.bench import command as benchmarks
from fuseplan.bench.gpu_command import GpuOptions
from fuseplan.cli.options import AS_JSON, DURATION
from fuseplan.errors import ArgumentError


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    with contextlib.suppress(ValueError):
        counts = tuple(int(word) for word in value.split(","))
        if all(0 < count <= limits.THREADS for count in counts):
            return counts
    raise click.BadParameter(f"want whole numbers from 1 to {limits.THREADS}, with commas between them")


@click.command("bench")
@click.argument("suite", metavar="SUITE")
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", default="1", show_default=True, callback=_counts, help="Such as 1,2.")
@click.option("--peers", default="", help="Those of them that are installed run; all unless given.")
@click.option(
    "--rounds", type=click.IntRange(1), default=7, show_default=True, help="Blocks that each variant gets."
)
@click.option(
    "--block-ms",
    type=DURATION,
    default=0.0,
    help="How long a block lasts; 40 on a CPU, 10 on a GPU unless given.",
)
@click.option("--cold", is_flag=True, help="Rotate buffers past the last cache.")
@click.option("--twice", is_flag=True, help="Measure ourselves twice, to see the noise.")
@click.option("--unfused", is_flag=True, help="Also run our operators one at a time.")
@click.option("--compile-times", is_flag=True, help="Time compiling the suite instead, cold and cached.")
@click.option(
    "--patience",
    type=DURATION,
    default=0.0,
    show_default=True,
    help="Seconds to wait for other programs to rest.",
)
@click.option("--only", default="", help="Cases whose name or group contains it; of `a & b`, both.")
@click.option("--run", "stamp", default="", help="Runs on a GPU with the same word count as one.")
@click.option("--host", is_flag=True, help="On a GPU, also time the host, and CUDA graphs.")
@click.option("--no-results", is_flag=True, help="Do not append to benchmarks/results.")
@AS_JSON
def bench_command(suite: str, compile_times: bool, no_results: bool, **given: Any) -> None:
    """Measure SUITE beside the peers that are installed, and append the results.

    SUITE is one of benchmarks/suites in a checkout, by name, or a file of that form; or `published`,
    `overhead`, `footprint`, `accuracy` or `peaks`.
    """
    if given["target"] != "cpu":
        benchmarks.bench_on_gpu(suite, _gpu_options(no_results, given))
        return
    usual = benchmarks.PUBLISHED_LIBRARIES if suite == "published" else benchmarks.LIBRARIES
    options = benchmarks.Options(
        threads=given["threads"],
        libraries=given["peers"] or usual,
        rounds=given["rounds"],
        block_ms=given["block_ms"] or benchmarks.Options.block_ms,
        is_cold=given["cold"],
        is_twice=given["twice"],
        is_unfused=given["unfused"],
        patience=given["patience"],
        folder=None if no_results else benchmarks.Options.folder,
        as_json=given["as_json"],
        only=given["only"],
    )
    special: dict[str, Callable[[benchmarks.Options], Any]] = {
        "overhead": benchmarks.bench_overhead,
        "footprint": benchmarks.bench_footprint,
        "accuracy": benchmarks.bench_accuracy,
        "peaks": benchmarks.bench_peaks,
        "published": benchmarks.bench_published,
    }
    if suite in special:
        special[suite](options)
    elif compile_times:
        benchmarks.bench_compile(suite, options)
    else:
        benchmarks.bench(suite, options)


def _gpu_options(no_results: bool, given: dict[str, Any]) -> GpuOptions:
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
        folder=None if no_results else GpuOptions.folder,
        as_json=given["as_json"],
    )

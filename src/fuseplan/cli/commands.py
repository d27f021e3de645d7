"""Options and commands: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fuseplan.backends import BACKENDS
from fuseplan.bench import command as benchmarks
from fuseplan.bench.gpu_command import GpuOptions
from fuseplan.bench.suite import names as suite_names
from fuseplan.build import build
from fuseplan.cache import cache_info
from fuseplan.cache import clear as clear_cache
from fuseplan.cache import entries as cache_entries
from fuseplan.cli.crossbuild import crossbuild_command
from fuseplan.cli.driver import driver_command
from fuseplan.cli.options import AS_JSON, TARGET, THREADS, plan_command
from fuseplan.cli.statuses import REFUSED, RIGHT, WRONG, error_json, known_error, status_of
from fuseplan.cli.support import grouped, supported
from fuseplan.cli.trial import Trial, run_trial
from fuseplan.cli.tune import tune_command
from fuseplan.cli.verdict import verdict_command
from fuseplan.demo import main as run_demo
from fuseplan.errors import ArgumentError, FuseplanError
from fuseplan.explain import explain
from fuseplan.measure.data import INPUTS
from fuseplan.measure.gpu_peaks import gpu_peaks
from fuseplan.measure.peaks import peaks
from fuseplan.report.combinations import AXES, cells
from fuseplan.report.supported import rows as combination_rows
from fuseplan.stages import Records, decide
from fuseplan.target import Target, parse_target

STAGES = ("plan", "match", "kernel", "choice", "source", "program")
SPECIAL = ("published", "overhead", "footprint", "accuracy", "peaks")  # benchmarks that are no suite


class _Commands(click.Group):
    """Turns errors into messages and exit statuses: 3 refused, 1 toolchain failed, 2 anything else."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (FuseplanError, MemoryError) as error:
            known = known_error(error)
            _print_error(known, ctx)
            ctx.exit(status_of(known))


def _print_error(error: FuseplanError, ctx: click.Context) -> None:
    """The message for people, on stderr; with --json, as JSON on stdout instead."""
    if ctx.meta.get("json"):
        _print_json(error_json(error))
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fuseplan")
def fuseplan() -> None:
    """A fusion plan becomes one kernel.

    PLAN is a plan's text, in quotes: 'f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu'.
    """


fuseplan.add_command(crossbuild_command)
fuseplan.add_command(driver_command)
fuseplan.add_command(tune_command)
fuseplan.add_command(verdict_command)


def _counts(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter("want whole numbers with commas between them, such as 1,2") from None


def _print_json(told: Any) -> None:
    click.echo(json.dumps(told, indent=1))


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


@fuseplan.command()
@THREADS
@click.option("--chart", type=click.Path(path_type=Path), default=Path("demo.svg"), show_default=True)
@AS_JSON
def demo(threads: int | None, chart: Path, as_json: bool) -> None:
    """Measure fused plans at MIOpen's published shapes, and draw what fusing gave."""
    run_demo(threads, chart, as_json=as_json)


@fuseplan.command()
@plan_command
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random data.")
@click.option("--inputs", type=click.Choice(tuple(INPUTS)), default="normal", show_default=True)
@click.pass_context
def run(
    ctx: click.Context,
    plan: str,
    target: str,
    threads: int | None,
    accuracy: str | float,
    template: str | None,
    seed: int,
    inputs: str,
    as_json: bool,
) -> None:
    """Compile PLAN, run it on random data and check it against float64.

    Exit status: 0 fused and right, 1 wrong, 2 no plan, 3 refused.
    """
    trial = run_trial(
        plan, target, threads=threads, accuracy=accuracy, template=template, seed=seed, inputs=inputs
    )
    if as_json:
        _print_json(trial.to_json())
    else:
        _print_trial(trial)
    ctx.exit(RIGHT if trial.is_right else WRONG)


def _print_trial(trial: Trial) -> None:
    compiled = trial.compiled
    verdict = "right" if trial.is_right else "WRONG"
    compiling = f"{compiled.program.origin}, {compiled.program.load_seconds * 1e3:.1f} ms"
    lines = [
        f"plan       {compiled.plan}",
        f"target     {compiled.target}, {compiled.target.shape}",
        f"template   {compiled.choice} ({compiling})",
        f"kernels    {compiled.kernels} for {trial.unfused_kernels} operators",
        f"error      {trial.error:.1e} of the largest output, at most {trial.allowed:.1e}: {verdict}",
        f"time       {trial.seconds * 1e3:.4f} ms",
    ]
    if trial.unfused_seconds is not None:
        ratio = trial.unfused_seconds / trial.seconds
        lines.append(f"unfused    {trial.unfused_seconds * 1e3:.4f} ms, {ratio:.2f} times as long")
    click.echo("\n".join(lines))


@fuseplan.command("explain")
@plan_command
@click.option("--measure", is_flag=True, help="Measure this machine's peaks first, which takes a second.")
@click.pass_context
def explain_command(
    ctx: click.Context,
    plan: str,
    target: str,
    threads: int | None,
    accuracy: str | float,
    template: str | None,
    as_json: bool,
    measure: bool,
) -> None:
    """Tell how PLAN is computed and why, or why it is refused; needs no toolchain.

    Exit status: 0 fused, 2 no plan, 3 refused.
    """
    if measure:
        _measure_peaks(parse_target(target), threads)
    told = explain(plan, target, accuracy, threads=threads, template=template)
    if as_json:
        _print_json(told.to_json())
    else:
        click.echo(str(told))
    ctx.exit(RIGHT if told.is_fused else REFUSED)


def _measure_peaks(target: Target, threads: int | None) -> None:
    """This machine's peaks for the target, kept; nothing for another machine's."""
    if target.device is not None:
        gpu_peaks(target.cpu, target.device, measure=True)
    elif target.is_host:
        peaks(threads, measure=True)


@fuseplan.command()
@plan_command
@click.option("--stage", type=click.Choice(STAGES), help="One stage's record; all but program unless given.")
def show(
    plan: str,
    target: str,
    threads: int | None,
    accuracy: str | float,
    template: str | None,
    as_json: bool,
    stage: str | None,
) -> None:
    """Print what each stage makes of PLAN: plan, match, kernel, choice, source, program."""
    records = decide(plan, target, threads=threads, accuracy=accuracy, template=template)
    wanted = (stage,) if stage else STAGES[:-1]
    told = {name: RECORDS[name](records) for name in wanted}
    if as_json:
        _print_json({name: value for name, (_, value) in told.items()})
        return
    for name, (text, _) in told.items():
        click.echo(text if stage else f"# {name}\n{text}\n")


def _program(records: Records) -> tuple[str, Any]:
    program = build(records.choice, records.kernel, records.target).to_json()
    return json.dumps(program, indent=1), program


# A stage's record as text and as JSON values.
RECORDS: dict[str, Callable[[Records], tuple[str, Any]]] = {
    "plan": lambda records: (str(records.plan), json.loads(records.plan.to_json())),
    "match": lambda records: (str(records.match), records.match.to_json()),
    "kernel": lambda records: (records.kernel.text, records.kernel.text.splitlines()),
    "choice": lambda records: (str(records.choice), records.choice.to_json()),
    "source": lambda records: (
        records.source.text,
        {**records.source.frame, "text": records.source.text},
    ),
    "program": _program,
}


@fuseplan.command()
@click.argument("suite", metavar="SUITE", type=click.Choice(tuple(dict.fromkeys((*suite_names(), *SPECIAL)))))
@click.option("--target", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", default="1", show_default=True, callback=_counts, help="Such as 1,2.")
@click.option("--peers", default="", help="Those of them that are installed run; all unless given.")
@click.option("--rounds", default=7, show_default=True, help="Blocks that each variant gets.")
@click.option(
    "--block-ms", default=0.0, help="How long a block lasts; 40 on a CPU, 10 on a GPU unless given."
)
@click.option("--cold", is_flag=True, help="Rotate buffers past the last cache.")
@click.option("--twice", is_flag=True, help="Measure ourselves twice, to see the noise.")
@click.option("--unfused", is_flag=True, help="Also run our operators one at a time.")
@click.option("--compile-times", is_flag=True, help="Time compiling the suite instead, cold and cached.")
@click.option(
    "--patience", default=0.0, show_default=True, help="Seconds to wait for other programs to rest."
)
@click.option("--only", default="", help="Cases whose name or group contains it; of `a & b`, both.")
@click.option("--run", "stamp", default="", help="Runs on a GPU with the same word count as one.")
@click.option("--host", is_flag=True, help="On a GPU, also time the host, and CUDA graphs.")
@click.option("--no-results", is_flag=True, help="Do not append to benchmarks/results.")
@AS_JSON
def bench(suite: str, compile_times: bool, no_results: bool, **given: Any) -> None:
    """Measure SUITE beside the peers that are installed, and append the results."""
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


@fuseplan.command("supported")
@TARGET
@click.option("--combinations", is_flag=True, help="Of combinations of operators, with each algorithm.")
@AS_JSON
def supported_command(target: str, combinations: bool, as_json: bool) -> None:
    """List operators, layouts and dtypes, and the templates that take them."""
    known = parse_target(target)
    if combinations:
        _print_combinations(known, as_json)
        return
    rows = list(supported(known))
    if as_json:
        _print_json({"target": str(known), "supported": [row.to_json() for row in rows]})
        return
    table = Table("operator", "layouts", "dtypes", "templates", title=f"what {known} computes")
    for line in grouped(rows):
        table.add_row(*line)
    _console().print(table)
    backends = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
    click.echo(f"Elementwise operators fuse before and after any contraction. Backends: {backends}")


def _print_combinations(target: Target, as_json: bool) -> None:
    listed = list(combination_rows(cells(target)))
    if as_json:
        _print_json({"target": str(target), "combinations": [row.to_json() for row in listed]})
        return
    table = Table("combinations", "algorithm", "layouts", "dtypes", "only", title=f"what {target} computes")
    for row in (row for row in listed if not row.code):
        only = [f"{axis} {row.axis(axis)}" for axis in AXES if row.axis(axis) != "any"]
        names = (row.combinations, (row.template,), row.layouts, row.dtypes)
        table.add_row(*map(" ".join, names), "; ".join(only))
    _console().print(table)


@fuseplan.group()
def cache() -> None:
    """The disk cache of compiled kernels."""


@cache.command()
@AS_JSON
def info(as_json: bool) -> None:
    """Say where the cache is and what it holds."""
    found = cache_info()
    if as_json:
        _print_json({**found.to_json(), "sizes": cache_entries()})
    elif found.path is None:
        click.echo("the cache is turned off by FUSEPLAN_DISABLE_CACHE")
    else:
        click.echo(f"{found.path}: {found.entries} kernels, {found.nbytes / 1e3:.1f} kB")


@cache.command()
@AS_JSON
def clear(as_json: bool) -> None:
    """Remove every kernel from the cache."""
    try:
        removed = clear_cache()
    except OSError as error:
        raise click.ClickException(f"the cache cannot be cleared: {error}") from error
    if as_json:
        _print_json({"removed": removed})
    else:
        click.echo(f"removed {removed} kernels")


@cache.command()
@AS_JSON
def path(as_json: bool) -> None:
    """Print the cache's folder."""
    where = cache_info().path
    if as_json:
        _print_json({"path": where})
    else:
        click.echo(where or "")

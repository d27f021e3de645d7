"""Options and commands: parse, call, print."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from fuseplan.backends import BACKENDS
from fuseplan.build import build
from fuseplan.cache import cache_info
from fuseplan.cache import clear as clear_cache
from fuseplan.cache import entries as cache_entries
from fuseplan.cli.bench import bench_command
from fuseplan.cli.crossbuild import crossbuild_command
from fuseplan.cli.driver import driver_command
from fuseplan.cli.options import AS_JSON, PATIENCE, SEED, TARGET, THREADS, plan_command
from fuseplan.cli.statuses import (
    INTERRUPTED,
    REFUSED,
    RIGHT,
    WRONG,
    error_json,
    known_error,
    status_of,
)
from fuseplan.cli.support import grouped, supported
from fuseplan.cli.trial import Trial, run_trial
from fuseplan.cli.tune import tune_command
from fuseplan.cli.verdict import verdict_command
from fuseplan.demo import main as run_demo
from fuseplan.errors import FuseplanError, counted
from fuseplan.explain import explain
from fuseplan.measure.data import INPUTS
from fuseplan.measure.gpu_peaks import measured_gpu_peaks
from fuseplan.measure.peaks import measured_peaks
from fuseplan.measure.stats import Timing
from fuseplan.report.combinations import AXES, cells
from fuseplan.report.supported import Row
from fuseplan.report.supported import rows as combination_rows
from fuseplan.stages import Records, decide
from fuseplan.target import Target, parse_target

WIDE = 220  # columns: the widest table
STAGES = ("plan", "match", "kernel", "choice", "source", "program")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a limit


class _Commands(click.Group):
    """Turns errors into messages and exit statuses.

    3 refused, 1 toolchain failed or the output cannot be written, 130 interrupted, 2 anything else.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (FuseplanError, MemoryError) as error:
            known = known_error(error)
            _print_error(known, ctx)
            ctx.exit(status_of(known))
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except OSError as error:
            if error.errno not in FULL:
                raise
            click.echo(f"the output cannot be written: {error}", err=True)
            ctx.exit(WRONG)


def _print_error(error: FuseplanError, ctx: click.Context) -> None:
    """The message for people, on stderr; with --json, as JSON on stdout instead."""
    if ctx.meta.get("json"):
        click.echo(json.dumps(error_json(error)))  # a line, as the commands that print a line a run do
    else:
        click.echo(f"{type(error).__name__}: {error}", err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fuseplan")
def fuseplan() -> None:
    """A fusion plan becomes one kernel.

    PLAN is a plan's text, in quotes: 'f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu'.
    """


fuseplan.add_command(bench_command)
fuseplan.add_command(crossbuild_command)
fuseplan.add_command(driver_command)
fuseplan.add_command(tune_command)
fuseplan.add_command(verdict_command)


def _print_json(told: Any) -> None:
    click.echo(json.dumps(told, indent=1))


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells that a terminal is too narrow for go on in the next line; what is no terminal has room."""
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*row)
    console = Console()
    (console if console.is_terminal else Console(width=WIDE)).print(table)


@fuseplan.command()
@THREADS
@click.option("--chart", type=click.Path(path_type=Path), default=Path("demo.svg"), show_default=True)
@AS_JSON
def demo(threads: int | None, chart: Path, as_json: bool) -> None:
    """Measure fused plans at MIOpen's published shapes, and draw what fusing gave."""
    run_demo(threads, chart, as_json=as_json)


@fuseplan.command()
@plan_command
@SEED
@click.option("--inputs", type=click.Choice(tuple(INPUTS)), default="normal", show_default=True)
@PATIENCE
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
    patience: float,
    as_json: bool,
) -> None:
    """Compile PLAN, run it on random data and check it against float64.

    Exit status: 0 fused and right, 1 wrong, 2 no plan, 3 refused.
    """
    trial = run_trial(
        plan,
        target,
        threads=threads,
        accuracy=accuracy,
        template=template,
        seed=seed,
        inputs=inputs,
        patience=patience,
    )
    if as_json:
        _print_json(trial.to_json())
    else:
        _print_trial(trial)
    ctx.exit(RIGHT if trial.check.is_right else WRONG)


def _print_trial(trial: Trial) -> None:
    compiled = trial.compiled
    count = trial.unfused_kernels
    compiling = f"{compiled.program.origin}, {compiled.program.load_seconds * 1e3:.1f} ms"
    lines = [
        f"plan       {compiled.plan}",
        f"target     {compiled.target}, {compiled.target.shape}",
        f"template   {compiled.choice} ({compiling})",
        f"kernels    {compiled.kernels} for {counted(count, 'operator')}",
        f"error      {trial.check}: {'right' if trial.check.is_right else 'WRONG'}",
        f"time       {_spread(trial.timed)}",
    ]
    if trial.unfused is not None:
        lines.append(f"unfused    {_spread(trial.unfused)}")
    if trial.disturbance:
        lines.append(f"unreliable {trial.disturbance}: measure again when other programs rest")
    elif trial.unfused is not None:
        lines.append(f"fused      {trial.unfused.median / trial.timed.median:.2f} times as fast as unfused")
    click.echo("\n".join(lines))


def _spread(timing: Timing) -> str:
    """How long calls take: the median, and where the others lie."""
    least, median, most, last = (
        f"{each * 1e3:.4f}" for each in (timing.minimum, timing.median, timing.p90, timing.p99)
    )
    return f"{median} ms median, {least} least, {most} p90, {last} p99, of {counted(timing.n, 'sample')}"


@fuseplan.command("explain")
@plan_command
@click.option("--measure", is_flag=True, help="Measure this machine's peaks first, which takes a second.")
@PATIENCE
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
    patience: float,
) -> None:
    """Tell how PLAN is computed and why, or why it is refused; needs no toolchain.

    Exit status: 0 fused, 2 no plan, 3 refused.
    """
    if measure:
        _measure_peaks(parse_target(target), threads, patience)
    told = explain(plan, target, accuracy, threads=threads, template=template)
    if as_json:
        _print_json(told.to_json())
    else:
        click.echo(str(told))
    ctx.exit(RIGHT if told.is_fused else REFUSED)


def _measure_peaks(target: Target, threads: int | None, patience: float) -> None:
    """Measures this machine's peaks for the target, and says if they are not kept; not another machine's."""
    disturbance = None
    if target.device is not None:
        _, disturbance = measured_gpu_peaks(target.cpu, target.device, patience)
    elif target.is_host:
        _, disturbance = measured_peaks(threads, patience)
    if disturbance:
        click.echo(
            f"the peaks are not kept: {disturbance}. Measure again when other programs rest, or wait for "
            "that with --patience 60",
            err=True,
        )


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
    columns = ("operator", "layouts", "dtypes", "templates")
    _print_table(f"what {known} computes", columns, grouped(rows))
    backends = ", ".join(f"{backend.name} ({backend.summary})" for backend in BACKENDS)
    click.echo(f"Elementwise operators fuse before and after any contraction. Backends: {backends}")


def _print_combinations(target: Target, as_json: bool) -> None:
    listed = list(combination_rows(cells(target)))
    if as_json:
        _print_json({"target": str(target), "combinations": [row.to_json() for row in listed]})
        return
    columns = ("combinations", "algorithm", "layouts", "dtypes", "only")
    _print_table(f"what {target} computes", columns, (_cells(row) for row in listed if not row.code))


def _cells(row: Row) -> tuple[str, ...]:
    only = [f"{axis} {row.axis(axis)}" for axis in AXES if row.axis(axis) != "any"]
    names = (row.combinations, (row.template,), row.layouts, row.dtypes)
    return *map(" ".join, names), "; ".join(only)


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
        problem = f"; it cannot be used: {found.problem}" if found.problem else ""
        click.echo(f"{found.path}: {counted(found.entries, 'kernel')}, {found.nbytes / 1e3:.1f} kB{problem}")


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
        click.echo(f"removed {counted(removed, 'kernel')}")


@cache.command()
@AS_JSON
def path(as_json: bool) -> None:
    """Print the cache's folder."""
    where = cache_info().path
    if as_json:
        _print_json({"path": where})
    else:
        click.echo(where or "")

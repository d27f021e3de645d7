"""Options and commands: parse, call, print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Column, Table

from fuseplan.backends import BACKENDS
from fuseplan.cli.combinations import AXES, Row, cells
from fuseplan.cli.combinations import rows as combination_rows
from fuseplan.cli.export import export_command
from fuseplan.cli.group import Commands
from fuseplan.cli.measuring import bench_command, tool_commands, tune_command, verdict_command
from fuseplan.cli.models import (
    CHOOSE,
    SHAPES,
    compare_command,
    diff_command,
    explain_model,
    fuse_command,
    is_model,
    profile_model,
    run_model,
)
from fuseplan.cli.options import AS_JSON, PATIENCE, SEED, TARGET, Asked, loud_command, plan_command
from fuseplan.cli.screen import Screen, tell
from fuseplan.cli.show import show
from fuseplan.cli.statuses import MEANINGS, REFUSED, RIGHT, WRONG
from fuseplan.cli.support import grouped, supported
from fuseplan.cli.trial import run_trial
from fuseplan.compat.miopen_driver.cli import driver_command
from fuseplan.errors import counted
from fuseplan.explanation import explain
from fuseplan.kernels.target import Target, parse_target
from fuseplan.measure.data import INPUTS
from fuseplan.measure.peaks import measured_gpu_peaks, measured_peaks
from fuseplan.reports.page import page
from fuseplan.reports.profile import SHOWN
from fuseplan.reports.report import Report
from fuseplan.stores.cache import cache_info, clear_cache
from fuseplan.stores.cache import entries as cache_entries


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit statuses: " + "; ".join(f"{status} {meaning}" for status, meaning in MEANINGS.items()) + ".",
)
@click.version_option(None, "-V", "--version", package_name="fuseplan")
@loud_command
def fuseplan() -> None:
    """A fusion plan becomes one kernel.

    PLAN is a plan's text, in quotes: 'f32[1x64x56x56, nhwc] -> conv2d(64, kernel=3, padding=1) -> relu'. A
    dash, -, stands for a plan on the standard input, and @FILE for a plan in a file.
    """


for _command in (
    bench_command,
    compare_command,
    diff_command,
    driver_command,
    export_command,
    fuse_command,
    show,
    tune_command,
    verdict_command,
):
    fuseplan.add_command(_command)
for _command in tool_commands():
    fuseplan.add_command(_command)


def _print_json(told: Any) -> None:
    click.echo(json.dumps(told, indent=1))


def _print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Cells that the screen is too narrow for go on in the next line."""
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*row)
    Screen().print(table)


@fuseplan.command()
@plan_command
@SEED
@click.option(
    "--inputs",
    type=click.Choice(tuple(INPUTS)),
    default="normal",
    show_default=True,
    help="How the elements of src are distributed.",
)
@PATIENCE
@SHAPES
@CHOOSE
@click.pass_context
def run(
    ctx: click.Context,
    asked: Asked,
    seed: int,
    inputs: str,
    patience: float,
    shapes: Sequence[str],
    choose: str,
) -> None:
    """Compile PLAN, run it on random data, check the result against float64 and time it.

    The name of an ONNX file in the place of PLAN runs that model, beside ONNX Runtime where it is installed.
    """
    if is_model(asked.plan):
        of_model = run_model(asked, shapes, seed, choose)
        tell(of_model, as_json=asked.as_json)
        ctx.exit(RIGHT if of_model.is_right else WRONG)
    trial = run_trial(asked.plan, asked.target, seed=seed, inputs=inputs, patience=patience, **asked.how)
    tell(trial, as_json=asked.as_json)
    ctx.exit(RIGHT if trial.check.is_right else WRONG)


@fuseplan.command("explain")
@plan_command
@click.option("--measure", is_flag=True, help="Measure this machine's peaks first, in about a second.")
@PATIENCE
@SHAPES
@click.option("--node", help="Of a model: tell all plans that were tried for the operator of this name.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Of a model: write the report with the model's graph as a page of HTML, too.",
)
@click.pass_context
def explain_command(
    ctx: click.Context,
    asked: Asked,
    measure: bool,
    patience: float,
    shapes: Sequence[str],
    node: str | None,
    html: Path | None,
) -> None:
    """Explain how PLAN is computed and why, or why it is refused.

    No toolchain is needed, for any target. The name of an ONNX file in the place of PLAN reports on that
    model: its plans, and why its other operators are in none.
    """
    if is_model(asked.plan):
        of_model = explain_model(asked, shapes, node)
        if html and isinstance(of_model, Report):
            html.write_text(page(of_model, Path(asked.plan).name), "utf-8")
        tell(of_model, as_json=asked.as_json)
        return
    if measure:
        _measure_peaks(parse_target(asked.target), asked.threads, patience)
    told = explain(asked.plan, asked.target, **asked.how)
    if asked.as_json:
        _print_json(told.to_json())
    else:
        click.echo(told.text(Screen().width, is_whole=bool(ctx.meta.get("verbose"))))
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


@fuseplan.command("profile")
@plan_command
@SEED
@SHAPES
@click.option("--measure", is_flag=True, help="Measure this machine's peaks first, in about a second.")
@PATIENCE
@click.pass_context
def profile_command(
    ctx: click.Context, asked: Asked, seed: int, shapes: Sequence[str], measure: bool, patience: float
) -> None:
    """Time each operator of the model PLAN, an ONNX file, by ONNX Runtime with its fusions turned off.

    Tells what bounds each, by the machine's measured peaks, and the plans that would pay. Compiles nothing.
    """
    if measure:
        _measure_peaks(parse_target(asked.target), asked.threads, patience)
    told = profile_model(asked, shapes, seed)
    if asked.as_json:
        _print_json(told.to_json())
        return
    for title, head, rows in told.tables:
        shown = rows if ctx.meta.get("verbose") else rows[:SHOWN]
        more = f"; {len(rows) - len(shown)} more with -v" if len(rows) > len(shown) else ""
        _print_table(title + more, head, shown)
    if not told.is_measured:
        Screen().tell("what bounds an operator is not known: --measure measures this machine's peaks")


@fuseplan.command("supported")
@TARGET
@click.option(
    "--combinations", is_flag=True, help="List combinations of operators instead, with each algorithm."
)
@AS_JSON
@loud_command
def supported_command(target: str, combinations: bool, as_json: bool) -> None:
    """List the operators, layouts and dtypes that a target supports, with their templates."""
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
    Screen().tell(f"Elementwise operators fuse before and after any contraction. Backends: {backends}")


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
    """Manage the disk cache of compiled kernels."""


@cache.command()
@AS_JSON
def info(as_json: bool) -> None:
    """Print the cache's folder, and the number and size of its kernels."""
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

"""The commands `fuseplan run` and `fuseplan explain`, of a plan or a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fuseplan.cli.options import CHOOSE, PATIENCE, SEED, SHAPES, Asked, is_model, plan_command, refuse_told
from fuseplan.cli.screen import Screen, print_json, tell
from fuseplan.cli.statuses import REFUSED, RIGHT, WRONG
from fuseplan.cli.trial import measure_peaks, run_trial
from fuseplan.explanation import explain
from fuseplan.measure.data import INPUTS


@click.command()
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
        from fuseplan.cli.models import run_model

        refuse_told(ctx, "a plan", "inputs", "patience", "template")
        of_model = run_model(asked, shapes, seed, choose)
        tell(of_model, as_json=asked.as_json)
        ctx.exit(RIGHT if of_model.is_right else WRONG)
    refuse_told(ctx, "a model", "shapes", "choose")
    trial = run_trial(asked.plan, asked.target, seed=seed, inputs=inputs, patience=patience, **asked.how)
    tell(trial, as_json=asked.as_json)
    ctx.exit(RIGHT if trial.check.is_right else WRONG)


@click.command("explain")
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
        from fuseplan.cli.models import explain_model
        from fuseplan.reports.page import page
        from fuseplan.reports.report import Report

        refuse_told(ctx, "a plan", "measure", "patience", "template")
        if node:
            refuse_told(ctx, "a whole model's report", "html")
        of_model = explain_model(asked, shapes, node)
        if html and isinstance(of_model, Report):
            html.write_text(page(of_model, Path(asked.plan).name), "utf-8")
        tell(of_model, as_json=asked.as_json)
        return
    refuse_told(ctx, "a model", "shapes", "node", "html")
    if measure:
        measure_peaks(asked, patience)
    told = explain(asked.plan, asked.target, **asked.how)
    if asked.as_json:
        print_json(told.to_json())
    else:
        click.echo(told.text(Screen().width, is_whole=bool(ctx.meta.get("verbose"))))
    ctx.exit(RIGHT if told.is_fused else REFUSED)

"""The command `fuseplan verdict`."""

from __future__ import annotations

import json

import click

from fuseplan.cli.options import PATIENCE, SEED, plan_command
from fuseplan.cli.screen import Screen
from fuseplan.cli.statuses import DISTURBED, RIGHT
from fuseplan.compile import compile as compile_plan


@click.command("verdict")
@plan_command
@SEED
@PATIENCE
@click.pass_context
def verdict_command(
    ctx: click.Context,
    plan: str,
    target: str,
    threads: int | None,
    accuracy: str | float,
    template: str | None,
    seed: int,
    patience: float,
    as_json: bool,
) -> None:
    """Measure whether fusing PLAN pays on this machine, and keep the answer for explain.

    The fused kernel runs beside the plan's operators one at a time and beside eager PyTorch. While other
    programs use the machine there is no verdict, and nothing is kept.
    """
    compiled = compile_plan(plan, target, threads=threads, accuracy=accuracy, template=template)
    found = compiled.verdict(seed, patience=patience)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=1))
    else:
        Screen().tell(str(found))
    ctx.exit(DISTURBED if found.disturbance else RIGHT)

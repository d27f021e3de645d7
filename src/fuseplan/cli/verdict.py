"""The command `fuseplan verdict`."""

from __future__ import annotations

import json

import click

from fuseplan.cli.options import SEED, plan_command
from fuseplan.compile import compile as compile_plan


@click.command("verdict")
@plan_command
@SEED
def verdict_command(
    plan: str,
    target: str,
    threads: int | None,
    accuracy: str | float,
    template: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure whether fusing PLAN pays on this machine, and keep the answer for explain.

    The fused kernel runs beside the plan's operators one at a time and beside eager PyTorch.
    """
    compiled = compile_plan(plan, target, threads=threads, accuracy=accuracy, template=template)
    found = compiled.verdict(seed)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else str(found))

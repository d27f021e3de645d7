"""The command `fuseplan show`: the record that each stage makes of a plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from fuseplan.backends import backend_of
from fuseplan.cli.options import Asked, plan_command
from fuseplan.errors import ArgumentError
from fuseplan.execution.build import build_sound
from fuseplan.execution.stages import Records, decide

LISTINGS = ("asm", "ptx", "sass")


def _program(records: Records) -> tuple[str, Any]:
    program = build_sound(records)[1].to_json()
    return json.dumps(program, indent=1), program


# A stage's record as text and as JSON values.
RECORDS: dict[str, Callable[[Records], tuple[str, Any]]] = {
    "plan": lambda records: (str(records.plan), json.loads(records.plan.to_json())),
    "match": lambda records: (str(records.match), records.match.to_json()),
    "kernel": lambda records: (records.kernel.text, records.kernel.text.splitlines()),
    "choice": lambda records: (str(records.choice), records.choice.to_json()),
    "source": lambda records: (records.source.text, {**records.source.frame, "text": records.source.text}),
    "program": _program,
}
WITHOUT_TOOLCHAIN = tuple(name for name in RECORDS if name != "program")


@click.command()
@plan_command
@click.option(
    "--stage",
    type=click.Choice((*RECORDS, *LISTINGS)),
    help="One stage alone; without it, all stages that need no toolchain.",
)
def show(asked: Asked, stage: str | None) -> None:
    """Print the records that the stages make of PLAN.

    The stages are plan, match, kernel, choice, source and program. The instructions of the program are asm on
    a CPU and on AMD GPUs, and ptx and sass on NVIDIA GPUs.
    """
    records = decide(asked.plan, asked.target, **asked.how)
    wanted = (stage,) if stage else WITHOUT_TOOLCHAIN
    told = {name: _listing(name, records) if name in LISTINGS else RECORDS[name](records) for name in wanted}
    if asked.as_json:
        click.echo(json.dumps({name: value for name, (_, value) in told.items()}, indent=1))
        return
    for name, (text, _) in told.items():
        click.echo(text if stage else f"# {name}\n{text}\n")


def _listing(kind: str, records: Records) -> tuple[str, Any]:
    """The instructions of the plan's kernel.

    Raises:
        ArgumentError: code for the target has no such listing.
    """
    backend, target = backend_of(records.target.backend), records.target
    known = backend.listings(target)
    if kind not in known:
        held = f"has {' and '.join(known)}" if known else "is interpreted, and has no instructions"
        raise ArgumentError(f"code for {target} has no stage {kind!r}: it {held}")
    text = backend.listing(kind, records.source, records.kernel, records.choice.template, target)
    return text.rstrip(), text.rstrip().splitlines()

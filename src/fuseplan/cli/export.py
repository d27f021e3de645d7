"""The command `fuseplan export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from fuseplan.cli.options import Asked, plan_command
from fuseplan.errors import ArgumentError, counted, refusing
from fuseplan.execution.stages import Records, decide
from fuseplan.system import limits

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("export")
@plan_command
@click.option("-o", "--output", type=FILE, required=True, help="The object file, or the GPU's binary.")
@click.option("--header", type=FILE, help="The C header; beside the object file unless given.")
@click.option("--name", help="The C function's name; the object file's unless given.")
@click.option("--weights", type=FILE, help="Operands by key, from numpy.savez: the object holds them.")
def export_command(
    asked: Asked, output: Path, header: Path | None, name: str | None, weights: Path | None
) -> None:
    """Write PLAN's kernel for programs without Python.

    For a CPU these are an object file and a C header that documents its functions. For a GPU these are the
    binary, its assembly, and a JSON file with the launch: grid, block, arguments in order, packing.
    """
    if not output.name:
        raise ArgumentError("--output has no file's name; want such as kernel.o")
    records = decide(asked.plan, asked.target, **asked.how)
    if records.target.backend == "cpu":
        held = {} if weights is None else _weights(weights)
        files = _c_files(records, output, header or output.with_suffix(".h"), name or output.stem, held)
    elif records.target.backend == "triton":
        from fuseplan.export.gpu import gpu_files  # noqa: PLC0415 - no other command needs it

        if header or name or weights:
            raise ArgumentError("--header, --name and --weights are for C; give a target of cpu")
        files = gpu_files(records, output)
    else:
        raise ArgumentError(f"there is no code for {records.target}: it interprets plans")
    for place, content in files.items():
        place.write_bytes(content)
    if asked.as_json:
        click.echo(json.dumps({"written": [str(place) for place in files]}))
        return
    for place, content in files.items():
        click.echo(f"{place}: {counted(len(content), 'byte')}")


def _c_files(
    records: Records, output: Path, header: Path, name: str, weights: dict[str, Any]
) -> dict[Path, bytes]:
    from fuseplan.export.c import CObject  # noqa: PLC0415 - llvmlite, which no other target needs

    made = CObject(records, name, weights)
    return {output: made.object, header: made.header.encode()}


def _weights(place: Path) -> dict[str, Any]:
    """The arrays of a file of NumPy's, by key; no pickle is read.

    Raises:
        ArgumentError: it is no such file, or too large.
    """
    with refusing(f"{place} holds no weights", (OSError, ValueError, TypeError)):
        if place.stat().st_size > limits.WEIGHTS_BYTES:
            raise ValueError(f"it has more than {counted(limits.WEIGHTS_BYTES, 'byte')}")
        with np.load(place, allow_pickle=False) as arrays:
            return dict(arrays)

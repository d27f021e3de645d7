"""The commands `fuseplan crossbuild` and `fuseplan demo`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from benchmarks.crossbuild import Built, allowances, builds, crossbuild, summaries
from benchmarks.demo import main as run_demo
from benchmarks.suite import chosen, load
from fuseplan.backends.triton.versions import dotted
from fuseplan.cli.options import AS_JSON, DURATION, PATIENCE, PLAN, THREADS, loud_command
from fuseplan.errors import ArgumentError, counted
from fuseplan.kernels.target import parse_target

ALLOWED = Path(__file__).resolve().parent / "allowed_spills.toml"
SHOWN = ("registers", "spill_bytes", "shared_bytes", "threads", "programs", "wgmma", "mfma", "tma_loads")


@click.command("demo")
@THREADS
@click.option(
    "--chart",
    type=click.Path(path_type=Path),
    help="The chart's file, .svg or .png; demo.svg unless given.",
)
@PATIENCE
@AS_JSON
@loud_command
@click.pass_context
def demo_command(
    ctx: click.Context, threads: int | None, chart: Path | None, patience: float, as_json: bool
) -> None:
    """Measure 21 fused plans at MIOpen's published shapes and ResNet-50, and draw a chart.

    Each plan runs beside its operators one at a time, the model beside ONNX Runtime. Without matplotlib
    there is no chart, without onnx and onnxruntime no model.
    """
    run_demo(threads, chart, as_json=as_json, patience=patience, is_quiet=bool(ctx.meta.get("quiet")))


@click.command("crossbuild")
@click.argument("suites", metavar="SUITE_OR_PLAN...", nargs=-1, required=True, type=PLAN)
@click.option(
    "--target",
    default="triton:sm_90,triton:gfx942",
    show_default=True,
    help="Kinds of GPU, with commas between them.",
)
@click.option("--template", default="", help="The only template to compile.")
@click.option(
    "--candidates", type=click.IntRange(1), default=1, show_default=True, help="Candidates per template."
)
@click.option("--only", default="", help="Compile the cases whose name or group contains this text.")
@click.option("--jobs", type=click.IntRange(1), help="Compiling processes; one per processor unless given.")
@click.option(
    "--seconds",
    type=DURATION,
    default=120.0,
    show_default=True,
    help="The most seconds for one kernel.",
)
@click.option(
    "--allowed",
    type=click.Path(path_type=Path, exists=True),
    help="A file of accepted spills; a checkout's benchmarks/allowed_spills.toml unless given.",
)
@click.option(
    "--triton",
    "folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    help="A folder with another Triton, made by `pip install --target FOLDER --no-deps triton==VERSION`.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file to append a JSON line to for each Triton: how many kernels are sound.",
)
@AS_JSON
@loud_command
@click.pass_context
def crossbuild_command(
    ctx: click.Context,
    suites: tuple[str, ...],
    target: str,
    template: str,
    candidates: int,
    only: str,
    jobs: int | None,
    seconds: float,
    allowed: Path | None,
    folders: tuple[Path, ...],
    record: Path | None,
    as_json: bool,
) -> None:
    """Compile what every GPU template emits for the plans of SUITE, and judge it; no GPU is needed.

    The installed Triton compiles, and each Triton that `--triton` names.

    Exit status: 0 all sound, 1 a kernel does not compile, spills, or lacks the instructions it was made for.
    """
    targets = [parse_target(name) for name in target.split(",")]
    plans = [case.plan for name in suites for case in chosen(load(name), only).cases]
    asked = [
        build
        for triton in (None, *folders)
        for build in builds(
            dict.fromkeys(plans), targets, candidates=candidates, only=template, triton=triton
        )
    ]
    if not asked:
        raise ArgumentError(f"there is nothing to compile: no template {template!r} takes these plans")
    place = allowed or (ALLOWED if ALLOWED.exists() else None)
    accepted = allowances(place) if place else ()
    found: list[Built] = []
    for built in crossbuild(asked, workers=jobs or os.cpu_count() or 1, seconds=seconds, allowed=accepted):
        found.append(built)
        click.echo(json.dumps(built.to_json()) if as_json else _lines(built))
    unsound = sum(bool(built.faults) for built in found)
    if not as_json:
        click.echo(f"{counted(len(found), 'kernel')}, {unsound} unsound")
    if record is not None:
        with record.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in summaries(found, suites))
    ctx.exit(1 if unsound else 0)


def _lines(built: Built) -> str:
    """What a kernel uses, which it is, and its faults."""
    used, build = built.resources, built.build
    counts = "  ".join(f"{name.replace('_', ' ')} {used[name]}" for name in SHOWN if name in used)
    head = f"{build.target.name}  triton {dotted(build.version)}  {build.template.text}  {build.plan}"
    return "\n".join(
        [head, *([f"  {counts}"] if used else []), *(f"  FAULT {each}" for each in built.faults)]
    )


COMMANDS = {each.name: each for each in (crossbuild_command, demo_command)}

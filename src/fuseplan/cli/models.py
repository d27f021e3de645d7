"""Commands on models: what becomes of their operators, and runs on random data."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from fuseplan.cli.options import AS_JSON, DURATION, PATIENCE, SEED, SHAPES, Asked, loud_command, plan_command
from fuseplan.cli.screen import Screen, print_json, print_table, tell
from fuseplan.cli.statuses import RIGHT, WRONG
from fuseplan.cli.trial import measure_peaks
from fuseplan.errors import ArgumentError, BuildError, counted, installing, refusing
from fuseplan.graph.type import FLOATS, Type, numpy_dtype
from fuseplan.measure.clock import HostClock
from fuseplan.measure.stats import Timing
from fuseplan.reports.comparison import allowed_by_rounding, allowed_error, distance
from fuseplan.reports.difference import TOLERANCE, difference
from fuseplan.reports.profile import SHOWN
from fuseplan.reports.report import Report, read_report
from fuseplan.reports.tried import Tried

if TYPE_CHECKING:
    from fuseplan.onnx.model import OnnxModel


@dataclass(frozen=True)
class ModelTrial:
    """A model's run on random data.

    Attributes:
        report: what became of its operators.
        peer: what its outputs were compared with.
        error: the largest difference of the output that is furthest over, by its largest element.
        allowed: the most that is right of that output.
        timed: calls, ours and the peer's in turns, where there is one to time.
    """

    report: Report
    peer: str
    error: float
    allowed: float
    timed: Mapping[str, Timing]

    @property
    def is_right(self) -> bool:
        """Whether the outputs are near enough."""
        return self.error <= self.allowed

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return {
            **self.report.to_json(),
            "peer": self.peer,
            "error": self.error,
            "allowed": self.allowed,
            "right": self.is_right,
            "seconds": {name: timing.median for name, timing in self.timed.items()},
        }

    def __str__(self) -> str:
        told = "right" if self.is_right else "WRONG"
        lines = [str(self.report), ""]
        lines.append(f"error      {self.error:.2g} of the largest element beside {self.peer}: {told}")
        for name, timing in self.timed.items():
            median, least = timing.median * 1e3, timing.minimum * 1e3
            lines.append(f"time       {median:.3f} ms median, {least:.3f} least: {name}")
        return "\n".join(lines)


def explain_model(asked: Asked, shapes: Iterable[str], node: str | None) -> Report | Tried:
    """The report on a model, or the plans that were tried for a node; nothing is compiled.

    Raises:
        ArgumentError: the file is no model, or cannot be read; a shape is none; or there is no such node.
    """
    model = _loaded(asked)
    types = _types(model, shapes)
    return model.report(types) if node is None else model.tried(node, types)


@click.command("diff")
@click.argument("first", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("second", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--tolerance",
    type=DURATION,
    default=TOLERANCE,
    show_default=True,
    help="The share of a site's time by which it may take longer.",
)
@AS_JSON
@loud_command
@click.pass_context
def diff_command(ctx: click.Context, first: Path, second: Path, tolerance: float, as_json: bool) -> None:
    """Compare two reports on a model, as `fuseplan explain model.onnx --json` prints them.

    Lists fusions of FIRST that SECOND lacks, new ones, and sites that are slower. Ends with status 1 where
    fusions are lost or sites slower.
    """
    with refusing("the report cannot be read"):
        found = difference(read_report(first), read_report(second), tolerance)
    tell(found, as_json=as_json)
    ctx.exit(WRONG if found.is_worse else RIGHT)


@click.command("profile")
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
        measure_peaks(asked, patience)
    model = _loaded(asked)
    told = model.profile(_given(_types(model, shapes), seed))
    if asked.as_json:
        print_json(told.to_json())
        return
    for title, head, rows in told.tables:
        shown = rows if ctx.meta.get("verbose") else rows[:SHOWN]
        more = f"; {len(rows) - len(shown)} more with -v" if len(rows) > len(shown) else ""
        print_table(title + more, head, shown)
    if not told.is_measured:
        Screen().tell("what bounds an operator is not known: --measure measures this machine's peaks")


@click.command("compare")
@plan_command
@SEED
@SHAPES
@click.option("--bisect", is_flag=True, help="Name the first plan or operator that is too far from float64.")
@click.option(
    "--tolerance", type=DURATION, help="The most that is right; by the dtype of a value unless given."
)
@click.pass_context
def compare_command(
    ctx: click.Context, asked: Asked, seed: int, shapes: Sequence[str], bisect: bool, tolerance: float | None
) -> None:
    """Compare the model PLAN, an ONNX file, with its meaning in float64, on random data."""
    model = _loaded(asked)
    found = model.compare(_given(_types(model, shapes), seed), tolerance)
    if not bisect:
        found = replace(found, steps=(), first=None)
    tell(found, as_json=asked.as_json)
    ctx.exit(RIGHT if found.is_right and found.first is None else WRONG)


@click.command("fuse")
@plan_command
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="The file to write.",
)
@SHAPES
def fuse_command(asked: Asked, output: Path, shapes: Sequence[str]) -> None:
    """Write the model PLAN, an ONNX file, with a function for each plan that is found in it.

    A function's body is the model's own nodes: any runtime of ONNX runs the file. Nothing is compiled.
    """
    model = _loaded(asked)
    types = _types(model, shapes)
    made, report = model.fused(types), model.report(types)
    made.save(output)
    fused = sum(row.state == "fused" for row in report.operators)
    if asked.as_json:
        click.echo(json.dumps({"file": str(output), "functions": made.functions, "skipped": made.skipped}))
        return
    lines = [f"{output}: {counted(len(made.functions), 'function')} for {counted(fused, 'operator')}"]
    lines += [f"  {name}: {plan}" for name, plan in made.functions.items()]
    lines += [f"  without a function: {plan}" for plan in made.skipped]
    Screen().tell("\n".join(lines))


def run_model(asked: Asked, shapes: Iterable[str], seed: int, choose: str) -> ModelTrial:
    """Runs a model on random data, beside ONNX Runtime where that is installed.

    Results are judged beside float64 where ONNX Runtime is not installed, or where its results are too far
    away: on CPUs without VNNI, its sums of 8-bit products saturate.

    Raises:
        ArgumentError: as for `explain_model`.
        BuildError: nothing runs one of its operators.
    """
    model = _loaded(asked, choose)
    types = _types(model, shapes)
    given = _given(types, seed)
    made = model.run(None, given)
    calls = {"fuseplan": lambda: model.run(None, given)}
    try:
        peer = "onnxruntime" if model.is_on_cpu else "onnxruntime on the cpu"
        run = model.peer(given)
        want, calls[peer] = run(), run
    except BuildError as refused:
        Screen(stderr=True).tell(f"beside float64, since {refused}")
        peer, want = "float64", model.exact(given)
    least = allowed_by_rounding(model.prepare(types).model.graph)
    error, allowed = _furthest(made, want, least)
    if error > allowed and peer != "float64":
        peer, exact = "float64", model.exact(given)
        error, allowed = _furthest(made, exact, least)
        theirs, _ = _furthest(want, exact, least)
        Screen(stderr=True).tell(f"beside float64, from which onnxruntime's results are {theirs:.2g} away")
    return ModelTrial(model.report(types), peer, error, allowed, HostClock().interleave(calls))


def _furthest(made: Sequence[Any], want: Sequence[Any], least: float) -> tuple[float, float]:
    """The error of the output that is furthest over the most that is right, and this most."""
    judged = (
        (distance(got, right), max(least, allowed_error(got))) for got, right in zip(made, want, strict=True)
    )
    return max(judged, key=lambda each: each[0] - each[1], default=(0.0, 0.0))


def _loaded(asked: Asked, choose: str = "predicted") -> OnnxModel:
    if importlib.util.find_spec("onnx") is None:
        raise ArgumentError(f"reading {asked.plan} needs onnx: {installing('onnx', 'onnx')}")
    from fuseplan.onnx import load  # noqa: PLC0415 - onnx is optional

    try:
        found: OnnxModel = load(
            asked.plan, asked.target, threads=asked.threads, accuracy=asked.accuracy, choose=choose
        )
    except OSError as error:
        problem = f"the model {asked.plan!r} cannot be read: {error.strerror or error}"
        raise ArgumentError(f"{problem}; want the path of an ONNX file") from None
    return found


def _types(model: OnnxModel, shapes: Iterable[str]) -> dict[str, Type]:
    """The types of the inputs: with 1 for open extents, or as the options say."""
    types = dict(model.example)
    for each in shapes:
        name, sign, written = each.rpartition("=")
        if not sign or not re.fullmatch(r"(\d+(x\d+)*)?", written):
            raise ArgumentError(
                f"--shape {each!r} gives no input a shape; want such as {next(iter(types))}=1x3"
            )
        if name not in types:
            raise ArgumentError(f"no input is named {name!r}; want of {', '.join(types)}")
        shape = tuple(map(int, written.split("x"))) if written else ()
        types[name] = replace(types[name], shape=shape)
    return types


def _given(types: Mapping[str, Type], seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: _random(rng, name, made) for name, made in types.items()}


def _random(rng: np.random.Generator, name: str, made: Type) -> Any:
    """Normal values; of whole numbers, 0 and 1."""
    if made.shape is None:
        told = f"the input {name!r} is no tensor with a shape ({made})"
        raise ArgumentError(f"{told}: --shape {name}=1x3 gives one, and fuseplan.onnx.load(..).run takes any")
    with refusing(f"no array of {made}", (MemoryError, ValueError)):
        values = rng.standard_normal(made.shape) if made.dtype in FLOATS else rng.integers(0, 2, made.shape)
        return values.astype(numpy_dtype(made.dtype))

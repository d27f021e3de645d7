"""The main job in one command: fused plans at MIOpen's published shapes, beside the operators one at a time.

Thirteen convolutions with bias and relu, eight batch normalizations with relu. MIOpen measured batches of 64
on a GPU; the batch here is what keeps the whole under two minutes on two cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fuseplan.arrays import empty
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import counted
from fuseplan.measure.clock import Protocol, interleave
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.measure.machine import machine
from fuseplan.measure.published import COMBINATIONS, published
from fuseplan.measure.stats import geomean
from fuseplan.plan import FusionPlan
from fuseplan.report.chart import OURS, THEIRS, Bar, Panel, Series, check_chart, speedups
from fuseplan.tune.unfused import OneAtATime

WIDE = 128  # columns of a terminal on which an outcome fits one line
HEAD = "kernels  fused ms  one at a time ms  speedup  saved MB    error"
PROTOCOL = Protocol(rounds=7, block_seconds=0.05)
SERIES = (Series("fuseplan, this machine's CPU", OURS), Series("MIOpen, published, GPU", THEIRS))


@dataclass(frozen=True)
class Shape:
    """A published shape: what MIOpen's figures call it, the plan, and the speedup they report."""

    label: str
    group: str
    plan: str
    published: float


BATCHES = {"CBA": 8, "NA": 16}
SHAPES = tuple(
    Shape(
        each.name,
        COMBINATIONS[each.combination],
        each.plan("f32", "nhwc", BATCHES[each.combination]),
        each.kernel_speedup,
    )
    for each in published()
)


@dataclass(frozen=True)
class Outcome:
    """What fusing one plan gave.

    Attributes:
        label, group, plan: which.
        kernels: launches of the fused plan.
        operators: launches of the operators one at a time.
        fused, unfused: seconds a run, medians of interleaved blocks.
        bytes_saved: bytes that the operators one at a time move and the fused kernel does not.
        error: the fused result's largest deviation from float64, over the largest output.
        published: the kernel-time speedup of MIOpen's table for the shape.
    """

    label: str
    group: str
    plan: str
    kernels: int
    operators: int
    fused: float
    unfused: float
    bytes_saved: int
    error: float
    published: float

    @property
    def speedup(self) -> float:
        """How many times faster fused is."""
        return self.unfused / self.fused

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self) | {"speedup": self.speedup}


def measure(shape: Shape, threads: int | None = None) -> Outcome:
    """Compiles a shape both ways, checks the results against float64, and times them interleaved."""
    plan = FusionPlan.parse(shape.plan)
    arrays = random_arrays(plan, seed=1)
    compiled = compile_plan(plan, "cpu", threads=threads)
    out = empty(plan.output)
    operands: dict[str, Any] = {key: array for key, array in arrays.items() if key != "src"}
    fused = partial(compiled.bind(**operands), arrays["src"], out)
    unfused = OneAtATime(plan, arrays, threads)
    fused()
    error = deviation(np.array(out), reference(plan, arrays))
    explained = compiled.explain().told
    timed = interleave({"fused": fused, "unfused": unfused}, PROTOCOL)
    return Outcome(
        label=shape.label,
        group=shape.group,
        plan=shape.plan,
        kernels=explained["kernels"],
        operators=len(unfused.decided),
        fused=timed["fused"].median,
        unfused=timed["unfused"].median,
        bytes_saved=explained["traffic"]["saved"],
        error=error,
        published=shape.published,
    )


def draw(found: Sequence[Outcome], threads: int, place: Path) -> Path:
    """Writes the bar chart of what was found."""
    bars: dict[str, list[Bar]] = {}
    for each in found:
        bars.setdefault(each.group, []).append(Bar(each.label, (each.speedup, each.published)))
    panels = [Panel(group, tuple(listed)) for group, listed in bars.items()]
    note = f"{machine().cpu}, {counted(threads, 'thread')}, {time.strftime('%Y-%m-%d')}; medians"
    return speedups(panels, SERIES, "One fused kernel beside the operators one at a time", note, place)


def line(outcome: Outcome) -> str:
    """An outcome's figures, under HEAD."""
    return (
        f"{outcome.kernels:>2} for {outcome.operators}"
        f"{outcome.fused * 1e3:>10.3f}"
        f"{outcome.unfused * 1e3:>18.3f}"
        f"{outcome.speedup:>9.2f}"
        f"{outcome.bytes_saved / 1e6:>10.2f}"
        f"{outcome.error:>9.1e}"
    )


def main(
    threads: int | None = None, chart: Path = Path("demo.svg"), *, as_json: bool = False
) -> list[Outcome]:
    """Measures all shapes, prints a line for each as it is done, and writes the chart.

    Args:
        threads: of every kernel; all that this process may use unless told.
        chart: where the bar chart goes; .svg or .png.
        as_json: print the outcomes as JSON in place of the lines.

    Returns:
        The outcomes.

    Raises:
        ArgumentError: the chart cannot be drawn or written.
    """
    check_chart(chart)
    count = threads or machine().cores
    console = Console(soft_wrap=True, highlight=False, stderr=as_json)
    is_wide = console.width >= WIDE or not console.is_terminal
    width = max(len(shape.plan) for shape in SHAPES)
    console.print(f"{len(SHAPES)} fused plans on {machine().cpu}, {counted(count, 'thread')}")
    console.print(f"{'plan':<{width}}  {HEAD}" if is_wide else f"plan\n    {HEAD}", style="bold")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(SHAPES))
        for shape in SHAPES:
            outcome = measure(shape, threads)
            progress.advance(task)
            found.append(outcome)
            gap = f"{outcome.plan:<{width}}  " if is_wide else f"{outcome.plan}\n    "
            console.print(gap + line(outcome), markup=False)
    for group in dict.fromkeys(each.group for each in found):
        mean = geomean(each.speedup for each in found if each.group == group)
        console.print(f"{group}: fused is {mean:.2f} times as fast (geometric mean)")
    console.print(f"chart: {draw(found, count, chart)}")
    if as_json:
        print(json.dumps([each.to_json() for each in found], indent=1))
    return found

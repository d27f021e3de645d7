"""The main job in one command: fused plans at MIOpen's published shapes, beside the operators one at a time.

Thirteen convolutions with bias and relu, eight batch normalizations with relu. MIOpen measured batches of 64
on a GPU; the batches here keep the whole under two minutes on two cores. A model follows, cut into plans.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.demo_model import ModelOutcome, measure_model
from benchmarks.report.chart import OURS, THEIRS, Bar, Panel, Series, check_chart, speedups
from benchmarks.shapes import COMBINATIONS, published
from fuseplan.cli.screen import Screen, progress
from fuseplan.cli.trial import run_trial
from fuseplan.errors import ArgumentError, BuildError, counted, installing
from fuseplan.measure.machine import machine

CHART = Path("demo.svg")
MODEL, SIZE = "resnet50", 224
HEAD = "kernels  fused ms  one at a time ms  speedup  saved MB    error"
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
        disturbance: which other use of the machine makes the times unreliable; None where there was none.
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
    disturbance: str | None = None

    @property
    def speedup(self) -> float:
        """How many times faster fused is."""
        return self.unfused / self.fused

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self) | {"speedup": self.speedup}


def measure(shape: Shape, threads: int | None = None, patience: float = 0.0) -> Outcome:
    """A shape fused, checked against float64, and timed beside its operators one at a time."""
    trial = run_trial(shape.plan, "cpu", threads=threads, seed=1, patience=patience)
    assert trial.unfused is not None  # it ran on this machine
    return Outcome(
        label=shape.label,
        group=shape.group,
        plan=shape.plan,
        kernels=trial.compiled.kernels,
        operators=trial.unfused_kernels,
        fused=trial.timed.median,
        unfused=trial.unfused.median,
        bytes_saved=trial.compiled.explain().told["traffic"]["saved"],
        error=trial.check.error,
        published=shape.published,
        disturbance=trial.disturbance,
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
    threads: int | None = None,
    chart: Path | None = None,
    *,
    as_json: bool = False,
    patience: float = 0.0,
    is_quiet: bool = False,
) -> list[Outcome]:
    """Measures all shapes and the model, prints a line for each as it is done, and draws the chart.

    Args:
        threads: threads of every kernel; all that this process may use unless given.
        chart: the chart's file, .svg or .png; unless given demo.svg, if matplotlib is installed.
        as_json: print the outcomes of the plans and of the model as JSON in place of the lines.
        patience: seconds to wait, for each shape, until other programs rest.
        is_quiet: show no progress.

    Returns:
        The outcomes of the shapes.

    Raises:
        ArgumentError: the chart that is asked for cannot be drawn or written.
    """
    if chart is not None:
        check_chart(chart)
    screen = Screen(stderr=as_json)
    found = _measured_all(screen, threads, patience, is_quiet)
    for group in dict.fromkeys(each.group for each in found):
        mean = geometric_mean(each.speedup for each in found if each.group == group)
        screen.tell(f"{group}: fused is {mean:.2f} times as fast (geometric mean)")
    disturbed = [each for each in found if each.disturbance]
    if disturbed:
        screen.tell(
            f"the times of {len(disturbed)} of {counted(len(found), 'plan')} are unreliable: "
            f"{disturbed[0].disturbance}"
        )
    model = _model(screen, threads)
    screen.tell(_drawn(found, threads or machine().cores, chart))
    if as_json:
        told = {"plans": [each.to_json() for each in found], "model": model and model.to_json()}
        print(json.dumps(told, indent=1))
    return found


def _model(screen: Screen, threads: int | None) -> ModelOutcome | None:
    """The model's outcome, printed; where a package is missing, which one."""
    try:
        made = measure_model(MODEL, SIZE, threads)
    except ImportError as error:
        screen.tell(f"no model: {error}: {installing('onnx', 'onnx', 'onnxruntime')}")
    except BuildError as error:
        screen.tell(f"no model: {error}")
    else:
        screen.tell(str(made))
        return made
    return None


def _measured_all(screen: Screen, threads: int | None, patience: float, is_quiet: bool) -> list[Outcome]:
    """The outcomes, each printed as it is there."""
    count = threads or machine().cores
    width = max(len(shape.plan) for shape in SHAPES)
    is_wide = screen.width > width + len(HEAD) + 2
    screen.tell(f"{len(SHAPES)} fused plans on {machine().cpu}, {counted(count, 'thread')}")
    screen.print(
        f"{'plan':<{width}}  {HEAD}" if is_wide else f"plan\n    {HEAD}", style="bold", soft_wrap=True
    )
    found = []
    with progress(screen, len(SHAPES), is_shown=not is_quiet) as step:
        for shape in SHAPES:
            found.append(measure(shape, threads, patience))
            step(shape.label)
            gap = f"{found[-1].plan:<{width}}  " if is_wide else f"{found[-1].plan}\n    "
            screen.print(gap + line(found[-1]), markup=False, soft_wrap=True)
    return found


def _drawn(found: Sequence[Outcome], threads: int, chart: Path | None) -> str:
    """Draws the chart, and says where it is; or why there is none, if none was asked for.

    Raises:
        ArgumentError: the chart that is asked for cannot be drawn or written.
    """
    place = chart or CHART
    try:
        return f"chart: {draw(found, threads, place)}"
    except ArgumentError as error:
        if chart is not None:
            raise
        return f"no chart: {error}"

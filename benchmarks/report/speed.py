"""docs/speed.md and its chart: `python -m benchmarks.report.speed RESULTS PAGE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks import recorded as results
from benchmarks import suite
from benchmarks.drawn import FILE, NAMED
from benchmarks.report import chart, whole
from benchmarks.report.chart import Bar, Panel, Series
from benchmarks.standings import standings
from benchmarks.suite import Aim, Suite
from fuseplan.bench.markdown import table
from fuseplan.bench.results import OURS, Row
from fuseplan.bench.table import is_on_gpu, lines
from fuseplan.errors import counted
from fuseplan.system.gathering import gathered

WRITTEN = "<!-- Written by `make docs` from benchmarks/results: measure again, do not edit. -->"
CHART = "charts/speed.svg"  # beside the page
INTRODUCTION = """\
Each figure is the fastest other library's time divided by fuseplan's time: above 1 fuseplan is faster. It
is the geometric mean over a group of shapes; the brackets hold the slowest shape of the group. The last
row of each table counts the shapes on which another library is faster. [Measured](measured.md) lists
every shape, the conditions, and the attempts on each lost shape. [Published](published.md) compares with
MIOpen's own figures."""
OF_MODELS = """\
Models of the transformers library, and SqueezeNet and GoogLeNet, with random weights and real shapes. On
GPUs a call is a CUDA graph, beside eager PyTorch and torch.compile; on CPUs the input is one image or 128
tokens, beside ONNX Runtime, OpenVINO, and eager and compiled PyTorch."""
OF_TRAINING = """\
Forward pass, loss and backward pass in a CUDA graph, beside eager PyTorch and torch.compile. Memory is the
most of a step, over torch.compile's."""
OF_KERNELBENCH = """\
Programs in f32, beside the faster of eager PyTorch and torch.compile."""
ON_CPUS = """\
Tensors are f32 and weights are bound. The shapes are those of ResNet-50, VGG-16, Inception and MobileNet.
The other libraries are ONNX Runtime, PyTorch (eager and compiled, both layouts), ncnn and OpenVINO on the
AMD machine, and ONNX Runtime, PyTorch (eager) and ncnn on the Intel machine. `others` means all libraries
except ncnn: ncnn has a Winograd convolution too, and takes one image per call."""
ON_GPUS = """\
The L2 cache is cold. `cudnn` is cuDNN's fused convolution, `cublaslt` is cuBLASLt with its epilogue,
`torch` is eager PyTorch, `torch:steps` is eager PyTorch with one call per operator, and `unfused` is the
fastest set of separate kernels of the other libraries."""
ON_DRAWN_SHAPES = """\
`fuseplan bench SUITE:COUNT:SEED --target cuda` draws shapes at random. No choice was measured for them: the
cost model chooses."""
BEHIND = "shapes slower than the fastest other"
OF_OURS = (
    "floor",
    f"{OURS}:",
)  # aims against the machine's limit and against our other forms are not about peers
SUITES = {
    "conv_nhwc": "{}, channels last",
    "conv_nchw": "{}, channels first",
    "norm": "batch_norm + relu, {}",
    "train": "batch_norm in training + relu, {}",
}
MEAN = Series("geometric mean over the shapes", chart.OURS)
SLOWEST = Series("slowest shape", chart.MARK, is_mark=True)


def summary(folder: Path) -> str:
    """A row a group of shapes, a column a machine and thread count: geometric mean, and the least."""
    places = [place for name in SUITES if (place := folder / f"{name}.jsonl").is_file()]
    rows = [row for place in places for row in results.latest(results.read(place))]
    columns = sorted({_machine(row) for row in rows if row.copies == 1})
    heads = [f"{_short(cpu)}, {counted(threads, 'thread')}" for cpu, threads in columns]
    cells = [cell for name in SUITES for cell in _cells(rows, columns, name)]
    behind = [_behind([row for row in rows if _machine(row) == column]) for column in columns]
    return "\n".join(table(["", "against", *heads], [*cells, [BEHIND, "all", *behind]]))


def gpu_summary(folder: Path) -> str:
    """A row a group of shapes and who it is compared with, a column a GPU."""
    return _gpu_table(_gpu_rows(folder))


def drawn_summary(folder: Path) -> str:
    """The same of shapes that were drawn at random; "" where none were measured."""
    drawn = [row for place in sorted(folder.glob(f"{FILE}*.jsonl")) for row in results.read(place)]
    rows = {
        suite.load(name): results.latest(each)
        for name, each in gathered((row.suite, row) for row in drawn).items()
    }
    return _gpu_table(rows) if rows else ""


def _gpu_table(rows: Mapping[Suite, Sequence[Row]]) -> str:
    every = [row for listed in rows.values() for row in listed]
    gpus = sorted({str(row.machine["gpu"]) for row in every})
    cells = [cell for each, listed in rows.items() for cell in _gpu_cells(each, listed, gpus)]
    behind = [_behind([row for row in every if row.machine["gpu"] == gpu]) for gpu in gpus]
    return "\n".join(table(["", "against", *gpus], [*cells, [BEHIND, "all", *behind]]))


def _gpu_rows(folder: Path) -> dict[Suite, list[Row]]:
    """The last rows of each suite that was measured on a GPU and has aims."""
    measured = [place.stem for place in sorted(folder.glob("*.jsonl")) if place.stem in suite.names()]
    found = [each for name in measured if (each := suite.load(name)).aims]
    rows = {each: results.latest(results.read(folder / f"{each.name}.jsonl")) for each in found}
    on_gpus = {each: [row for row in listed if is_on_gpu(row)] for each, listed in rows.items()}
    return {each: listed for each, listed in on_gpus.items() if listed}


def _gpu_cells(found: Suite, rows: Sequence[Row], gpus: Sequence[str]) -> Iterator[list[str]]:
    reached: dict[Aim, list[str]] = {}
    for place, gpu in enumerate(gpus):
        for each in standings(found, lines([row for row in rows if row.machine["gpu"] == gpu])):
            if each.aim.against.startswith(OF_OURS):
                continue
            cell = reached.setdefault(each.aim, [""] * len(gpus))
            cell[place] = f"{each.geomean:.2f} ({each.least:.2f})"
    for aim, cell in reached.items():
        yield [f"{_titled(found, rows)}, {aim.group}", aim.against.replace(",", ", "), *cell]


def _machine(row: Row) -> tuple[str, int]:
    return str(row.machine["cpu"]), row.threads


def _behind(rows: Sequence[Row]) -> str:
    """On how many of the shapes another library is faster."""
    suites = dict.fromkeys(row.suite for row in rows)
    ratios = [line.ratio for name in suites for line in lines([row for row in rows if row.suite == name])]
    measured = [ratio for ratio in ratios if ratio is not None]
    return f"{sum(ratio < 1 for ratio in measured)} of {len(measured)}"


def _short(cpu: str) -> str:
    return cpu.replace("(R)", "").replace(" Processor", "")


def _cells(rows: Sequence[Row], columns: Sequence[tuple[str, int]], name: str) -> Iterator[list[str]]:
    found = suite.load(name)
    reached: dict[tuple[str, str], list[str]] = {}
    for place, (cpu, threads) in enumerate(columns):
        mine = [row for row in rows if row.suite == name and _machine(row) == (cpu, threads)]
        for each in standings(found, lines(mine)):
            cell = reached.setdefault((each.aim.group, each.aim.against), [""] * len(columns))
            cell[place] = f"{each.geomean:.2f} ({each.least:.2f})"
    for (group, against), cell in reached.items():
        yield [SUITES[name].format(group), against, *cell]


def page(folder: Path) -> str:
    """The page of both tables, from the files of results in a folder."""
    parts = [WRITTEN, "# Speed", INTRODUCTION, f"![Speed beside the fastest other library]({CHART})"]
    parts += ["## Whole models", OF_MODELS, whole.inference(folder)]
    parts += ["### Training steps", OF_TRAINING, whole.training(folder)]
    parts += ["### KernelBench, level 2", OF_KERNELBENCH, whole.kernelbench(folder)]
    parts += ["## GPUs", ON_GPUS, gpu_summary(folder)]
    if drawn := drawn_summary(folder):
        parts += ["### Random shapes", ON_DRAWN_SHAPES, drawn]
    parts += ["## CPUs", ON_CPUS, summary(folder)]
    return "\n\n".join(parts) + "\n"


def draw(folder: Path, place: Path) -> Path:
    """Draws the fastest other library's time over ours: a panel per GPU, and per CPU with all of its threads.

    Raises:
        ArgumentError: matplotlib is not installed, or the file cannot be written.
    """
    panels = [*_gpu_panels(folder), *_cpu_panels(folder)]
    note = "f32 on CPUs. Every shape is in docs/measured.md."
    title = "fuseplan beside the fastest other library"
    axis = "the fastest other library's time / fuseplan's time"
    return chart.speedups(panels, (MEAN, SLOWEST), title, note, place, axis)


def _gpu_panels(folder: Path) -> Iterator[Panel]:
    bars: dict[str, list[Bar]] = {}
    for found, rows in _gpu_rows(folder).items():
        if found.name in suite.MADE:  # docs/published.md has charts of them
            continue
        heads = dict.fromkeys((results.device_of(row.machine), row.group.split(",")[0]) for row in rows)
        for gpu, head in heads:
            mine = [
                row for row in rows if results.device_of(row.machine) == gpu and suite.is_of(row.group, head)
            ]
            bars.setdefault(gpu, []).extend(_bar(f"{_titled(found, rows)}, {head}", mine))
    yield from (Panel(gpu, tuple(listed)) for gpu, listed in bars.items())


def _cpu_panels(folder: Path) -> Iterator[Panel]:
    rows = {name: results.latest(results.read(folder / f"{name}.jsonl")) for name in SUITES}
    threads: dict[str, int] = {}
    for row in (each for listed in rows.values() for each in listed):
        threads[row.machine["cpu"]] = max(threads.get(row.machine["cpu"], 0), row.threads)
    for cpu, count in sorted(threads.items(), key=lambda pair: -pair[1]):
        bars = [
            bar
            for name, listed in rows.items()
            for bar in _bar(
                _titled(suite.load(name), listed), [row for row in listed if _is_run(row, cpu, count)]
            )
        ]
        yield Panel(f"{_short(cpu)}, {counted(count, 'thread')}", tuple(bars))


def _is_run(row: Row, cpu: str, threads: int) -> bool:
    return (row.machine["cpu"], row.threads, row.copies) == (cpu, threads, 1)


def _titled(found: Suite, rows: Sequence[Row]) -> str:
    """With the number of shapes that were measured: fewer may have been drawn than were asked for."""
    drawn = NAMED.fullmatch(found.name)
    shapes = counted(len({row.plan for row in rows}), "shape")
    which = f", {shapes} of seed {drawn['seed']}" if drawn else ""
    return found.title.split(" on a GPU")[0] + which


def _bar(label: str, rows: Sequence[Row]) -> Iterator[Bar]:
    ratios = [ratio for line in lines(rows) if (ratio := line.ratio) is not None]
    if ratios:
        yield Bar(label, (geometric_mean(ratios), min(ratios)))


if __name__ == "__main__":
    where, written = Path(sys.argv[1]), Path(sys.argv[2])
    written.write_text(page(where), encoding="utf-8")
    print(draw(where, written.parent / CHART))

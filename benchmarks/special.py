"""What `fuseplan bench` measures besides suites, on the CPU or a GPU: shown, and appended to the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import accuracy as accuracies
from benchmarks.compile_time import compile_times
from benchmarks.footprint import footprint
from benchmarks.gpu_host import host_costs
from benchmarks.recorded import recorded
from benchmarks.report.published import charts
from benchmarks.report.records import COMPILE, peaks, tables
from benchmarks.standings import markdown
from benchmarks.suite import chosen, load
from fuseplan.bench import gpu
from fuseplan.bench.command import bench, measured, printed
from fuseplan.bench.markdown import table
from fuseplan.bench.options import Display, Options
from fuseplan.bench.peers import OURS, known
from fuseplan.bench.results import Row
from fuseplan.errors import ArgumentError, counted
from fuseplan.measure.clock import GpuClock
from fuseplan.measure.machine import gpu_machine
from fuseplan.measure.peaks import measured_gpu_peaks, measured_peaks

PUBLISHED_LIBRARIES = "unfused,onnxruntime,torch.compile,openvino"
GPU_PUBLISHED_LIBRARIES = "fuseplan,unfused,cudnn,cublaslt,torch.compile"
CHARTS = Path("docs/charts")
STRICT = "fuseplan:strict"

Benchmark = Callable[[str, Options, Display], Any]


def bench_published(_: str, options: Options, display: Display) -> list[Row]:
    """MIOpen's published shapes; with results, also the charts of all that was recorded."""
    usual = GPU_PUBLISHED_LIBRARIES if options.is_on_gpu else PUBLISHED_LIBRARIES
    name = "published_cuda" if options.is_on_gpu else "published_cpu"
    suite = chosen(load(name), options.only)
    asked = options if options.peers is not None else replace(options, peers=usual)
    rows = bench(suite, asked, display, partial(markdown, suite))
    draw_published(options.results, display.show)
    return rows


def draw_published(folder: Path | None, show: Callable[[str], object]) -> None:
    """Draws the charts from a folder of results, or says what it takes: no result is lost for a chart."""
    if folder is None:
        return
    try:
        for place in charts(folder, CHARTS):
            show(f"chart: {place}")
    except ArgumentError as error:
        show(f"no chart: {error}")


def bench_compile(name: str, options: Options, display: Display) -> dict[str, Any]:
    """Cold and cached compile times over a suite."""
    with display.steps(2) as step:
        found = compile_times(chosen(load(name), options.only), step)
    return _finding(f"{COMPILE}{name}", found, options, display)


def bench_overhead(_: str, options: Options, display: Display) -> list[Row]:
    """The cost of calling a bound plan, in microseconds, beside the same plan in the peers."""
    suite = chosen(load("overhead"), options.only)
    runs = replace(options, is_twice=False, is_unfused=False).runs
    rows = [row for run in runs for row in measured(suite, run, display)]
    cells = []
    for row in rows:
        times = [_us(row.median), _us(row.minimum)] if row.median else [row.refused or "", ""]
        cells.append([row.case, str(row.threads), row.peer, *times])
    display.show("\n".join(table(["plan", "threads", "peer", "us a call, median", "least"], cells)))
    printed([row.to_json() for row in rows], options)
    return rows


def bench_gpu_host(_: str, options: Options, display: Display) -> dict[str, Any]:
    """The cost for the host of calling and loading plans on a GPU."""
    gpu.needs_gpu()
    costs = host_costs(chosen(load("gpu_overhead"), options.only), GpuClock(options.device))
    return _finding("gpu_overhead", costs, options, display)


def bench_footprint(_: str, options: Options, display: Display) -> dict[str, Any]:
    """Seconds to import fuseplan, and bytes of what it needs."""
    with display.steps(None) as step:
        step("starting processes")
        found = footprint()
    return _finding("footprint", found.to_json(), options, display)


def bench_peaks(_: str, options: Options, display: Display) -> list[dict[str, Any]]:
    """The most that this machine does, measured now, for each thread count."""
    found = []
    with display.steps(len(options.threads)) as step:
        for threads in options.threads:
            step(f"measuring {counted(threads, 'thread')}")
            found.append(measured_peaks(threads, options.patience))
    told = [{**each.to_json(), "disturbance": why} for each, why in found]
    display.show("\n".join(peaks(told)))
    display.show("\nBytes read and bytes written both counted; best of many launches.")
    for each, why in found:
        if why is not None:
            display.show(f"\n{counted(each.threads, 'thread')}: not kept, since {why}.")
    return [recorded("peaks", each, options) for each in told]


def bench_gpu_peaks(_: str, options: Options, display: Display) -> dict[str, Any]:
    """The most that this GPU does, measured now."""
    gpu.needs_gpu()
    found, disturbance = measured_gpu_peaks(gpu_machine(options.device).gpu, options.device)
    return _finding("gpu_peaks", {**found.to_json(), "disturbance": disturbance}, options, display)


def bench_models(_: str, options: Options, display: Display) -> dict[str, Any]:
    """Networks beside the libraries that run models, for each thread count."""
    from benchmarks import models, networks  # onnx is optional

    return _of_models("models", models, tuple(networks.NETWORKS), options, display)


def bench_quantized_models(_: str, options: Options, display: Display) -> dict[str, Any]:
    """Quantized models beside ONNX Runtime, and both in f32, for each thread count."""
    from benchmarks import quantized_models  # onnx is optional

    return _of_models("quantized_models", quantized_models, quantized_models.names(), options, display)


def _of_models(
    what: str, models: Any, names: Sequence[str], options: Options, display: Display
) -> dict[str, Any]:
    """The rows of a module that measures models by their names."""
    rows = []
    for threads, name in product(options.threads, names):
        if options.only in name:
            rows.append(models.measured(name, threads))
            display.tell(models.told(rows[-1]))
    if not rows:
        raise ArgumentError(f"no model has {options.only!r} in its name: want {', '.join(names)}")
    return _finding(what, {"rows": rows}, options, display)


def bench_accuracy(_: str, options: Options, display: Display) -> dict[str, Any]:
    """How far results are from float64, ours beside each peer's."""
    suite = load("accuracy")
    # torch.compile computes what torch does: it would add minutes and no row that differs.
    asked = known(False).named(options.peers)[1:]
    peers = [OURS, STRICT, *(name for name in asked if not name.startswith("torch.compile"))]
    with display.steps(accuracies.steps(suite)) as step:
        found = list(accuracies.accuracy(suite, peers, options.threads[0], step))
    return _finding("accuracy", {"rows": [each.to_json() for each in found]}, options, display)


def bench_gpu_accuracy(_: str, options: Options, display: Display) -> dict[str, Any]:
    """How far results on a GPU are from float64, ours beside eager PyTorch's."""
    gpu.needs_gpu()
    peers = [known(True).by_name[name]() for name in (OURS, "torch")]
    with display.steps(accuracies.gpu_steps()) as step:
        found = list(accuracies.gpu_accuracy(peers, step))
    return _finding("gpu_accuracy", {"rows": [each.to_json() for each in found]}, options, display)


def _finding(name: str, found: Mapping[str, Any], options: Options, display: Display) -> dict[str, Any]:
    """A finding that is no row: recorded, and its tables shown."""
    record = recorded(name, found, options)
    display.show(tables(record))
    return record


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.2f}"


# By whether a GPU is measured, then by the name on the command line.
SPECIAL: Mapping[bool, Mapping[str, Benchmark]] = {
    False: {
        "accuracy": bench_accuracy,
        "footprint": bench_footprint,
        "models": bench_models,
        "overhead": bench_overhead,
        "peaks": bench_peaks,
        "published": bench_published,
        "quantized_models": bench_quantized_models,
    },
    True: {
        "accuracy": bench_gpu_accuracy,
        "overhead": bench_gpu_host,
        "peaks": bench_gpu_peaks,
        "published": bench_published,
    },
}

"""`fuseplan bench SUITE --target cuda`, and the same without the packages of the command line.

python -m fuseplan.bench.gpu_command SUITE [--peers torch,cudnn] [--only 3x3] [--results FOLDER] ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fuseplan.bench import gpu, results, table
from fuseplan.bench.gpu_host import host_costs
from fuseplan.bench.peers.gpu import USUAL, gpu_peers_of
from fuseplan.bench.results import Row
from fuseplan.bench.suite import chosen, load
from fuseplan.errors import ArgumentError, FuseplanError
from fuseplan.measure.clock import GPU_PROTOCOL, GpuClock
from fuseplan.measure.machine import gpu_machine
from fuseplan.measure.peaks import measured_gpu_peaks
from fuseplan.measure.versions import commit, gpu_versions
from fuseplan.report.published import charts

LIBRARIES = ",".join(USUAL)
PUBLISHED_LIBRARIES = "fuseplan,unfused,cudnn,cublaslt,torch.compile"
CHARTS = Path("docs/charts")
HOST, PEAKS = "gpu_overhead", "gpu_peaks"  # files of results of one line a run


@dataclass(frozen=True)
class GpuOptions:
    """What a benchmark on a GPU takes.

    Attributes:
        libraries: peers, comma-separated, each in all its forms; `fuseplan` is ours.
        rounds, block_ms: blocks a variant gets, and how long one lasts.
        only: measure the cases whose name or group contains this text; `a & b` wants both.
        run: the stamp of the run, so that several commands count as one.
        is_host: also time the host, and CUDA graphs.
        folder: where results are appended; None appends none.
        as_json: print JSON in place of tables.
        device: the GPU's index.
        commit: what rows say was measured, where the checkout cannot tell.
    """

    libraries: str = LIBRARIES
    rounds: int = 7
    block_ms: float = 10.0
    only: str = ""
    run: str = ""
    is_host: bool = False
    folder: Path | None = results.FOLDER
    as_json: bool = False
    device: int = 0
    commit: str = ""


def bench_gpu(
    name: str, options: GpuOptions, show: Callable[[str], object], progress: Callable[[str], object]
) -> list[Row]:
    """Measures a suite on a GPU, shows its tables, and appends its rows as they come.

    Args:
        name: the suite's.
        options: how.
        show: takes Markdown.
        progress: takes a line when a step begins.

    Raises:
        ArgumentError: there is no such suite or peer, no case of that name, or results cannot be written.
    """
    suite = chosen(load(name), options.only)
    protocol = replace(GPU_PROTOCOL, rounds=options.rounds, block_seconds=options.block_ms / 1e3)
    peers = gpu_peers_of(options.libraries)
    setting = gpu.GpuSetting(
        peers, protocol, options.device, run=options.run, is_host=options.is_host, commit=options.commit
    )
    rows: list[Row] = []
    for done in gpu.run(suite, setting, progress):
        if options.folder is not None:
            results.append(done, suite.name, options.folder)
        rows += done
    if options.as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    else:
        show(f"{suite.title}: {gpu_machine(options.device).gpu}\n\n{table.markdown(suite, rows)}")
    return rows


def bench_gpu_published(options: GpuOptions, show: Callable[[str], object]) -> list[Row]:
    """MIOpen's published shapes; with results, also the charts of all that was recorded."""
    if options.libraries == LIBRARIES:
        options = replace(options, libraries=PUBLISHED_LIBRARIES)
    rows = bench_gpu("published_cuda", options, show, lambda what: None)
    draw_published(options.folder, show)
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


def bench_gpu_host(options: GpuOptions, show: Callable[[str], object]) -> dict[str, Any]:
    """What calling and loading plans costs the host; shown, and appended to the results."""
    gpu.needs_gpu()
    costs = host_costs(chosen(load(HOST), options.only), GpuClock(options.device))
    lines = [["what", "us a call, median", "least"], ["---"] * 3]
    for each in costs["calls"]:
        lines.append([each["what"], *_scaled(each, 1e6)])
    lines += [[], ["plan, loaded in a new process", "ms, median", "least"], ["---"] * 3]
    for each in costs["loads"]:
        lines.append([f"`{each['plan']}`", *_scaled(each, 1e3)])
    show("".join("| " + " | ".join(line) + " |\n" if line else "\n" for line in lines))
    return _recorded(HOST, costs, options)


def bench_gpu_peaks(options: GpuOptions, show: Callable[[str], object]) -> dict[str, Any]:
    """The most that this GPU does, measured now, shown, and appended to the results."""
    gpu.needs_gpu()
    found, disturbance = measured_gpu_peaks(gpu_machine(options.device).gpu, options.device)
    lines = [f"| {name} | {rate / 1e12:.1f} |\n" for name, rate in found.flops.items()]
    show("| product of | TFLOP/s |\n| --- | --- |\n" + "".join(lines))
    show(f"Copy: {found.bytes_a_second['dram'] / 1e9:.0f} GB/s, read and written.")
    if disturbance:
        show(f"These figures are not kept: {disturbance}.")
    return _recorded(PEAKS, {**found.to_json(), "disturbance": disturbance}, options)


def _scaled(told: Mapping[str, Any], scale: float) -> list[str]:
    if "refused" in told:
        return [told["refused"], ""]
    return [f"{told[name] * scale:.2f}" for name in ("median", "least")]


def _recorded(name: str, found: Mapping[str, Any], options: GpuOptions) -> dict[str, Any]:
    """The finding with its stamp, appended to the results."""
    stamped = {
        "benchmark": name,
        **found,
        "run": options.run or datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": gpu_machine(options.device).to_json(),
        "versions": gpu_versions(),
        "commit": options.commit or commit(),
    }
    if options.folder is not None:
        results.append_json([stamped], name, options.folder)
    if options.as_json:
        print(json.dumps(stamped, indent=1))
    return stamped


def main(words: Sequence[str] | None = None) -> int:
    """Runs one suite; the exit status is 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="python -m fuseplan.bench.gpu_command")
    parser.add_argument("suite")
    parser.add_argument(
        "--peers", default=LIBRARIES, help="names with commas between them; fuseplan is this library"
    )
    parser.add_argument("--rounds", type=int, default=GpuOptions.rounds)
    parser.add_argument("--block-ms", type=float, default=GpuOptions.block_ms)
    parser.add_argument(
        "--only",
        default="",
        help="measure the cases whose name or group contains this text; `a & b` wants both",
    )
    parser.add_argument("--run", default="", help="a name that several commands share as one run")
    parser.add_argument("--host", action="store_true", help="also time the host, and CUDA graphs")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder to append to")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--commit", default="", help="the commit of a copy of the sources without git")
    given = parser.parse_args(words)
    options = GpuOptions(
        given.peers, given.rounds, given.block_ms, given.only, given.run, given.host, given.results,
        device=given.device, commit=given.commit,
    )  # fmt: skip
    try:
        if given.suite in SPECIAL:
            SPECIAL[given.suite](options, print)
        else:
            bench_gpu(given.suite, options, print, lambda what: print(what, file=sys.stderr, flush=True))
    except FuseplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


# What is no suite, by its name on the command line.
SPECIAL: Mapping[str, Callable[[GpuOptions, Callable[[str], object]], object]] = {
    "overhead": bench_gpu_host,
    "peaks": bench_gpu_peaks,
    "published": bench_gpu_published,
}

if __name__ == "__main__":
    sys.exit(main())

"""What `fuseplan bench` runs: shows progress, prints tables, appends results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fuseplan.bench import accuracy as accuracies
from fuseplan.bench import results, runner, table
from fuseplan.bench.compile_time import compile_times
from fuseplan.bench.footprint import footprint
from fuseplan.bench.gpu_command import SPECIAL as GPU_SPECIAL
from fuseplan.bench.gpu_command import GpuOptions, bench_gpu, draw_published
from fuseplan.bench.peers import BY_NAME, peers_of
from fuseplan.bench.results import Row
from fuseplan.bench.suite import Suite, chosen, load
from fuseplan.cli.screen import Screen, progress
from fuseplan.errors import counted
from fuseplan.measure.clock import Protocol
from fuseplan.measure.machine import machine
from fuseplan.measure.peaks import KINDS_OF_TRAFFIC, measured_peaks
from fuseplan.measure.quiet import QUIET
from fuseplan.measure.versions import commit, versions

LIBRARIES = "onnxruntime,torch,torch.compile,ncnn,openvino"
PUBLISHED_LIBRARIES = "unfused,onnxruntime,torch.compile,openvino"
OURS, AGAIN, UNFUSED, STRICT = "fuseplan", "fuseplan:again", "fuseplan:unfused", "fuseplan:strict"


@dataclass(frozen=True)
class Options:
    """What all benchmarks take.

    Attributes:
        threads: thread counts, each a run of its own.
        libraries: peers, comma-separated; those that are not installed say so in their rows.
        rounds, block_ms: blocks a variant gets, and how long one lasts.
        is_cold: rotate buffers past the last cache.
        is_twice: measure ourselves twice, to see the noise.
        is_unfused: also run our operators one at a time.
        patience: seconds to wait, in all, for other programs to rest.
        folder: where results are appended; None appends none.
        as_json: print JSON in place of tables.
        only: cases whose name or group contains it; of `a & b`, both.
        is_quiet: show no progress.
    """

    threads: Sequence[int] = (1,)
    libraries: str = LIBRARIES
    rounds: int = 7
    block_ms: float = 40.0
    is_cold: bool = False
    is_twice: bool = False
    is_unfused: bool = False
    patience: float = 0.0
    folder: Path | None = results.FOLDER
    as_json: bool = False
    only: str = ""
    is_quiet: bool = False


def bench(name: str, options: Options) -> list[Row]:
    """Measures a suite beside its peers, prints its tables, and appends its rows as they come.

    Raises:
        ArgumentError: there is no such suite or peer, no case of that name, or results cannot be written.
    """
    suite = chosen(load(name), options.only)
    extra = [AGAIN] * options.is_twice + [UNFUSED] * options.is_unfused
    peers = [OURS, *extra, *peers_of(options.libraries)]
    screen = Screen(stderr=options.as_json)
    rows: list[Row] = []
    for threads in options.threads:
        protocol = Protocol(rounds=options.rounds, block_seconds=options.block_ms / 1e3)
        setting = runner.Setting(threads, peers, protocol, options.is_cold, options.patience)
        where = f"{machine().cpu}, {counted(threads, 'thread')}"
        screen.tell(f"{suite.title}: {where}; milliseconds")
        done = _run(suite, setting, options, screen)
        if not options.as_json:
            screen.show(table.markdown(suite, done))
            screen.tell(_disturbed(done))
        rows += done
    if options.as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    return rows


def _disturbed(rows: Sequence[Row]) -> str:
    """That other programs used the processors, where they did; else nothing."""
    share = max((row.others for row in rows if row.others is not None), default=0.0)
    if share <= QUIET:
        return ""
    return (
        f"The times are unreliable: other programs used up to {share:.0%} of the processors meanwhile. "
        "--patience 60 waits for them to rest."
    )


def bench_published(options: Options) -> list[Row]:
    """MIOpen's published shapes on the CPU; with results, also the charts of all that was recorded."""
    rows = bench("published_cpu", options)
    draw_published(options.folder, Screen(stderr=options.as_json).show)
    return rows


def bench_on_gpu(name: str, options: GpuOptions) -> None:
    """A suite, `overhead` or `peaks` on this machine's GPU.

    Raises:
        ArgumentError: as `bench`; or torch is not installed, or finds no GPU.
    """
    screen = Screen(stderr=options.as_json)

    def show(text: str) -> None:
        if not options.as_json:
            screen.show(text)

    with screen.status("starting") as status:
        if name in GPU_SPECIAL:
            GPU_SPECIAL[name](options, show)
        else:
            bench_gpu(name, options, show, status.update)


def _run(suite: Suite, setting: runner.Setting, options: Options, screen: Screen) -> list[Row]:
    rows: list[Row] = []
    with progress(screen, len(suite.cases) * runner.steps(setting), is_shown=not options.is_quiet) as step:
        for done in runner.run(suite, setting, step):
            if options.folder is not None:
                results.append(done, suite.name, options.folder)
            rows += done
    return rows


def bench_compile(name: str, options: Options) -> dict[str, Any]:
    """Cold and cached compile times over a suite."""
    suite = chosen(load(name), options.only)
    screen = Screen(stderr=options.as_json)
    with progress(screen, 2, is_shown=not options.is_quiet) as step:
        found = compile_times(suite, step)
    lines = [["shape", "cold ms", "cached ms"], ["---"] * 3]
    for row in found.rows:
        lines.append([row.case, _ms(row.cold), _ms(row.cached)])
    lines.append(["median", _ms(found.cold), _ms(found.cached)])
    _show(screen, options, lines, f"The first compile of a process takes {_ms(found.first)} ms more.")
    return _told(f"compile-{name}", found.to_json(), options)


def bench_overhead(options: Options) -> list[Row]:
    """What calling a bound plan costs, in microseconds, beside the same plan in the peers."""
    suite = chosen(load("overhead"), options.only)
    peers = [OURS, *peers_of(options.libraries)]
    screen = Screen(stderr=options.as_json)
    rows: list[Row] = []
    for threads in options.threads:
        protocol = Protocol(rounds=options.rounds, block_seconds=options.block_ms / 1e3)
        rows += _run(suite, runner.Setting(threads, peers, protocol), options, screen)
    lines = [["plan", "threads", "peer", "us a call, median", "least"], ["---"] * 5]
    for row in rows:
        times = [_us(row.median), _us(row.minimum)] if row.median else [row.refused or "", ""]
        lines.append([row.case, str(row.threads), row.peer, *times])
    _show(screen, options, lines)
    if options.as_json:
        print(json.dumps([row.to_json() for row in rows], indent=1))
    return rows


def bench_footprint(options: Options) -> dict[str, Any]:
    """Seconds to import fuseplan, and bytes of what it needs."""
    screen = Screen(stderr=options.as_json)
    with screen.status("starting processes"):
        found = footprint()
    lines = [["what", "is"], ["---"] * 2]
    lines.append(["import numpy", f"{_ms(found.numpy_import)} ms"])
    lines.append(["import fuseplan after it", f"{_ms(found.own_import)} ms"])
    lines.append(["heavy packages that it imports", ", ".join(found.brought) or "none"])
    for package, nbytes in found.installed.items():
        lines.append([f"{package}, installed", f"{nbytes / 1e6:.1f} MB"])
    lines.append(["all of it", f"{found.total / 1e6:.1f} MB"])
    _show(screen, options, lines)
    return _told("footprint", found.to_json(), options)


def bench_peaks(options: Options) -> list[dict[str, Any]]:
    """The most this machine does, measured now, for each thread count."""
    screen = Screen(stderr=options.as_json)
    found = []
    for threads in options.threads:
        with screen.status(f"measuring {counted(threads, 'thread')}"):
            found.append(measured_peaks(threads, options.patience))
    lines = [["threads", "f32 GFLOP/s", "level", *KINDS_OF_TRAFFIC], ["---"] * 6]
    for each, _ in found:
        for level, rates in each.bytes_a_second.items():
            told = [f"{rates[kind] / 1e9:.1f}" for kind in KINDS_OF_TRAFFIC]
            lines.append([str(each.threads), f"{each.flops / 1e9:.1f}", level, *told])
    notes = ["GB/s, bytes read and bytes written both counted; best of many launches."]
    notes += [
        f"{counted(each.threads, 'thread')}: not kept, since {why}." for each, why in found if why is not None
    ]
    _show(screen, options, lines, "\n\n".join(notes))
    return [_told("peaks", {**each.to_json(), "disturbance": why}, options) for each, why in found]


def bench_accuracy(options: Options) -> dict[str, Any]:
    """How far results are from float64, ours beside each peer's."""
    suite = load("accuracy")
    # torch.compile computes what torch does: it would add minutes and no row that differs.
    libraries = ",".join(word for word in options.libraries.split(",") if word != "torch.compile")
    peers = [OURS, STRICT, *peers_of(libraries)]
    screen = Screen(stderr=options.as_json)
    with progress(screen, accuracies.steps(suite), is_shown=not options.is_quiet) as step:
        found = list(accuracies.accuracy(suite, peers, options.threads[0], step))
    _print(screen, options, accuracies.markdown(found))
    return _told("accuracy", {"rows": [each.to_json() for each in found]}, options)


def _told(name: str, found: dict[str, Any], options: Options) -> dict[str, Any]:
    """The finding with its stamp, appended to the results."""
    packages = [package for peer in BY_NAME.values() for package in peer.packages]
    stamp = {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine().to_json(),
        "versions": versions(*packages),
        "commit": commit(),
    }
    stamped = {"benchmark": name, **found, **stamp}
    if options.folder is not None:
        results.append_json([stamped], name, options.folder)
    if options.as_json:
        print(json.dumps(stamped, indent=1))
    return stamped


def _show(screen: Screen, options: Options, lines: Sequence[Sequence[str]], note: str = "") -> None:
    written = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    _print(screen, options, written + (f"\n{note}\n" if note else ""))


def _print(screen: Screen, options: Options, markdown: str) -> None:
    if not options.as_json:
        screen.show(markdown)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.2f}"

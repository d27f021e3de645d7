"""Measures a suite, on the CPU or a GPU: shows progress and tables, appends results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fuseplan.bench import gpu, results, runner, table
from fuseplan.bench.peers import BY_NAME, peers_of
from fuseplan.bench.peers.gpu import USUAL, gpu_peers_of
from fuseplan.bench.results import Row
from fuseplan.bench.setting import Setting, now
from fuseplan.bench.suite import Suite, chosen, load
from fuseplan.errors import counted
from fuseplan.measure.clock import GPU_PROTOCOL, Protocol
from fuseplan.measure.machine import gpu_machine, machine
from fuseplan.measure.quiet import QUIET
from fuseplan.measure.versions import commit, gpu_versions, versions

LIBRARIES = "onnxruntime,torch,torch.compile,ncnn,openvino"
GPU_LIBRARIES = ",".join(USUAL)
OURS, AGAIN, UNFUSED = "fuseplan", "fuseplan:again", "fuseplan:unfused"


@dataclass(frozen=True)
class Options:
    """What all benchmarks take.

    Attributes:
        is_on_gpu: measure on a GPU.
        libraries: peers, comma-separated; those that are not installed say so in their rows. On a GPU each in
            all its forms, and `fuseplan` is ours. The usual ones for None.
        rounds, block_ms: blocks a variant gets, and how long one lasts; the protocol's own unless given.
        only: cases whose name or group contains it; of `a & b`, both.
        folder: where results are appended; None appends none.
        as_json: print JSON in place of tables.
        run: the stamp of the run, so that several commands count as one.
        commit: what rows say was measured, where the checkout cannot tell.
        patience: on a CPU, seconds to wait, in all, for other programs to rest.
        threads: on a CPU, thread counts, each a run of its own.
        is_cold: on a CPU, rotate buffers past the last cache.
        is_twice: on a CPU, measure ourselves twice, to see the noise.
        is_unfused: on a CPU, also run our operators one at a time.
        is_host: on a GPU, also time the host, and CUDA graphs.
        device: the GPU's index.
    """

    is_on_gpu: bool = False
    libraries: str | None = None
    rounds: int = 7
    block_ms: float = 0.0
    only: str = ""
    folder: Path | None = results.FOLDER
    as_json: bool = False
    run: str = ""
    commit: str = ""
    patience: float = 0.0
    threads: Sequence[int] = (1,)
    is_cold: bool = False
    is_twice: bool = False
    is_unfused: bool = False
    is_host: bool = False
    device: int = 0

    @property
    def protocol(self) -> Protocol:
        """How long and how often to measure."""
        usual = GPU_PROTOCOL if self.is_on_gpu else Protocol()
        seconds = self.block_ms / 1e3 or usual.block_seconds
        return replace(usual, rounds=self.rounds, block_seconds=seconds)

    @property
    def peers(self) -> list[str]:
        """Names of all that is measured, in order.

        Raises:
            ArgumentError: there is no such peer.
        """
        if self.is_on_gpu:
            return gpu_peers_of(GPU_LIBRARIES if self.libraries is None else self.libraries)
        extra = [AGAIN] * self.is_twice + [UNFUSED] * self.is_unfused
        return [OURS, *extra, *peers_of(LIBRARIES if self.libraries is None else self.libraries)]

    @property
    def settings(self) -> list[Setting]:
        """How to run a suite, a run each."""
        usual = Setting(
            threads=1, peers=self.peers, protocol=self.protocol, is_cold=self.is_cold, patience=self.patience,
            run=self.run, commit=self.commit, is_host=self.is_host, device=self.device,
        )  # fmt: skip
        return [replace(usual, threads=count) for count in ((1,) if self.is_on_gpu else self.threads)]


Step = Callable[[str], object]


@dataclass(frozen=True)
class Display:
    """Where a benchmark tells what it does.

    Attributes:
        show: takes tables and paragraphs in Markdown; nothing is shown where JSON is printed.
        tell: takes a line.
        steps: makes progress of so many steps, of None where their number is not known; a step takes a line.
    """

    show: Callable[[str], object]
    tell: Callable[[str], object]
    steps: Callable[[int | None], AbstractContextManager[Step]]


def plain(as_json: bool = False) -> Display:
    """Lines without a terminal's bars; on the standard error stream where JSON is printed."""
    place = sys.stderr if as_json else sys.stdout
    tell, step = (partial(print, file=each, flush=True) for each in (place, sys.stderr))
    return Display((lambda _: None) if as_json else tell, tell, lambda _: nullcontext(step))


def bench(name: str, options: Options, display: Display | None = None) -> list[Row]:
    """Measures a suite beside its peers, shows its tables, and appends its rows as they come.

    Raises:
        ArgumentError: there is no such suite or peer, no case of that name, or results cannot be written; on
            a GPU, torch is not installed, or finds no GPU.
    """
    suite, display = chosen(load(name), options.only), display or plain(options.as_json)
    rows: list[Row] = []
    for setting in options.settings:
        display.tell(f"{suite.title}: {where(options, setting)}")
        done = measured(suite, setting, options, display)
        display.show(table.markdown(suite, done))
        display.show(_disturbed(done))
        rows += done
    printed([row.to_json() for row in rows], options)
    return rows


def where(options: Options, setting: Setting) -> str:
    """The machine, and the unit of its tables.

    Raises:
        ArgumentError: it is a GPU, and torch is not installed, or finds none.
    """
    if options.is_on_gpu:
        gpu.needs_gpu()
        return f"{gpu_machine(options.device).gpu}; microseconds"
    return f"{machine().cpu}, {counted(setting.threads, 'thread')}; milliseconds"


def measured(suite: Suite, setting: Setting, options: Options, display: Display) -> list[Row]:
    """The rows of one run, appended to the results as they come."""
    run = gpu.run if options.is_on_gpu else runner.run
    total = None if options.is_on_gpu else len(suite.cases) * runner.steps(setting)
    rows: list[Row] = []
    with display.steps(total) as step:
        for done in run(suite, setting, step):
            if options.folder is not None:
                results.append(done, suite.name, options.folder)
            rows += done
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


def recorded(name: str, found: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """A finding that is no row, with its stamp: appended to the results, and printed where JSON is."""
    packages = [package for peer in BY_NAME.values() for package in peer.packages]
    stamped = {
        "benchmark": name,
        **found,
        "run": options.run or now(),
        "machine": (gpu_machine(options.device) if options.is_on_gpu else machine()).to_json(),
        "versions": gpu_versions() if options.is_on_gpu else versions(*packages),
        "commit": options.commit or commit(),
    }
    if options.folder is not None:
        results.append_json([stamped], name, options.folder)
    printed(stamped, options)
    return stamped


def printed(told: Any, options: Options) -> None:
    """Prints JSON, where that is wanted."""
    if options.as_json:
        print(json.dumps(told, indent=1))

"""docs/measured.md, written from recorded results: `python -m benchmarks.report.measured RESULTS PAGE`.

Of each benchmark, machine and thread count it shows the last run. Its last section lists the numbers that
comments cite.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import recorded as results
from benchmarks import suite
from benchmarks.drawn import NAMED
from benchmarks.report import gpu, versions
from benchmarks.report.facts import facts
from benchmarks.report.records import COMPILE, OF_MODELS, SECTIONS, peaks, section
from benchmarks.standings import markdown
from fuseplan.bench.results import Row
from fuseplan.bench.table import is_on_gpu
from fuseplan.errors import counted
from fuseplan.measure.clock import AHEAD, FLUSH_BYTES, GPU_PROTOCOL, SHORTEST_SAMPLE, Protocol

WRITTEN = "<!-- Written by `make docs` from benchmarks/results: measure again, do not edit. -->"
SINGLE = ("peaks", *SECTIONS)  # records of one line a run
PUBLISHED = "published_"  # have a page of their own

Record = Mapping[str, Any]
Lines = Iterator[str]


def page(folder: Path) -> str:
    """The page, from every file of results in a folder."""
    rows: list[Row] = []
    records: list[Record] = []
    for place in sorted(folder.glob("*.jsonl")):
        if place.stem.startswith(PUBLISHED) or place.name == versions.FILE:
            continue
        if place.stem in SINGLE or place.stem.startswith(COMPILE):
            records += [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        else:
            rows += results.read(place)
    told = [*_machines(rows, _last(records)), *facts(folder.parent / "facts.toml")]
    return "\n".join([WRITTEN, "", "# Measured", "", _protocol(), *told]) + "\n"


PROTOCOL = """\
`fuseplan bench SUITE` measures. Each line of `benchmarks/results` is one measurement, with its machine,
versions and commit.

- Each library runs in its own process, with the same data and thread count, in its fastest form. Weights
  are bound and outputs allocated beforehand.
- Data is random, normally distributed unless a table says otherwise. Each result is compared with float64
  before it is timed. A wrong result is reported and not timed.
- Libraries take turns in blocks of {milliseconds:.0f} ms, {rounds} rounds unless a table says otherwise.
  The order rotates from round to round. The first call of a block is not timed. A sample is one call, or
  the mean of as many calls as last {microseconds:.0f} us.
- A time is the median of the blocks' medians. The spread is the distance between the quartiles of the
  blocks' medians, divided by the time. The share of the machine that other programs used is recorded.
- Each call uses the same buffers; with `--cold`, buffers are rotated past the last cache. `--twice`
  measures fuseplan twice, which shows the noise.
- A plan with channels last is compared with all libraries, each in its preferred layout. A plan with
  channels first is compared with the libraries that take channels first.
- [Published](published.md) has MIOpen's published shapes.
- The floor is the least time that this machine's measured peaks allow for the arithmetic and the bytes.
  The error is the largest deviation from float64, divided by the largest output.

On a GPU (`--target cuda`) all libraries run in one process. A time lies between two CUDA events around a
call. A buffer of {flushed} MB is overwritten before each call, so the L2 cache holds none of the call's
tensors. The host is ahead of the GPU by {ahead} such writes, and by more if a call takes the host longer.
Blocks last {gpu_milliseconds:.0f} ms. Before commit 20e7018 the host was ahead by {ahead} writes for
every call. A call of `torch.compile` may take the host longer than a write takes the GPU, about 90 us, so
earlier times may include some host time.

- `torch` is eager PyTorch. `torch:steps` is eager PyTorch with one call per operator of the plan.
  `torch.compile` is max-autotune with frozen weights and without CUDA graphs; its candidates run in a
  separate process, which some of them crash. `torch.compile:default` is the default mode.
- For batch norm in training, `torch` runs the functions of its layers and of their gradients, with cuDNN
  where they choose it and relu in place; in the backward pass, relu's gradient reads relu's output.
  `torch.compile` compiles one function of the same operators, which recomputes relu's argument. No
  element lies so near the edge of relu that rounding decides its gradient. All results are checked,
  statistics and gradients included.
- `cudnn` is `torch.cudnn_convolution_relu`, or its form with a residual. `cudnn:folded` has the
  statistics of the normalization folded into its weights beforehand. `cublaslt` is
  `torch._addmm_activation`. A name that ends in `:nhwc` has channels last.
- All libraries compute f32 without TF32. The floor is the rate of torch's copy and of torch's matrix
  products; in f32 the floor allows three products in TF32. If statistics need several passes over the
  data, the floor counts the bytes of each pass; tensors that fit the L2 cache can be faster than the
  floor."""


def _protocol() -> str:
    usual = Protocol()
    return PROTOCOL.format(
        milliseconds=usual.block_seconds * 1e3,
        rounds=usual.rounds,
        microseconds=SHORTEST_SAMPLE * 1e6,
        flushed=FLUSH_BYTES >> 20,
        ahead=AHEAD,
        gpu_milliseconds=GPU_PROTOCOL.block_seconds * 1e3,
    )


def _last(records: Iterable[Record]) -> list[Record]:
    """Of each benchmark, machine and thread count, the last record; of models, the last row of each."""
    listed = list(records)
    models = [
        results.last_of_models(each for each in listed if each["benchmark"] == name) for name in OF_MODELS
    ]
    found: dict[tuple[str, str, object], Record] = {}
    for record in (*(each for each in listed if each["benchmark"] not in OF_MODELS), *chain(*models)):
        key = (record["benchmark"], results.name_of(record["machine"]), record.get("threads"))
        if key not in found or record["run"] >= found[key]["run"]:
            found[key] = record
    return list(found.values())


def _machines(rows: Sequence[Row], records: Sequence[Record]) -> Lines:
    stamps = [row.machine for row in rows] + [dict(record["machine"]) for record in records]
    for name in dict.fromkeys(map(results.name_of, stamps)):
        yield from ("", f"## {name}")
        mine = [record for record in records if results.name_of(record["machine"]) == name]
        yield from _peaks([record for record in mine if record["benchmark"] == "peaks"])
        yield from _suites([row for row in rows if results.name_of(row.machine) == name])
        for record in (each for each in mine if each["benchmark"] != "peaks"):
            yield from section(record, _stamp(record))


def _stamp(told: Record) -> str:
    return _stamped(told["run"], f"commit {told['commit'] or 'unknown'}", told["versions"])


def _stamped(run: str, commits: str, versions: Mapping[str, str]) -> str:
    return f"{run[:10]}, {commits}; {', '.join(map(' '.join, versions.items()))}."


def _peaks(records: Sequence[Record]) -> Lines:
    if records:
        yield from (
            "",
            "### Peaks",
            "",
            "f32 operations per second, and bytes read and written per second.",
            "",
        )
        yield from peaks(records)


def _suites(rows: Sequence[Row]) -> Lines:
    runs: dict[tuple[str, int, bool], list[Row]] = {}
    for row in results.latest(rows):
        runs.setdefault((row.suite, row.threads, row.copies > 1), []).append(row)
    for (name, threads, is_cold), listed in sorted(runs.items()):
        found = suite.load(name)
        places = {case.plan: place for place, case in enumerate(found.cases)}
        if NAMED.fullmatch(name):  # what was drawn is told even where a suite's cases have changed since
            places |= {row.plan: len(places) for row in listed if row.plan not in places}
        shown = sorted((row for row in listed if row.plan in places), key=lambda row: places[row.plan])
        if shown and is_on_gpu(shown[0]):
            yield from gpu.suite_section(found, shown, _runs(shown))
        elif shown:
            how, option = (", out of the caches", " --cold") if is_cold else ("", "")
            yield from ("", f"### {found.title}, {counted(threads, 'thread')}{how}", "")
            yield f"`fuseplan bench {name} --threads {threads}{option}`; milliseconds. {_runs(shown)}"
            yield ""
            yield markdown(found, shown).rstrip()


def _runs(rows: Sequence[Row]) -> str:
    """When and with what the rows were measured, and how quiet the machine was."""
    versions = {name: version for row in rows for name, version in row.versions.items()}
    told = _stamped(max(row.run for row in rows), results.commits(rows), versions)
    shares = [row.others for row in rows if row.others is not None]
    quiet = f" Other programs used {sum(shares) / len(shares):.0%} of the machine." if shares else ""
    return told + quiet


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(Path(sys.argv[1])), encoding="utf-8")

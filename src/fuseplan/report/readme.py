"""The README's table of speed, from recorded results: `python -m fuseplan.report.readme RESULTS README`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuseplan.bench import results, suite
from fuseplan.bench.results import OURS, Row
from fuseplan.bench.suite import Aim, Suite
from fuseplan.bench.table import is_on_gpu, lines, standings
from fuseplan.errors import counted
from fuseplan.report.docstrings import between, table

BEGIN, END = "<!-- speed: written by `make docs` -->", "<!-- end of speed -->"
ON_GPUS = """\
On a GPU, its second cache cold. `cudnn` is its fused convolution, `cublaslt` its epilogues, `torch` eager
PyTorch, `torch:steps` that an operator at a time, `unfused` the fastest of others' separate kernels."""
BEHIND = "shapes slower than the fastest other"
OF_OURS = ("floor", f"{OURS}:")  # what aims are against besides other libraries: docs/measured.md has them
SUITES = {
    "conv_nhwc": "{}, channels last",
    "conv_nchw": "{}, channels first",
    "norm": "batch_norm + relu, {}",
    "train": "batch_norm in training + relu, {}",
}


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
    """A row a group of shapes and who it is compared with, a column a GPU; empty where none was measured."""
    measured = [place.stem for place in sorted(folder.glob("*.jsonl")) if place.stem in suite.names()]
    found = [each for name in measured if (each := suite.load(name)).aims]
    rows = {
        each.name: [
            row for row in results.latest(results.read(folder / f"{each.name}.jsonl")) if is_on_gpu(row)
        ]
        for each in found
    }
    gpus = sorted({str(row.machine["gpu"]) for listed in rows.values() for row in listed})
    cells = [cell for each in found for cell in _gpu_cells(each, rows[each.name], gpus)]
    every = [row for listed in rows.values() for row in listed]
    behind = [_behind([row for row in every if row.machine["gpu"] == gpu]) for gpu in gpus]
    return "\n".join(table(["", "against", *gpus], [*cells, [BEHIND, "all", *behind]])) if cells else ""


def _on_gpus(folder: Path) -> str:
    told = gpu_summary(folder)
    return f"{ON_GPUS}\n\n{told}" if told else ""


def _gpu_cells(found: Suite, rows: Sequence[Row], gpus: Sequence[str]) -> Iterator[list[str]]:
    reached: dict[Aim, list[str]] = {}
    for place, gpu in enumerate(gpus):
        for each in standings(found, lines([row for row in rows if row.machine["gpu"] == gpu])):
            if each.aim.against.startswith(OF_OURS):
                continue
            cell = reached.setdefault(each.aim, [""] * len(gpus))
            cell[place] = f"{each.geomean:.2f} ({each.least:.2f})"
    for aim, cell in reached.items():
        yield [f"{found.title.split(' on a GPU')[0]}, {aim.group}", aim.against.replace(",", ", "), *cell]


def _machine(row: Row) -> tuple[str, int]:
    return str(row.machine["cpu"]), row.threads


def _behind(rows: Sequence[Row]) -> str:
    """On how many of the shapes another library is faster."""
    suites = dict.fromkeys(row.suite for row in rows)
    ratios = [line.ratio() for name in suites for line in lines([row for row in rows if row.suite == name])]
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


def rewritten(readme: str, folder: Path) -> str:
    """The README with the table between its marks made anew.

    Raises:
        ValueError: the marks are not there.
    """
    tables = (summary(folder), _on_gpus(folder))
    return between(readme, BEGIN, END, "\n\n".join(part for part in tables if part))


if __name__ == "__main__":
    place = Path(sys.argv[2])
    place.write_text(rewritten(place.read_text(encoding="utf-8"), Path(sys.argv[1])), encoding="utf-8")

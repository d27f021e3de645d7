"""The README's table of speed, from recorded results: `python -m fuseplan.report.readme RESULTS README`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fuseplan.bench import results, suite
from fuseplan.bench.results import Row
from fuseplan.bench.table import lines, standings
from fuseplan.report.docstrings import table

BEGIN, END = "<!-- speed: written by `make docs` -->", "<!-- end of speed -->"
SUITES = ("conv_nhwc", "conv_nchw", "norm")


def summary(folder: Path) -> str:
    """A row a group of shapes, a column a machine and thread count: geometric mean, and the least."""
    rows = [row for name in SUITES for row in results.latest(results.read(folder / f"{name}.jsonl"))]
    columns = sorted({(str(row.machine["cpu"]), row.threads) for row in rows if row.copies == 1})
    heads = [f"{_short(cpu)}, {threads} thread{'s' * (threads > 1)}" for cpu, threads in columns]
    cells = [_cells(rows, columns, name) for name in SUITES]
    return "\n".join(table(["", "against", *heads], [row for listed in cells for row in listed]))


def _short(cpu: str) -> str:
    return cpu.replace("(R)", "").replace(" Processor", "")


def _cells(rows: Sequence[Row], columns: Sequence[tuple[str, int]], name: str) -> Iterator[list[str]]:
    found = suite.load(name)
    order = {"conv_nhwc": ", channels last", "conv_nchw": ", channels first"}.get(name, "")
    reached: dict[tuple[str, str], list[str]] = {}
    for place, (cpu, threads) in enumerate(columns):
        mine = [row for row in rows if (row.suite, row.machine["cpu"], row.threads) == (name, cpu, threads)]
        for each in standings(found, lines(mine)):
            cell = reached.setdefault((each.aim.group, each.aim.against), [""] * len(columns))
            cell[place] = f"{each.geomean:.2f} ({each.least:.2f})"
    for (group, against), cell in reached.items():
        what = f"{group}{order}" if order else f"batch_norm + relu, {group}"
        yield [what, against, *cell]


def rewritten(readme: str, folder: Path) -> str:
    """The README with the table between its marks made anew.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"want the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{summary(folder)}\n\n{END}{after}"


if __name__ == "__main__":
    place = Path(sys.argv[2])
    place.write_text(rewritten(place.read_text(encoding="utf-8"), Path(sys.argv[1])), encoding="utf-8")

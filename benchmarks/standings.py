"""The tables of a suite: a row per shape, and each group beside its aim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.suite import Aim, Suite
from fuseplan.bench.results import Row
from fuseplan.bench.table import Line, cells, lines, refusals, shapes


@dataclass(frozen=True)
class Standing:
    """A group beside its aim."""

    aim: Aim
    shapes: int
    geomean: float
    least: float

    @property
    def is_reached(self) -> bool:
        """Whether the mean is reached, and the bound on each shape where the aim has one."""
        return self.geomean >= self.aim.geomean and self.least >= (self.aim.least or 0.0)


def markdown(suite: Suite, rows: Iterable[Row]) -> str:
    """Both tables as Markdown."""
    found = lines(rows)
    return "\n".join([*shapes(found), "", *_standings(standings(suite, found)), *refusals(found)]) + "\n"


def standings(suite: Suite, found: Sequence[Line]) -> list[Standing]:
    """Each aim of the suite beside what was reached; an aim without a measured shape is left out."""
    listed = []
    for aim in suite.aims:
        ratios = [line.ratio(aim.against) for line in found if aim.covers(line.group)]
        measured = [ratio for ratio in ratios if ratio is not None]
        if measured:
            listed.append(Standing(aim, len(measured), geometric_mean(measured), min(measured)))
    return listed


def _standings(found: Sequence[Standing]) -> Iterator[str]:
    if not found:
        return
    yield cells(["group", "against", "shapes", "geomean", "aim", "least", "aim", "reached"])
    yield cells(["---"] * 8)
    for standing in found:
        aim = standing.aim
        yield cells([
            aim.group,
            aim.against,
            str(standing.shapes),
            f"{standing.geomean:.2f}",
            f"{aim.geomean:.2f}",
            f"{standing.least:.2f}",
            "" if aim.least is None else f"{aim.least:.2f}",
            "yes" if standing.is_reached else "no",
        ])  # fmt: skip

"""The tables of a suite: a row per shape, and each group beside its aim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.suite import Aim, Suite
from fuseplan.bench.markdown import table
from fuseplan.bench.results import Row
from fuseplan.bench.table import Line, lines, refusals, shapes

ONE_IMAGE = "ncnn"  # the peer that the aims name apart: it takes one image at a time


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
        ratios = [ratio(line, aim.against) for line in found if aim.covers(line.group)]
        measured = [each for each in ratios if each is not None]
        if measured:
            listed.append(Standing(aim, len(measured), geometric_mean(measured), min(measured)))
    return listed


def ratio(line: Line, against: str) -> float | None:
    """The time that an aim is against over ours: above 1 we are ahead. None where either has no time.

    Against `floor` it is the least time this machine allows, against one of our own forms that form's, else
    that of the fastest peer which the aim is against.
    """
    if against == "floor":
        return line.over(line.ours.floor)
    forms = [row.median + (row.added or 0.0) for row in line.forms if row.peer == against and row.median]
    peers = [row.median for row in line.peers if row.median and counts(row, against)]
    return line.over(forms[0] if forms else min(peers, default=None))


def counts(row: Row, against: str) -> bool:
    """Whether an aim is against the peer: `torch` stands for all forms of torch, `torch:steps` for one."""
    base = row.peer.split(":")[0]
    if against in ("all", "others"):
        return against == "all" or base != ONE_IMAGE
    return bool({row.peer, base} & set(against.split(",")))


def _standings(found: Sequence[Standing]) -> Iterator[str]:
    if not found:
        return
    head = ("group", "against", "shapes", "geomean", "aim", "least", "aim", "reached")
    yield from table(head, map(_cells, found))


def _cells(standing: Standing) -> list[str]:
    aim = standing.aim
    return [
        aim.group,
        aim.against,
        str(standing.shapes),
        f"{standing.geomean:.2f}",
        f"{aim.geomean:.2f}",
        f"{standing.least:.2f}",
        "" if aim.least is None else f"{aim.least:.2f}",
        "yes" if standing.is_reached else "no",
    ]

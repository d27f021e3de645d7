"""The table of a benchmark, made from its result lines: a row per shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from fuseplan.bench.markdown import table
from fuseplan.bench.results import OURS, Row
from fuseplan.system.gathering import gathered


@dataclass(frozen=True)
class Line:
    """One shape: our row, those of our other forms, of comparable peers, and those that did not run."""

    case: str
    group: str
    ours: Row
    forms: tuple[Row, ...]
    peers: tuple[Row, ...]
    refused: tuple[Row, ...]

    @property
    def best(self) -> Row | None:
        """The fastest peer; None where none ran."""
        return min(self.peers, key=lambda row: row.median or inf, default=None)

    @property
    def ratio(self) -> float | None:
        """The fastest peer's median time over ours: above 1 we are ahead. None where either has no time."""
        return self.over(self.best.median if self.best else None)

    def over(self, other: float | None) -> float | None:
        """A time over ours; None where either is missing."""
        return None if other is None or not self.ours.median else other / self.ours.median


def is_comparable(row: Row) -> bool:
    """Whether a peer did the plan's own job.

    A plan that takes channels first is compared with peers that take channels first. One that takes channels
    last is compared with all, each in the layout it likes best: they are spared a conversion that we do not
    do either.
    """
    wants_last = "nhwc" in row.plan.split("]", 1)[0]
    return wants_last or not row.peer.endswith(":nhwc")


def lines(rows: Iterable[Row]) -> list[Line]:
    """One line a case, in the order of the rows; a case that we have no row for is left out."""
    cases = gathered(((row.case, row.plan), row) for row in rows)
    return [line for listed in cases.values() if (line := _line(listed)) is not None]


def _line(rows: Sequence[Row]) -> Line | None:
    ours = next((row for row in rows if row.peer == OURS), None)
    if ours is None:
        return None
    forms = tuple(row for row in rows if row.peer.startswith(f"{OURS}:"))
    others = [row for row in rows if not row.peer.startswith(OURS) and is_comparable(row)]
    timed = tuple(row for row in others if row.median)
    refused = tuple(row for row in (ours, *forms, *others) if not row.median)
    return Line(ours.case, ours.group, ours, forms, timed, refused)


def markdown(rows: Iterable[Row]) -> str:
    """The table as Markdown; medians in milliseconds, on a GPU in microseconds, there a table a group."""
    found = lines(rows)
    return "\n".join([*shapes(found), *refusals(found)]) + "\n"


def shapes(found: Sequence[Line]) -> Iterator[str]:
    """The lines of a table: a row per shape."""
    groups = list(dict.fromkeys(line.group for line in found))
    if len(groups) < 2 or not is_on_gpu(found[0].ours):
        yield from _shapes(found)
        return
    for place, group in enumerate(groups):
        yield from ("",) if place else ()
        yield from (f"**{group}**", "")
        yield from _shapes([line for line in found if line.group == group])


def is_on_gpu(row: Row) -> bool:
    """Whether it is the time of a GPU."""
    return "gpu" in row.machine


def _shapes(found: Sequence[Line]) -> Iterator[str]:
    names = list(dict.fromkeys(row.peer for line in found for row in line.peers))
    forms = list(dict.fromkeys(row.peer for line in found for row in line.forms))
    compared = [f"{name.split(':')[1]} / ours" for name in forms]
    figures = ["best peer / ours", *compared, "ours / floor", "error", "spread"]
    head = ["shape", "template", "ours", *names, *figures]
    yield from table(head, _cells(found, names, forms))


def _cells(found: Sequence[Line], names: Sequence[str], forms: Sequence[str]) -> Iterator[list[str]]:
    for line in found:
        shown = _microseconds if is_on_gpu(line.ours) else _milliseconds
        ours, times = line.ours, {row.peer: row.median for row in line.peers}
        ratio, best = line.ratio, line.best
        over_floor = ours.median / ours.floor if ours.median and ours.floor else None
        yield [
            line.case,
            ours.template or _first(ours.refused),
            shown(ours.median),
            *(shown(times.get(name)) for name in names),
            f"{ratio:.2f} ({best.peer})" if ratio and best else "",
            *(_over(line, name) for name in forms),
            f"{over_floor:.2f}" if over_floor else "",
            "" if ours.error is None else f"{ours.error:.1e}",
            "" if ours.spread is None else f"{ours.spread:.0%}",
        ]


def _over(line: Line, form: str) -> str:
    """The time of another form of ours over ours."""
    times = [row.median for row in line.forms if row.peer == form and row.median]
    return f"{times[0] / line.ours.median:.2f}" if times and line.ours.median else ""


def refusals(found: Sequence[Line]) -> Iterator[str]:
    """Which peer did not run which shapes, and why."""
    refused = ((row, line.case) for line in found for row in line.refused)
    reasons = gathered(((row.peer, _first(row.refused)), case) for row, case in refused)
    if reasons:
        yield ""
    for (peer, reason), cases in reasons.items():
        where = f"{len(cases)} shapes" if len(cases) > 1 else cases[0]
        yield f"- {peer} did not run {where}: {reason}"


def _first(told: str | None) -> str:
    """The first line of a refusal: what does not hold; tables have no room for why."""
    return (told or "").split("\n", 1)[0]


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.3f}" if seconds >= 1e-4 else f"{seconds * 1e3:.4f}"


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"

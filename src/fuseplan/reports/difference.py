"""Two reports on one model: fusions that are lost and new, and sites that are slower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fuseplan.messages.quantities import bytes_text, seconds_text
from fuseplan.reports.report import Printed, Report, SiteRow, listed

TOLERANCE = 0.1  # of a site's time: below it, sites are as fast as they were


@dataclass(frozen=True)
class Lost:
    """A fusion of the first report that the second one lacks.

    Attributes:
        plan: the site's plan in the first report.
        operators: those that it computes.
        now: their plans and reasons in the second report.
    """

    plan: str
    operators: tuple[str, ...]
    now: tuple[str, ...]


@dataclass(frozen=True)
class Slower:
    """A site of the same operators that takes longer.

    Attributes:
        plan: in the second report.
        operators: those that it computes.
        before, after: seconds.
    """

    plan: str
    operators: tuple[str, ...]
    before: float
    after: float


@dataclass(frozen=True)
class Difference(Printed):
    """The second report beside the first one.

    Attributes:
        lost: fusions that are no more.
        gained: new fusions: plan and operators.
        slower: sites that take longer.
        launches: of the first and of the second report.
        moved: bytes of the first and of the second report.
        unknown: operators that one report alone has.
    """

    derived = ("is_worse",)

    lost: tuple[Lost, ...]
    gained: tuple[Lost, ...]
    slower: tuple[Slower, ...]
    launches: tuple[int, int]
    moved: tuple[int, int]
    unknown: tuple[str, ...]

    @property
    def is_worse(self) -> bool:
        """Whether fusions are lost, or sites slower."""
        return bool(self.lost or self.slower)

    def lines(self) -> Iterator[str]:
        yield f"launches: {self.launches[0]} -> {self.launches[1]}"
        yield f"traffic: {bytes_text(self.moved[0])} -> {bytes_text(self.moved[1])}"
        for word, fusions, then in (("lost", self.lost, "now"), ("new", self.gained, "before")):
            for fusion in fusions:
                yield f"{word}: {fusion.plan}"
                yield f"    of {listed(fusion.operators)}"
                yield from (f"    {then} {each}" for each in fusion.now)
        for each in self.slower:
            yield f"slower: {each.plan}"
            yield f"    of {listed(each.operators)}"
            yield f"    {seconds_text(each.before)} -> {seconds_text(each.after)}"
        if self.unknown:
            yield f"in one report alone: {listed(self.unknown)}"
        if not (self.lost or self.gained or self.slower):
            yield "the same fusions"


def difference(first: Report, second: Report, tolerance: float = TOLERANCE) -> Difference:
    """Compares reports on one model, of two versions or settings.

    Args:
        first: the report of before; operators are told apart by their names.
        second: the report of now.
        tolerance: the share of a site's time by which it may take longer.
    """
    names = [{row.name for row in report.operators} for report in (first, second)]
    slower = filter(None, (_slower(site, first, tolerance) for site in second.sites))
    return Difference(
        tuple(_lost(first, second)),
        tuple(_lost(second, first)),
        tuple(slower),
        (first.launches.after, second.launches.after),
        (first.moved_after, second.moved_after),
        tuple(sorted(names[0] ^ names[1])),
    )


def _lost(first: Report, second: Report) -> Iterator[Lost]:
    """Sites of one report whose operators are not all in one site of the other."""
    wholes = [set(site.operators) for site in second.sites]
    rows = {row.name: row for row in second.operators}
    plans = {site.number: site.plan for site in second.sites}
    for site in first.sites:
        own = [rows[name] for name in site.operators if name in rows]
        if not own or any({row.name for row in own} <= whole for whole in wholes):
            continue
        now = {f"{row.name}: {row.state} [{row.code}]": None for row in own if row.state == "left"}
        now |= {plans[number]: None for row in own for number in row.sites}
        yield Lost(site.plan, site.operators, tuple(now))


def _slower(site: SiteRow, first: Report, tolerance: float) -> Slower | None:
    """The site beside that of the same operators, by times that both have: measured, else the model's."""
    old = next((each for each in first.sites if each.operators == site.operators), None)
    if old is None:
        return None
    before, after = (each.measured.seconds if each.measured else None for each in (old, site))
    if before is None or after is None:
        before, after = old.seconds, site.seconds
    is_slower = after > before * (1 + tolerance)
    return Slower(site.plan, site.operators, before, after) if is_slower else None

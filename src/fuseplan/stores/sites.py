"""Measured choices for the sites of whole models: a plan, or the framework's own operators.

A file in the cache folder holds one JSON object a line. A choice counts where the plan, the framework's
operators that it stands for, the machine and all versions are those that it was measured with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fuseplan.stores import journal

FILE = "sites.jsonl"


@dataclass(frozen=True)
class Key:
    """What a choice is stored by.

    Attributes:
        site: the plan as it was found, and the kinds of the framework's operators that it stands for.
        accuracy: as `fuseplan.compile` takes it.
        target: the kind of machine.
        processor: its name; of a CPU with the number of threads.
        versions: of fuseplan's sources, the toolchain and the framework.
    """

    site: str
    accuracy: str
    target: str
    processor: str
    versions: str


@dataclass(frozen=True)
class Measured(journal.Stored):
    """What was measured at a site.

    Attributes:
        key: what it is stored by.
        plan: the fastest plan that is right.
        peer: the framework and its version.
        error: the plan's largest distance from float64, over the largest value; None where not finite.
        allowed: the largest error that is right: twice the framework's own, and the bound of the kernel.
        date: when, in UTC.
        peer_error: of the framework's own operators; None where they were not run.
        seconds: medians by plan, of those that are right, and by `peer`.
        code: why the site is left to the framework; empty where the plan computes it.
        said: the evidence.
        disturbance: which other use of the machine makes the times unreliable; None where there was none.
    """

    key: Key
    plan: str
    peer: str
    error: float | None
    allowed: float
    date: str
    peer_error: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    code: str = ""
    said: str = ""
    disturbance: str | None = None

    @property
    def gain(self) -> float | None:
        """The time of the framework's own operators over the plan's; None where one was not timed."""
        own, ours = self.seconds.get(self.peer), self.seconds.get(self.plan)
        return None if own is None or ours is None else own / ours


KEPT = journal.Newest(FILE, Measured.from_json)


def keep(found: Measured) -> None:
    """Keeps a choice, unless it rests on disturbed times: the next start measures again."""
    if found.code or not found.disturbance:
        KEPT.keep(found)

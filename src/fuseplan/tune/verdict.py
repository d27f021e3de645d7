"""Whether fusing paid, measured: the fused kernel beside the unfused runs on the same machine.

Verdicts are kept in a file in the cache folder, one JSON object a line; `explain` shows the last one for its
plan, target and processor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fuseplan import cache
from fuseplan.measure.ground import Ground
from fuseplan.stages import Records
from fuseplan.tuned import processor_of

FILE = "verdicts.jsonl"
FUSED, UNFUSED = "fused", "one at a time"
ROUNDS = 7


@dataclass(frozen=True)
class Verdict:
    """What fusing a plan brought on one machine.

    Attributes:
        plan, target, processor: what was measured, and where.
        template: the choice that ran.
        fused: seconds of the fused kernel, median.
        others: seconds of each unfused run: fuseplan's own kernels one at a time, and the frameworks'.
        refused: runs that could not be measured, and why.
        kernels: how many kernels our own unfused run is.
        date: when, in UTC.
    """

    plan: str
    target: str
    processor: str
    template: str
    fused: float
    others: Mapping[str, float]
    refused: Mapping[str, str]
    kernels: int
    date: str

    @property
    def best_other(self) -> str | None:
        """The fastest unfused run; None where none could be measured."""
        return min(self.others, key=lambda name: self.others[name]) if self.others else None

    @property
    def speedup(self) -> float | None:
        """The fastest unfused run's time over the fused kernel's; None where there is no such run."""
        best = self.best_other
        return None if best is None else self.others[best] / self.fused

    @property
    def pays(self) -> bool | None:
        """Whether the fused kernel is at least as fast as every unfused run; None where there is none."""
        return None if self.speedup is None else self.speedup >= 1

    def to_json(self) -> dict[str, Any]:
        """The fields and what follows from them, as JSON values."""
        return {**asdict(self), "speedup": self.speedup, "pays": self.pays}

    def __str__(self) -> str:
        ranked = sorted(self.others.items(), key=lambda pair: pair[1])
        listed = [f"  {name}: {_us(seconds)}, {seconds / self.fused:.2f}x" for name, seconds in ranked]
        listed += [f"  {name}: not measured: {why}" for name, why in self.refused.items()]
        return "\n".join([f"{self._sentence()} ({self.processor}, {self.date})", *listed])

    def _sentence(self) -> str:
        if self.speedup is None:
            return f"the fused kernel takes {_us(self.fused)}; there was nothing to compare it with"
        if self.pays:
            return f"fusing pays: {_us(self.fused)}, {self.speedup:.2f} times as fast as {self.best_other}"
        return (
            f"fusing loses: {_us(self.fused)}, {self.best_other} is {1 / self.speedup:.2f} times as fast; "
            "run it unfused here, or look for a better choice with `fuseplan tune`"
        )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def judge(
    records: Records,
    ground: Ground,
    variants: Mapping[str, Callable[[], object]],
    refused: Mapping[str, str],
) -> Verdict:
    """Times the variants, of which `FUSED` is the fused kernel, and keeps the verdict.

    Args:
        records: of the fused plan.
        ground: its tensors.
        variants: by name: the fused kernel, `UNFUSED`, and each framework.
        refused: other runs, and why they are not among the variants.
    """
    taken = {name: timing.median for name, timing in ground.times(variants, ROUNDS).items()}
    verdict = Verdict(
        plan=str(records.plan),
        target=str(records.target),
        processor=processor_of(records.target),
        template=records.choice.template.text,
        fused=taken.pop(FUSED),
        others=taken,
        refused=dict(refused),
        kernels=len(records.plan),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    cache.append(FILE, json.dumps(verdict.to_json()))
    return verdict


def recorded(plan: str, target: str, processor: str) -> Verdict | None:
    """The last verdict on a plan on this kind of machine; None where there is none."""
    folder = cache.folder()
    if folder is None:
        return None
    found = None
    for told in _lines(folder / FILE):
        if (told.get("plan"), told.get("target"), told.get("processor")) == (plan, target, processor):
            found = told
    return None if found is None else _verdict(found)


def _lines(place: Path) -> list[dict[str, Any]]:
    """The objects in the file; a line that is none is passed over: it is only history."""
    try:
        lines = place.read_text().splitlines()
    except OSError:
        return []
    told = []
    for line in lines:
        try:
            told.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in told if isinstance(each, dict)]


def _verdict(told: dict[str, Any]) -> Verdict | None:
    own = {name: value for name, value in told.items() if name not in ("speedup", "pays")}
    try:
        return Verdict(**own)
    except TypeError:  # of another version
        return None

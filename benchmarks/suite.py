"""Benchmark suites: TOML files of plans by their text, in groups, with what we want to reach."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from benchmarks.drawn import FILE, NAMED, drawn
from benchmarks.shapes import published
from fuseplan.errors import ArgumentError, PlanError, did_you_mean
from fuseplan.measure.cases import Case, Cases, of_plan
from fuseplan.messages.excerpt import ARROW
from fuseplan.plans.plan import FusionPlan
from fuseplan.system import limits
from fuseplan.system.reading import bytes_of, record, text_of

FOLDER = Path(__file__).resolve().parent / "suites"
R = TypeVar("R")
UNFUSED = "unfused"  # peers that compute one operator at a time


def is_of(group: str, whole: str) -> bool:
    """Whether a group is that one, or a part of it: `f16, large` of `f16`."""
    return group == whole or group.startswith(f"{whole}, ")


@dataclass(frozen=True)
class Aim:
    """What a group should reach: the fastest peer's time over ours.

    Attributes:
        group: whose shapes are averaged; those of its parts, `group, part`, too.
        against: the peers that count: `all`, the `others` without ncnn, or their names with commas between
            them; `floor` is the least time that this machine allows.
        geomean: what the geometric mean over the group should be at least.
        least: what no single shape should fall below; None sets no such bound.
    """

    group: str
    against: str
    geomean: float
    least: float | None = None

    def covers(self, group: str) -> bool:
        """Whether a group's shapes count."""
        return is_of(group, self.group)


@dataclass(frozen=True)
class Suite(Cases):
    """A file of cases, with aims, and the peers that are measured unless others are asked for."""

    aims: tuple[Aim, ...]
    peers: str | None = None

    @property
    def file(self) -> str:
        """The name of the file that takes its results: one takes all draws of a suite."""
        found = NAMED.fullmatch(self.name)
        return f"{FILE}{found['suite']}" if found else self.name


@dataclass(frozen=True)
class _Written:
    """A suite as its file has it."""

    case: tuple[Case, ...]
    title: str = ""
    target: tuple[Aim, ...] = ()
    peers: str | None = None


def load(name: str) -> Suite:
    """The suite of that name, in that file, or of that one plan; of `NAME:COUNT:SEED`, random shapes of it.

    Raises:
        ArgumentError: there is no such suite, or its file is not one: the message says where and why.
        PlanError: the name has an arrow, and is no plan.
    """
    if ARROW in name:
        plan = of_plan(name)
        return Suite(plan.name, plan.title, plan.cases, ())
    if name in MADE:
        return MADE[name]()
    if found := NAMED.fullmatch(name):
        of, count, seed = load(found["suite"]), int(found["count"]), int(found["seed"])
        title = f"{of.title}: {count} random shapes of seed {seed}"
        return Suite(name, title, drawn(of.cases, count, seed), of.aims, of.peers)
    place = _find(name)
    try:
        return _read(place)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{place} is not a suite: {error}") from error


def chosen(suite: Suite, only: str) -> Suite:
    """The suite with the cases of the group `only`, or whose name or group contains it; of `a & b`, both.

    Raises:
        ArgumentError: there is none.
    """
    cases = suite.cases
    for word in (each.strip() for each in only.split("&")):
        exact = tuple(case for case in cases if is_of(case.group, word))
        cases = exact or tuple(case for case in cases if word in case.name or word in case.group)
    if not cases:
        raise ArgumentError(f"no case of the suite {suite.name} has {only!r} in its name or group")
    return Suite(suite.name, suite.title, cases, suite.aims, suite.peers)


def names() -> list[str]:
    """Every suite that `load` finds by name."""
    return sorted({*MADE, *(path.stem for path in FOLDER.glob("*.toml"))})


def _find(name: str) -> Path:
    for place in (Path(name), FOLDER / f"{name}.toml"):
        if place.suffix == ".toml" and os.path.isfile(place):  # pathlib's raises for a name that is too long
            return place
    raise ArgumentError(
        f"no suite is named {name!r}. {did_you_mean(name, names())}\n"
        "  A suite is one of benchmarks/suites, by its name, a FILE.toml of that form, or a plan in quotes"
    )


def _read(place: Path) -> Suite:
    return _checked(place.stem, read_toml(place, _Written))


@cache
def _checked(name: str, written: _Written) -> Suite:
    groups = {case.group for case in written.case}
    for number, case in enumerate(written.case):
        try:
            plan = FusionPlan.parse(case.plan)
            if case.gradients:
                plan.backward(case.gradients.split())
        except PlanError as error:
            raise ValueError(f"case[{number}], {case.name!r}, has no plan in 'plan': {error}") from error
    for aim in written.target:
        if not any(map(aim.covers, groups)):
            raise ValueError(f"the target of group {aim.group!r} against {aim.against!r} has no case")
    return Suite(name, written.title or name, written.case, written.target, written.peers)


def read_toml(place: Path, kind: type[R]) -> R:
    """The record in a TOML file that a command was given.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, no TOML, or a member is missing, unknown or of another type.
    """
    text = text_of(bytes_of(place, limits.TOML_BYTES))
    try:
        return record(kind, tomllib.loads(text))
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


# What the published shapes are measured in, and how many times faster than unfused they should be on average.
PUBLISHED_ON = {"cpu": (("f32", "nchw"), ("f32", "nhwc")), "cuda": (("f32", "nchw"), ("f16", "nhwc"))}
PUBLISHED_AIMS: Mapping[str, Mapping[str, float]] = {"cpu": {}, "cuda": {"CBA": 1.55, "NA": 2.38}}


@cache
def _published(kind: str) -> Suite:
    """MIOpen's published shapes, on `cpu` or `cuda`."""
    forms = PUBLISHED_ON[kind]
    cases = tuple(
        Case(
            each.name,
            str(FusionPlan.parse(each.plan(*form))),
            f"{each.combination}, {' '.join(form)}",
            f"MIOpen {each.combination}",
        )
        for form in forms
        for each in published()
    )
    aims = tuple(
        Aim(f"{combination}, {' '.join(form)}", UNFUSED, least_mean)
        for form in forms
        for combination, least_mean in PUBLISHED_AIMS[kind].items()
    )
    return Suite(f"published_{kind}", "MIOpen's published fusions, batch 64", cases, aims)


# Suites that no file lists: their shapes stand in one already.
MADE = {f"published_{kind}": partial(_published, kind) for kind in PUBLISHED_ON}

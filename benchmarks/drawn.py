"""Suites of random shapes, which nothing was tuned on: `fuseplan bench gpu_rows:20:7` has 20 of seed 7.

A shape is that of a case of the suite with another first and last axis. Extents are spread evenly over their
logarithms: the last axis between the shortest and the longest of the case's group, the first down to an
eighth of the case's elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from math import exp, log, prod
from random import Random

from fuseplan.errors import PlanError
from fuseplan.measure.cases import Case
from fuseplan.plans.plan import FusionPlan

FILE = "drawn-"  # with the suite's name: the file of all draws of a suite
STEPS = (2, 8, 64)  # a last axis is a multiple of one of them
ROWS, TRIES = 8, 4
NAMED = re.compile(r"(?P<suite>[^:]+):(?P<count>[1-9]\d*):(?P<seed>\d+)")


@cache
def drawn(cases: tuple[Case, ...], count: int, seed: int) -> tuple[Case, ...]:
    """Cases of random shapes, no plan twice, fewer where a suite has not as many; the same for a seed."""
    listed = {case.plan: case for case in islice(_draws(cases, Random(seed)), TRIES * count)}
    return tuple(listed.values())[:count]


def _draws(cases: Sequence[Case], draws: Random) -> Iterator[Case]:
    inputs = {each.plan: FusionPlan.parse(each.plan).src for each in cases}
    while True:
        case, step = draws.choice(cases), draws.choice(STEPS)
        src = inputs[case.plan]
        lasts = [inputs[each.plan].shape[-1] for each in cases if each.group == case.group]
        last = max(step, round(_between(draws, min(lasts), max(lasts)) / step) * step)
        most = src.size / (prod(src.shape[1:-1]) * last)
        shape = max(1, round(_between(draws, most / ROWS, most))), *src.shape[1:-1], last
        extents = "x".join(map(str, shape))
        try:
            plan = str(FusionPlan.parse(re.sub(r"\[[\dx]+", f"[{extents}", case.plan, count=1)))
        except PlanError:  # of operators that take some extents alone
            continue
        yield replace(case, name=extents, plan=plan)


def _between(draws: Random, least: float, most: float) -> float:
    return exp(draws.uniform(log(least), log(most)))

"""How long compiling takes: with an empty cache, and in a new process that finds the object code on disk."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import FuseplanError
from fuseplan.measure.cases import Case, Cases
from fuseplan.plans.plan import FusionPlan
from fuseplan.system.checkout import CHECKOUT
from fuseplan.system.child import python, python_environment

WARM_UP = "f32[1x8] -> relu"  # loads the toolchain, which a process does once


def compile_times(suite: Cases, progress: Callable[[str], object] = lambda _: None) -> dict[str, Any]:
    """Compiles every plan of a suite twice: each time all of them in one fresh process.

    Args:
        suite: the plans.
        progress: called with a line that says what is done, twice.

    Returns:
        JSON values. `rows`: for each case `case`, `plan`, seconds with an empty cache, `cold`, and in another
        process from the cache on disk, `cached`; or None for both, and `refused` says why. `cold` and
        `cached`: their medians. `first`: seconds that the first compile of a process takes besides.
    """
    plans = [case.plan for case in suite.cases]
    with tempfile.TemporaryDirectory(prefix="fuseplan-compile-") as folder:
        progress("compiling with an empty cache")
        cold, first = _in_a_process(plans, folder)
        progress("compiling again, from the cache")
        cached, _ = _in_a_process(plans, folder)
    rows = [_row(*each) for each in zip(suite.cases, cold, cached, strict=True)]
    medians = {
        name: statistics.median(row[name] for row in rows if row[name] is not None)
        for name in ("cold", "cached")
    }
    return {"rows": rows, **medians, "first": first}


def _row(case: Case, cold: float | str, cached: float | str) -> dict[str, Any]:
    refused = next((each for each in (cold, cached) if isinstance(each, str)), None)
    times = {
        name: None if isinstance(each, str) else each for name, each in (("cold", cold), ("cached", cached))
    }
    return {"case": case.name, "plan": case.plan, **times, "refused": refused}


def _in_a_process(plans: Sequence[str], folder: str) -> tuple[list[float | str], float]:
    printed = subprocess.run(
        python("-m", __name__, json.dumps(plans)),
        env=python_environment(str(CHECKOUT), FUSEPLAN_CACHE_DIR=folder, FUSEPLAN_DISABLE_CACHE="0"),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(printed.stdout)
    return answer["seconds"], answer["first"]


def _timed(text: str) -> float | str:
    plan = FusionPlan.parse(text)
    begin = time.perf_counter()
    try:
        compile_plan(plan, "cpu")
    except FuseplanError as error:
        return str(error)
    return time.perf_counter() - begin


if __name__ == "__main__":
    began = _timed(WARM_UP)
    print(json.dumps({"first": began, "seconds": [_timed(text) for text in json.loads(sys.argv[1])]}))

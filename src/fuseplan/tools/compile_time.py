"""How long compiling takes: with an empty cache, and in a new process that finds the object code on disk."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from fuseplan.bench.suite import Suite
from fuseplan.child import python, python_environment
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import FuseplanError
from fuseplan.plan import FusionPlan

WARM_UP = "f32[1x8] -> relu"  # loads the toolchain, which a process does once


@dataclass(frozen=True)
class CompileTime:
    """Seconds a plan took to compile.

    Attributes:
        case, plan: which.
        cold: with an empty cache.
        cached: in another process, from the cache on disk.
        refused: why there is no time.
    """

    case: str
    plan: str
    cold: float | None
    cached: float | None
    refused: str | None = None

    def to_json(self) -> dict[str, object]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class CompileTimes:
    """A suite's times, and what the first compile of a process took besides."""

    rows: tuple[CompileTime, ...]
    first: float

    @property
    def cold(self) -> float:
        """The median over the suite with an empty cache."""
        return statistics.median(row.cold for row in self.rows if row.cold is not None)

    @property
    def cached(self) -> float:
        """The median over the suite from the cache."""
        return statistics.median(row.cached for row in self.rows if row.cached is not None)

    def to_json(self) -> dict[str, object]:
        """The rows and their medians."""
        rows = [row.to_json() for row in self.rows]
        return {"rows": rows, "cold": self.cold, "cached": self.cached, "first": self.first}


def compile_times(suite: Suite, progress: Callable[[str], object] = lambda _: None) -> CompileTimes:
    """Compiles every plan of a suite twice: each time all of them in one fresh process.

    Args:
        suite: the plans.
        progress: called with a line that says what is done, twice.
    """
    plans = [case.plan for case in suite.cases]
    with tempfile.TemporaryDirectory(prefix="fuseplan-compile-") as folder:
        progress("compiling with an empty cache")
        cold, first = _in_a_process(plans, folder)
        progress("compiling again, from the cache")
        cached, _ = _in_a_process(plans, folder)
    rows = tuple(
        CompileTime(
            case.name, case.plan, _seconds(before), _seconds(after), _refusal(before) or _refusal(after)
        )
        for case, before, after in zip(suite.cases, cold, cached, strict=True)
    )
    return CompileTimes(rows, first)


def _seconds(answer: float | str) -> float | None:
    return None if isinstance(answer, str) else answer


def _refusal(answer: float | str) -> str | None:
    return answer if isinstance(answer, str) else None


def _in_a_process(plans: Sequence[str], folder: str) -> tuple[list[float | str], float]:
    printed = subprocess.run(
        python("-m", __name__, json.dumps(plans)),
        env=python_environment(FUSEPLAN_CACHE_DIR=folder, FUSEPLAN_DISABLE_CACHE="0"),
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

"""Outcomes of tests: counts by name and the tests that failed, for a line in `benchmarks/results`."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

Named = Callable[[Path], str]


class Counts:
    """A plugin that counts outcomes.

    Attributes:
        outcomes: by the name that `named` gives to a test's file.
        failed: ids of the tests that failed.
    """

    def __init__(self, named: Named) -> None:
        self._named = named
        self.outcomes: dict[str, Counter[str]] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self.outcomes.setdefault(self._named(Path(report.fspath)), Counter())[report.outcome] += 1
        if report.outcome == "failed":
            self.failed.append(report.nodeid)

    def told(self, benchmark: str, **stamp: Any) -> dict[str, Any]:
        """The record of the run; `stamp` is machine, versions and commit."""
        return {
            "benchmark": benchmark,
            "run": datetime.now(UTC).isoformat(timespec="seconds"),
            "outcomes": {name: dict(counted) for name, counted in sorted(self.outcomes.items())},
            "failed": self.failed,
            **stamp,
        }


class Versions(Counts):
    """Appends a line of what passed with which versions, by folder of the tests."""

    def __init__(self, place: Path) -> None:
        super().__init__(lambda file: file.parent.name)
        self._place = place

    def pytest_sessionfinish(self) -> None:
        from fuseplan.measure.machine import commit, machine, versions

        used = versions("torch", "triton", "pytest")
        told = self.told("versions", machine=machine().to_json(), versions=used, commit=commit())
        with self._place.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

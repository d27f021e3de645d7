"""Progress of long work on the standard error stream: a bar where rich is installed, else a line a second."""

from __future__ import annotations

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any, Self

PERIOD = 1.0  # seconds between lines
WIDTH = 100  # characters of a line


class Progress:
    """So many steps of something; nothing is shown where standard error is no terminal."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._bar: Any = None
        self._is_shown = total > 0 and sys.stderr.isatty()
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        if self._is_shown and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            count, plan = MofNCompleteColumn(), TextColumn("{task.description}")
            columns = (TextColumn(self._what), BarColumn(), count, plan)
            self._bar = Bar(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._bar.start()
            self._bar.add_task("", total=self._total)
        return self

    def step(self, name: str) -> None:
        """Begins a step."""
        told = name if len(name) <= WIDTH else f"{name[: WIDTH - 3]}..."
        if self._bar is not None:
            plan = told.replace("[", r"\[")
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=plan)
        elif self._is_shown and time.monotonic() > self._told + PERIOD:
            self._told = time.monotonic()
            print(f"{self._what}: {self._done + 1} of {self._total}: {told}", file=sys.stderr)
        self._done += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

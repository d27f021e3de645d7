"""Starts workers and asks them; a worker that dies is a refusal, and is started again for the next plan."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuseplan.system.child import Child

SHOWN = 200
PATIENCE = 5.0  # seconds for a worker to end


class Process:
    """A worker process."""

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name = name
        self._words = ("-m", "fuseplan.bench.worker", name, str(threads))
        self._child: Child | None = None
        self._log = log

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's answer; starts the process where none runs."""
        if self._child is None:
            with self._log.open("w") as log:
                self._child = Child(self._words, log)
            started = self._answer(self._child)
            if "refused" in started:
                self.stop()
                return started
        try:
            self._child.send(request)
        except OSError:
            return self._died()
        return self._answer(self._child)

    def stop(self) -> None:
        """Ends the process."""
        child, self._child = self._child, None
        if child is not None:
            child.end(PATIENCE)

    def _answer(self, child: Child) -> dict[str, Any]:
        answer = next(child.answers(), None)
        return self._died() if answer is None else answer

    def _died(self) -> dict[str, Any]:
        self.stop()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return {"refused": f"its process died: {said[-1][:SHOWN] if said else 'without a message'}"}


@contextlib.contextmanager
def processes(names: Sequence[str], threads: int) -> Iterator[tuple[dict[str, Process], Path]]:
    """A process a name, and a folder for outputs, where what they print goes: all are gone at the end."""
    with tempfile.TemporaryDirectory(prefix="fuseplan-bench-") as scratch:
        folder = Path(scratch)
        made = {name: Process(name, threads, folder / f"{number}.log") for number, name in enumerate(names)}
        try:
            yield made, folder
        finally:
            for process in made.values():
                process.stop()

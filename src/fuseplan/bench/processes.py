"""Starts workers and asks them; a worker that dies is a refusal, and is started again for the next plan."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fuseplan.bench.worker import MARK
from fuseplan.child import python, python_environment

SHOWN = 200


class Process:
    """A worker process."""

    def __init__(self, name: str, threads: int, log: Path) -> None:
        self.name = name
        self._command = python("-m", "fuseplan.bench.worker", name, str(threads))
        self._process: subprocess.Popen[str] | None = None
        self._log = log

    def ask(self, **request: Any) -> dict[str, Any]:
        """The worker's answer; starts the process where none runs."""
        if self._process is None:
            started = self._start()
            if "refused" in started:
                self.stop()
                return started
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError:
            return self._died()
        return self._answer()

    def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # what a dead process has not read cannot be flushed
            process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> dict[str, Any]:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=python_environment(),
            )
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[len(MARK) :]))
        return self._died()

    def _died(self) -> dict[str, Any]:
        self.stop()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return {"refused": f"its process died: {said[-1][:SHOWN] if said else 'without a message'}"}


@contextlib.contextmanager
def processes(names: Sequence[str], threads: int, folder: Path) -> Iterator[dict[str, Process]]:
    """A process a name, all of them stopped at the end; what they print goes into the folder."""
    made = {name: Process(name, threads, folder / f"{number}.log") for number, name in enumerate(names)}
    try:
        yield made
    finally:
        for process in made.values():
            process.stop()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for outputs, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="fuseplan-bench-") as folder:
        yield Path(folder)

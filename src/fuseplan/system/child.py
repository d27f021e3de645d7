"""Python processes that this one starts: they import from its folders, never from where it was started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from fuseplan.settings import environment

PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
MARK = "@"  # begins an answer


def python(*arguments: str) -> list[str]:
    """The command of a Python process; with `-P` it does not look into the working directory for modules."""
    return [sys.executable, "-P", *arguments]


def python_environment(*first: str, **changes: str) -> dict[str, str]:
    """The environment of such a process: with the module search path of this one but the working directory.

    Folders that are given come before it. The package's own folder stays even if it is the working directory:
    its code runs already.
    """
    searched = list(first)
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed holds no module
        here = os.path.realpath(os.curdir)
        paths = [path for path in map(os.path.realpath, sys.path) if path != here]
        searched += [*([] if PACKAGE_ROOT in paths else [PACKAGE_ROOT]), *paths]
    path = {"PYTHONPATH": os.pathsep.join(searched)} if searched else {}
    return environment(**path, **changes)


def teller(answers: TextIO) -> Callable[[Mapping[str, Any]], None]:
    """Writes the answers of a child process: lines of JSON behind a mark, since libraries print lines too."""

    def tell(answer: Mapping[str, Any]) -> None:
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()

    return tell


class Child:
    """A Python process that is asked and answers in lines of JSON.

    Args:
        words: the words of its command behind Python's.
        log: takes its errors.
        first: folders of modules that come before all others.
        changes: of its environment.
    """

    def __init__(self, words: tuple[str, ...], log: IO[Any], *first: str, **changes: str) -> None:
        self.process = subprocess.Popen(
            python(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=python_environment(*first, **changes),
        )

    def send(self, request: Mapping[str, Any]) -> None:
        """Asks; an OSError where the process has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """The answers as they come; it ends with the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                yield dict(json.loads(line[len(MARK) :]))

    @contextmanager
    def within(self, seconds: float) -> Iterator[threading.Event]:
        """Kills the process, and sets the event, where what is done inside takes longer."""
        late = threading.Event()

        def kill() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        try:
            yield late
        finally:
            timer.cancel()

    def end(self, patience: float = 0.0) -> None:
        """Ends the process: by the end of its input where it has seconds for that, then by force."""
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        if not patience:
            process.kill()
        with contextlib.suppress(OSError):  # what a dead process has not read cannot be flushed
            process.stdin.close()
        try:
            process.wait(patience or None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

"""Child processes that are asked and answer in lines of JSON. Lines that libraries print are no answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, TextIO

from fuseplan.child import python, python_environment

MARK = "@"  # begins an answer


def teller(answers: TextIO) -> Callable[[Mapping[str, Any]], None]:
    """Writes answers, in a child."""

    def tell(answer: Mapping[str, Any]) -> None:
        answers.write(MARK + json.dumps(answer) + "\n")
        answers.flush()

    return tell


class Child:
    """A Python process with its ends of the lines.

    Args:
        words: the words of its command behind Python's.
        log: takes its errors.
    """

    def __init__(self, words: tuple[str, ...], log: IO[Any]) -> None:
        self.process = subprocess.Popen(
            python(*words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=python_environment(),
        )

    def send(self, request: Mapping[str, Any]) -> None:
        """Asks.

        Raises:
            OSError: the process has ended.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """The answers as they come; it ends with the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                yield dict(json.loads(line[len(MARK) :]))

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

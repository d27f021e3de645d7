"""The lines of a sweep: where they come from, and their words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from fuseplan import limits
from fuseplan.compat.miopen_driver.combinations import combinations
from fuseplan.compat.miopen_driver.letters import PROBLEMS
from fuseplan.errors import ArgumentError
from fuseplan.reading import bytes_of, text_of

COMMANDS = ("driver", "run")  # whose options may stand before a line's problem


@dataclass(frozen=True)
class Line:
    """One of many lines.

    Attributes:
        text: as it stands.
        place: the file and the line's number, or the combination's.
    """

    text: str
    place: str


def all_combinations() -> list[Line]:
    """A line for every combination."""
    return [Line(text, f"combination {number}") for number, text in enumerate(combinations(), 1)]


def lines_of(sweep: Path) -> list[Line]:
    """The lines of a file; empty lines and lines that begin with # are left out.

    Raises:
        ArgumentError: the file cannot be read, or holds none.
    """
    try:
        text = text_of(bytes_of(sweep, limits.SWEEP_BYTES))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--sweep {sweep} cannot be read: {error}; want lines of UTF-8 text") from None
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    lines = [Line(line, f"{sweep}, line {number}") for number, line in numbered if line and line[0] != "#"]
    if not lines:
        raise ArgumentError(f"--sweep {sweep} holds no line to run; want such as CBAInfer -F 4 -n 1")
    return lines


def words_of(line: Line) -> list[str]:
    """The line's problem and options, without the program's name or a log's words before them.

    Raises:
        ArgumentError: it names no problem.
    """
    try:
        words = shlex.split(line.text)
    except ValueError as error:
        raise ArgumentError(f"the line cannot be read: {error}") from None
    # Problems first: in MIOpen's log a word in brackets, [LogCmdFusion], stands before the command.
    problems = [place for place, word in enumerate(words) if word in PROBLEMS]
    found = problems or [place for place, word in enumerate(words) if is_plan(word)]
    if not found:
        raise ArgumentError(
            f"the line names no problem; want {', '.join(PROBLEMS)}, or a plan's text in quotes"
        )
    if "->" in words:
        raise ArgumentError("a plan's text is one word: want it in quotes, such as 'f32[1x8] -> relu'")
    before = words[: found[0]]
    for place, word in enumerate(before):
        if word in COMMANDS:
            return words[place + 1 :]
    options = (place for place, word in enumerate(before) if word.startswith("-"))
    return words[next(options, found[0]) :]


def is_plan(word: str) -> bool:
    """Whether a word is a plan's text: each begins with a tensor's shape in brackets."""
    return "[" in word

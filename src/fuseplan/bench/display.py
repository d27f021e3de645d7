"""Where a benchmark tells what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

Step = Callable[[str], object]


@dataclass(frozen=True)
class Display:
    """Where a benchmark tells what it does.

    Attributes:
        show: takes tables and paragraphs in Markdown; nothing is shown where JSON is printed.
        tell: takes a line.
        steps: makes progress of so many steps, of None where their number is not known; a step takes a line.
    """

    show: Callable[[str], object]
    tell: Callable[[str], object]
    steps: Callable[[int | None], AbstractContextManager[Step]]

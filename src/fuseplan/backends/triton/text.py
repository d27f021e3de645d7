"""Writes the text of a generated kernel, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Text:
    """Lines of Python, indented by the blocks they stand in; names made here are never met twice."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._names: dict[str, int] = {}

    def line(self, *lines: str) -> None:
        """Appends lines at the present depth; an empty one stays empty."""
        self._lines += [" " * 4 * self._depth + line if line else "" for line in lines]

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines inside of `head:`."""
        self.line(f"{head}:")
        self._depth += 1
        yield
        self._depth -= 1

    def name(self, stem: str) -> str:
        """A name that begins with `stem` and is new in this text."""
        number = self._names.get(stem, 0)
        self._names[stem] = number + 1
        return f"{stem}_{number}"

    def let(self, stem: str, value: str) -> str:
        """Writes `name = value` and gives the name, which is new."""
        name = self.name(stem)
        self.line(f"{name} = {value}")
        return name

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"

"""Where commands print tables and progress, and how wide it is."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from fuseplan.bench.options import Display, Step
from fuseplan.messages.folding import WIDTH, fold

GLUE = "\N{NO-BREAK SPACE}"  # between the words of a cell, which stays on one line


class Screen(Console):
    """A terminal, as wide as it is; or a pipe or a file, as wide as COLUMNS says."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal:
            self.width = shutil.get_terminal_size((WIDTH, 24)).columns

    def tell(self, text: str) -> None:
        """Prints a text, its long lines folded at the screen's width."""
        self.print(fold(text.split("\n"), self.width), markup=False, soft_wrap=True)

    def show(self, markdown: str) -> None:
        """Prints paragraphs and tables that are written in Markdown."""
        lines = markdown.splitlines()
        for is_table, block in groupby(lines, key=lambda line: line.startswith("|")):
            if is_table:
                head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block)
                self.print(tabled(head, rows, self.width), markup=False, soft_wrap=True)
            else:
                self.tell("\n".join(block).replace("**", ""))

    def on_broken_pipe(self) -> None:
        """Leaves a closed pipe to the command, which knows the exit status."""
        raise BrokenPipeError


def print_json(told: Any) -> None:
    """Prints JSON values."""
    print(json.dumps(told, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; cells that the screen is too narrow for go on in the next line."""
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*row)
    Screen().print(table)


class Told(Protocol):
    """What a command prints: a record with a text."""

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values."""


def tell(told: Told, *, as_json: bool) -> None:
    """Prints a record: its text, or its JSON values."""
    if as_json:
        print_json(told.to_json())
    else:
        Screen().tell(str(told))


def tabled(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table in columns; or, where the screen is too narrow for those, an entry per row."""
    columns = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    if sum(columns) + 2 * (len(columns) - 1) <= width:
        lines = [head, ["-" * size for size in columns], *rows]
        return "\n".join("  ".join(map(str.ljust, line, columns)).rstrip() for line in lines)
    return "\n".join(_entry(head, row, width) for row in rows)


def _entry(head: Sequence[str], row: Sequence[str], width: int) -> str:
    """A row under its first cell: the cells that are not empty, each behind its column's name."""
    cells = [f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell]
    told = textwrap.fill(
        ", ".join(cell.replace(" ", GLUE) for cell in cells),
        width - 4,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(GLUE, " ")
    return "\n".join([row[0], *(f"    {line}" for line in told.splitlines())])


@contextmanager
def progress(screen: Console, total: int | None, *, is_shown: bool = True) -> Iterator[Step]:
    """A bar of so many steps, on a terminal; each call of what it gives is a step, and names the next.

    Without a number of steps, the bar only moves.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    is_bar = is_shown and screen.is_terminal
    with Progress(*columns, console=screen, transient=True, disable=not is_bar) as shown:
        task = shown.add_task("starting", total=total)

        def step(what: str) -> None:
            shown.update(task, advance=1, description=what)

        yield step


def display(as_json: bool, is_quiet: bool) -> Display:
    """A terminal as a benchmark's display; the standard error stream where JSON is printed."""
    screen = Screen(stderr=as_json)
    return Display(
        (lambda _: None) if as_json else screen.show,
        screen.tell,
        lambda total: progress(screen, total, is_shown=not is_quiet),
    )

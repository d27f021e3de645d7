"""Declared options as arguments of a module that runs without the packages of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuseplan.errors import FuseplanError
from fuseplan.system.declared import options_of

KINDS: dict[str, Callable[[str], Any]] = {"count": int, "number": float, "threads": int}
PLACES = ("folder", "file")


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    return tuple(map(int, text.split(",")))


def accuracy_of(text: str) -> str | float:
    """A word, or the number that it is."""
    try:
        return float(text)
    except ValueError:
        return text


KINDS |= {"counts": counts, "accuracy": accuracy_of, **dict.fromkeys(PLACES, Path)}


def parsed(parser: argparse.ArgumentParser, record: type, words: Sequence[str] | None) -> dict[str, Any]:
    """The arguments that a parser has, and the options that a record declares, by name."""
    for each in options_of(record):
        how: dict[str, Any] = {"action": "store_true"} if each.kind == "flag" else {"type": str}
        how |= {"type": KINDS[each.kind]} if each.kind in KINDS else {}
        parser.add_argument(each.word, dest=each.name, default=each.default, help=each.help, **how)
    return vars(parser.parse_args(words))


def finished(work: Callable[[], int]) -> int:
    """The exit status of the work; 2 where it cannot be done, which is told."""
    try:
        return work()
    except FuseplanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2

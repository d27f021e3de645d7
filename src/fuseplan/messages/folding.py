"""Long lines of a text, continued below the place where their words begin."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

WIDTH = 100  # columns of a text whose screen is not known
_LABEL = re.compile(r"\s*\S+\s{2,}")  # what may stand before a line's words, with a gap behind it
_CARETS = re.compile(r"\s*\^+")


def fold(lines: Iterable[str], width: int = WIDTH) -> str:
    """The lines as one text, none of them wider than `width` where a space allows it.

    A line that carets point into, and the carets, stay as they are.
    """
    given = list(lines)
    pointed = {
        place + down for place, line in enumerate(given) if _CARETS.fullmatch(line) for down in (-1, 0)
    }
    return "\n".join(line if place in pointed else _folded(line, width) for place, line in enumerate(given))


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    margin = " " * (label.end() if label else len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(
        line, width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False, expand_tabs=False,
    )  # fmt: skip

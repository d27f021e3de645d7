"""Texts as messages show them: a bounded line without control characters, carets under the piece to blame."""

from __future__ import annotations

import re

from fuseplan.system import limits

ARROW = "->"
CUT = "..."
MARGIN = 2 * len(CUT) + 2  # of a line of a message: marks of a cut at both ends, and two spaces in front

ARROW_OR_QUOTED = re.compile(rf"""(["'])(?:\\.|(?!\1).)*(?:\1|\Z)|{ARROW}""", re.DOTALL)
Span = tuple[int, int]  # first character of a piece of a text, and the one behind its last


def segments(text: str) -> list[Span]:
    """The pieces of a plan's text between its arrows, without spaces around: the tensor, then the operators.

    An arrow inside quotes does not count.
    """
    arrows = [found.span() for found in ARROW_OR_QUOTED.finditer(text) if found[0] == ARROW]
    cuts = [0, *(cut for span in arrows for cut in span), len(text)]
    return [stripped(text, begin, end) for begin, end in zip(cuts[::2], cuts[1::2], strict=True)]


def stripped(text: str, begin: int, end: int) -> Span:
    """The piece of the text without the spaces at its ends."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


def operator_span(text: str, operator: int) -> Span | None:
    """Where the operator of that index stands in a plan's text; None if it does not."""
    found = segments(text)
    return found[operator + 1] if 0 <= operator < len(found) - 1 else None


def visible(text: str) -> str:
    """The text with a space for each tab or line break, and `?` for each other character that does not print.

    A terminal would take such characters for commands: colours, a cleared screen, text from right to left.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " if each.isspace() else "?" for each in text)


def bounded(text: str, most: int = limits.SHOWN_CHARACTERS) -> str:
    """The text, visible; the middle of a long one is left out."""
    if len(text) <= most:
        return visible(text)
    kept = most - len(CUT)
    return visible(text[: kept - kept // 3] + CUT + text[len(text) - kept // 3 :])


def shown(value: object) -> str:
    """A value that somebody passed, as Python writes it: one line, bounded."""
    return bounded(" ".join(repr(value).split()), limits.SHOWN_VALUE_CHARACTERS)


def underlined(text: str, span: Span | None) -> list[str]:
    """`text`, and a line of carets under its piece `span`; an empty piece gets one caret.

    Of a long text the part around the piece is shown.
    """
    begin, end = span or (0, 0)
    most = limits.SHOWN_CHARACTERS - MARGIN
    first = max(0, min(begin - most // 3, len(text) - most))
    last = first + most
    before, after = CUT * (first > 0), CUT * (last < len(text))
    lines = [before + visible(text[first:last]) + after]
    if span is not None:
        lines.append(" " * (len(before) + begin - first) + "^" * max(1, min(end, last) - begin))
    return lines

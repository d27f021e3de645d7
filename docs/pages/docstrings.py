"""Reads docstrings as we write them, and writes them as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

SECTIONS = ("Args", "Attributes", "Raises", "Returns")
_NAMED = re.compile(r"(\w+): +(\S.*)")  # `reads:  src once`, in front of what continues it
_ITEM = re.compile(r" {4}([\w*]+(?:, [\w*]+)*): (.*)")


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts.

    Attributes:
        summary: the first line.
        paragraphs: what follows, one text a paragraph; code is indented by four spaces.
        named: `reads`, `writes`, `before`, ... and what is said of each.
        sections: by name (Args, Attributes, Raises, Returns), pairs of a name and its text; of Returns, the
            name is empty.
    """

    summary: str
    paragraphs: tuple[str, ...]
    named: tuple[tuple[str, str], ...]
    sections: dict[str, tuple[tuple[str, str], ...]]


def parse(docstring: str | None, named: tuple[str, ...] = ()) -> Docstring:
    """The parts of a docstring.

    Args:
        docstring: the text; None is an empty one.
        named: words that begin an entry of `Docstring.named` where they stand at the start of a line.
    """
    blocks = re.split(r"\n\s*\n", cleandoc(docstring or ""))
    paragraphs: list[str] = []
    entries: list[tuple[str, str]] = []
    sections: dict[str, tuple[tuple[str, str], ...]] = {}
    for block in blocks[1:]:
        lines = block.split("\n")
        if lines[0].rstrip(":") in SECTIONS:
            sections[lines[0].rstrip(":")] = tuple(_items(lines[1:]))
        elif _starts_entry(lines[0], named):
            entries += _entries(lines, named)
        else:
            paragraphs.append(block if block.startswith("    ") else _joined(lines))
    return Docstring(_joined(blocks[0].split("\n")), tuple(paragraphs), tuple(entries), sections)


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def _starts_entry(line: str, named: tuple[str, ...]) -> bool:
    match = _NAMED.fullmatch(line)
    return match is not None and match[1] in named


def _entries(lines: list[str], named: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    starts = [index for index, line in enumerate(lines) if _starts_entry(line, named)]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = _NAMED.fullmatch(lines[begin])
        if match is not None:
            yield match[1], _joined([match[2], *lines[begin + 1 : end]])


def _items(lines: list[str]) -> Iterator[tuple[str, str]]:
    """`name: text` at the section's own indent; deeper lines go on; a section without names is one text."""
    starts = [index for index, line in enumerate(lines) if _ITEM.fullmatch(line)]
    if not starts:
        yield "", _joined(lines)
        return
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        match = _ITEM.fullmatch(lines[begin])
        if match is not None:
            yield match[1], _joined([match[2], *lines[begin + 1 : end]])


def prose(text: str) -> str:
    """A text as Markdown: what is not between backticks keeps its asterisks and angle brackets."""
    pieces = text.split("`")
    for index in range(0, len(pieces), 2):
        pieces[index] = re.sub(r"([*<])", r"\\\1", pieces[index])
    return "`".join(pieces)


def markdown(told: Docstring) -> Iterator[str]:
    """The paragraphs and sections, as lines of Markdown; the summary is left to the caller."""
    for paragraph in told.paragraphs:
        yield ""
        yield from _paragraph(paragraph)
    for section, items in told.sections.items():
        yield ""
        yield f"{section}:"
        yield ""
        yield from (f"- {f'`{name}`: ' if name else ''}{prose(text)}" for name, text in items)


def _paragraph(text: str) -> Iterator[str]:
    if not text.startswith("    "):
        yield prose(text)
        return
    yield "```text"
    yield cleandoc(text)
    yield "```"


def between(page: str, begin: str, end: str, told: str) -> str:
    """The page with `told` between two marks, in the place of what stood there.

    Raises:
        ValueError: the marks are not there.
    """
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"want the lines {begin} and {end}")
    return f"{before}{begin}\n\n{told}\n\n{end}{after}"

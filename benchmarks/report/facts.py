"""The numbers that comments in the code cite, as `benchmarks/facts.toml` lists them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from docs.pages.docstrings import prose
from fuseplan.bench.markdown import table


def facts(place: Path) -> Iterator[str]:
    """A section with each claim, where it is cited, on what and when it was measured, and what repeats it."""
    if not place.exists():
        return
    rows = [
        [
            prose(fact["claim"]),
            f"`{fact['file'].removeprefix('src/fuseplan/')}`",
            f"{fact['machine']}, {fact.get('date', 'date not noted')}",
            f"`{fact['command']}`" if "command" in fact else "",
        ]
        for fact in tomllib.loads(place.read_text(encoding="utf-8"))["fact"]
    ]
    yield from ("", "## Numbers that comments cite", "")
    yield from table(["claim", "cited in", "measured on", "again with"], rows)

"""Sections of docs/measured.md about suites on GPUs, and what is said of results by hand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.standings import markdown
from benchmarks.suite import Suite
from docs.pages.docstrings import prose
from fuseplan.bench.markdown import table
from fuseplan.bench.results import Row
from fuseplan.bench.table import Line, lines

Record = Mapping[str, Any]
Lines = Iterator[str]

# What was tried where we lose, and why a test failed.
LOSSES = Path(__file__).resolve().parents[1] / "losses.toml"


def suite_section(found: Suite, rows: Sequence[Row], stamp: str) -> Lines:
    """A suite's tables, and what was tried on each shape that another library is faster at.

    Args:
        found: the suite.
        rows: its last rows on one GPU.
        stamp: when and with what they were measured.
    """
    yield from ("", f"### {found.title}", "")
    yield f"`fuseplan bench {found.name} --target cuda`; microseconds. {stamp}"
    yield ""
    yield markdown(found, rows).rstrip()
    yield from _wall(rows)
    lost = [line for line in lines(rows) if (line.ratio or 1.0) < 1.0]
    if lost:
        yield from ("", "Slower than the fastest other:", "")
        tried = losses()
        yield from (f"- {_loss(line, tried)}" for line in lost)


def _wall(rows: Sequence[Row]) -> Lines:
    """Where it was measured: what a call takes the host, and the GPU in a CUDA graph."""
    timed = [row for row in rows if row.wall is not None]
    if not timed:
        return
    yield ""
    listed = [
        [row.case, row.peer, *(_us(each) for each in (row.wall, row.replay, row.median))] for row in timed
    ]
    heads = [
        "shape",
        "library",
        "a call, of the host",
        "in a CUDA graph, its tensors in the L2",
        "out of the L2",
    ]
    yield from table(heads, listed)


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def _loss(line: Line, tried: Mapping[tuple[str, str, str], str]) -> str:
    best, ratio = line.best, line.ratio
    told = f"{line.group}, {line.case}: {ratio:.2f}" + (f" ({best.peer})" if best else "")
    what = tried.get((line.ours.suite, line.group, line.case)) or tried.get((line.ours.suite, line.group, ""))
    return f"{told}. {prose(what)}" if what else told


def losses(place: Path | None = None) -> dict[tuple[str, str, str], str]:
    """What was tried, by suite, group and case; an empty case stands for all of its group."""
    listed = _told(place).get("loss", [])
    return {(each["suite"], each["group"], each.get("case", "")): each["tried"] for each in listed}


def failures(place: Path | None = None) -> dict[str, str]:
    """What became of a test that failed on a GPU, by its name."""
    return {each["test"]: each["cause"] for each in _told(place).get("failure", [])}


def _told(place: Path | None) -> Record:
    """What is said of results by hand; nothing without the file."""
    where = place or LOSSES
    return tomllib.loads(where.read_text(encoding="utf-8")) if where.is_file() else {}

"""`fuseplan bench SUITE`: suites of plans, and benchmarks that are no suite."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import special, standings, suite
from fuseplan.bench import command
from fuseplan.bench.options import Display, Options
from fuseplan.bench.results import Row
from fuseplan.messages.excerpt import ARROW

FOLDER = Path("benchmarks/results")


def names() -> list[str]:
    """The names that `fuseplan bench` knows."""
    return sorted({*suite.names(), *special.SPECIAL[False]})


def bench_suite(
    name: str, options: Options, display: Display, *, is_compiling: bool = False, is_kept: bool = True
) -> Any:
    """Measures a suite, or another benchmark by its name.

    Args:
        name: of either; a FILE.toml, or for compile times also a plan.
        options: how.
        display: where it is told.
        is_compiling: on a CPU, measure compile times.
        is_kept: append the results, to the checkout's folder unless the options name another.

    Raises:
        ArgumentError: there is no such suite or peer, or no case of that name.
    """
    if is_kept and options.results is None and FOLDER.is_dir() and ARROW not in name:
        options = replace(options, results=FOLDER)
    measure = special.SPECIAL[options.is_on_gpu].get(name)
    if measure is None and is_compiling and not options.is_on_gpu:
        measure = special.bench_compile
    return (measure or bench)(name, options, display)


def bench(name: str, options: Options, display: Display) -> list[Row]:
    """Measures a suite beside its peers, shows its tables, and appends its rows as they come.

    Raises:
        ArgumentError: there is no such suite or peer, no case of that name, or results cannot be written; on
            a GPU, torch is not installed, or finds no GPU.
    """
    found = suite.chosen(suite.load(name), options.only)
    options = replace(options, peers=found.peers) if options.peers is None else options
    return command.bench(found, options, display, partial(standings.markdown, found))

"""Benchmarks that are no suite. They and other tools are in a checkout, not in the installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from fuseplan.bench.command import Display, Options
from fuseplan.errors import ArgumentError

# Their names on the command line, by whether a GPU is measured.
SPECIAL = {
    False: ("accuracy", "footprint", "overhead", "peaks", "published"),
    True: ("overhead", "peaks", "published"),
}
COMPILE = "compile times"
Benchmark = Callable[[str, Options, Display], Any]


def special(name: str, options: Options) -> Benchmark | None:
    """The benchmark of that name; None where there is none, and the name is a suite's.

    Raises:
        ArgumentError: the package is installed without its tools.
    """
    if name not in SPECIAL[options.is_on_gpu]:
        return None
    found: Benchmark = tool("benchmarks", f"`fuseplan bench {name}`").SPECIAL[options.is_on_gpu][name]
    return found


def tool(module: str, asked: str) -> ModuleType:
    """A module of `fuseplan.tools`, for which something is asked.

    Raises:
        ArgumentError: the package is installed without its tools.
    """
    try:
        return import_module(f"fuseplan.tools.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fuseplan.tools"):
            raise
        raise ArgumentError(
            f"{asked} is a tool of fuseplan's sources, and the installed package has no tools: run it in a "
            "checkout, after `pip install -e '.[cli,plot]'` there"
        ) from None

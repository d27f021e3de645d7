"""The page of the reference about MIOpen's names: every function with its arguments, every enumeration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from docs.pages.docstrings import markdown, parse, prose
from fuseplan.bench.markdown import table
from fuseplan.compat.miopen.call import declarations
from fuseplan.compat.miopen.enums import ENUMS
from fuseplan.compat.miopen_driver import command_of
from fuseplan.miopen import NAMES


def miopen_names() -> Iterator[str]:
    """The names of `fuseplan.miopen`, from their declarations."""
    yield "All of these are names of `fuseplan.miopen`; [the guide](../guide/miopen.md) tells how they are"
    yield "called. A function returns a `miopenStatus_t`, but for the two that return a text. An argument"
    yield "with a default is one that MIOpen has not."
    for section, declared in groupby(declarations(), lambda each: each.section):
        yield from ("", f"## {section}")
        for each in declared:
            yield from _function(each.name)
    yield from ("", "## Errors")
    for name in ("miopenGetErrorString", "miopenGetLastErrorMessage"):
        yield from _function(name)
    yield from ("", "## The line of a plan", "")
    yield "In `fuseplan.compat.miopen_driver`; [the guide](../guide/driver.md) has an example."
    told = parse(command_of.__doc__)
    yield from ("", f"`command_of(plan) -> str`: {prose(told.summary)}")
    yield from markdown(told)
    yield from ("", "## Enumerations")
    for kind in ENUMS:
        yield from ("", f"### {kind.__name__}", "", prose(parse(kind.__doc__).summary), "")
        yield from table(
            ["name", "number"], [[f"`{name}`", str(int(each))] for name, each in kind.__members__.items()]
        )


def _function(name: str) -> Iterator[str]:
    function = NAMES[name]
    told = parse(function.__doc__)
    yield from ("", f"`{name}{_arguments(function)}`: {prose(told.summary)}")
    yield from markdown(told)


def _arguments(function: Any) -> str:
    """The names of a function's arguments, with their defaults."""
    listed = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    told = [each.name + ("" if each.default is empty else f"={each.default!r}") for each in listed]
    return f"({', '.join(told)})"

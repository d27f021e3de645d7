"""The cells of the committed supported table; their plans take geometries, modes and activations in turn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.pages.supported import listed
from fuseplan.backends import backend_of
from fuseplan.cli.combinations import Cell
from fuseplan.kernels.target import parse_target
from fuseplan.kernels.template import Template

ROOT = Path(__file__).resolve().parent.parent
STEP = 7919  # a prime: all cells are come by, neighbours in the table far apart
TABLE: dict[str, Any] = json.loads((ROOT / "docs" / "supported.json").read_text(encoding="utf-8"))


def template_of(name: str, target: str) -> type[Template]:
    templates = backend_of(parse_target(target).backend).templates
    return next(each for each in templates if each.name == name)


def taken(target: str) -> Iterator[tuple[int, Cell, type[Template]]]:
    """The turn of each cell's plan, the cell, and its template."""
    for turn, cell in enumerate(listed(ROOT / "docs", target)):
        yield turn, cell, template_of(cell.template, target)


def covering(target: str, *, whole: bool = False) -> Iterator[Any]:
    """Cells whose combination, or whose template in that dtype or layout, was in none before; or all.

    A plan is made where its test runs.
    """
    seen: set[tuple[str, ...]] = set()
    listed = list(taken(target))
    for place in range(len(listed)):
        turn, cell, kind = listed[place * STEP % len(listed)]
        new = {(cell.combination,), (kind.name, cell.dtype), (kind.name, cell.layout, "layout")}
        if whole or new - seen:
            seen |= new
            name = f"{cell.combination}-{cell.dtype}-{cell.layout}-{kind.name}"
            yield pytest.param(turn, cell, kind, id=name)

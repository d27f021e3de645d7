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
TABLE: dict[str, Any] = json.loads((ROOT / "docs" / "supported.json").read_text(encoding="utf-8"))


def template_of(name: str, target: str) -> type[Template]:
    templates = backend_of(parse_target(target).backend).templates
    return next(each for each in templates if each.name == name)


def taken(target: str) -> Iterator[tuple[int, Cell, type[Template]]]:
    """The turn of each cell's plan, the cell, and its template."""
    for turn, cell in enumerate(listed(ROOT / "docs", target)):
        yield turn, cell, template_of(cell.template, target)


def parameters(target: str) -> list[Any]:
    """The same, for tests: a plan is made where its test runs."""
    return [
        pytest.param(*each, id=f"{each[1].combination}-{each[1].dtype}-{each[1].layout}-{each[2].name}")
        for each in taken(target)
    ]

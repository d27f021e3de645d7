"""The cells of the committed supported table, each with a plan: another geometry, mode, activation."""

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
from fuseplan.plans.plan import FusionPlan

ROOT = Path(__file__).resolve().parent.parent
TABLE: dict[str, Any] = json.loads((ROOT / "docs" / "supported.json").read_text(encoding="utf-8"))


def template_of(name: str, target: str) -> type[Template]:
    templates = backend_of(parse_target(target).backend).templates
    return next(each for each in templates if each.name == name)


def taken(target: str) -> Iterator[tuple[Cell, type[Template], FusionPlan]]:
    """Each cell, its template, and one of its plans."""
    for turn, cell in enumerate(listed(ROOT / "docs", target)):
        yield cell, template_of(cell.template, target), cell.plan(turn)


def parameters(target: str) -> list[Any]:
    """The same, for tests."""
    return [
        pytest.param(kind, plan, id=f"{cell.combination}-{kind.name}-{plan}")
        for cell, kind, plan in taken(target)
    ]

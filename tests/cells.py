"""The cells of the supported table, each with a plan: another geometry, mode and activation each time."""

from collections.abc import Iterator
from typing import Any

import pytest

from fuseplan.backends import backend_of
from fuseplan.plan import FusionPlan
from fuseplan.report.combinations import Cell
from fuseplan.report.supported import asked
from fuseplan.target import parse_target
from fuseplan.template import Template


def template_of(cell: Cell, target: str) -> type[Template]:
    templates = backend_of(parse_target(target).backend).templates
    return next(each for each in templates if each.name == cell.template)


def taken(target: str) -> Iterator[tuple[Cell, type[Template], FusionPlan]]:
    """Each cell that is taken, its template, and one of its plans."""
    cells = [each for each in asked(target) if not each.code]
    for turn, cell in enumerate(cells):
        yield cell, template_of(cell, target), cell.plan(turn)


def parameters(target: str) -> list[Any]:
    """The same, for tests."""
    return [
        pytest.param(kind, plan, id=f"{cell.combination}-{kind.name}-{plan}")
        for cell, kind, plan in taken(target)
    ]

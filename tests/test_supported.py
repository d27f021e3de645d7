"""Holds the supported table to the rules and templates, and its refusals to their reasons."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from cells import ROOT, TABLE, template_of
from docs.pages.supported import TARGETS, asked, written
from fuseplan.cli.combinations import AXES, BASES, COMBINATIONS, Cell, Geometry, probe
from fuseplan.errors import Unsupported
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.messages.reasons import first_refusal

MIOPENS = {"CB", "CA", "CBA", "CN", "CNA", "CBN", "CBNA", "CSBA", "NA", "NA-train", "NA-backward"}


@cache
def lowered(combination: str, layout: str, dtype: str, geometry: Geometry) -> Kernel | str:
    """A plan's kernel, or the code with which the rules refuse it."""
    try:
        return lower(match(probe(combination, layout, dtype, geometry)))
    except Unsupported as error:
        return error.refusals[0].code


def refusal(cell: Cell, geometry: Geometry, target: str) -> str | None:
    """The code with which rules or the cell's template refuse a plan."""
    kernel = lowered(cell.combination, cell.layout, cell.dtype, geometry)
    if isinstance(kernel, str):
        return kernel
    found = first_refusal(template_of(cell.template, target).limits(kernel, parse_target(target), "default"))
    return found.code if found else None


def test_the_table_is_current() -> None:
    for name, text in written().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, "run `make docs`"


def test_every_combination_is_asked_of_every_target() -> None:
    assert set(COMBINATIONS) >= MIOPENS
    assert TABLE["combinations"] == list(COMBINATIONS)
    assert list(TABLE["targets"]) == list(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_the_cells_each_once(target: str) -> None:
    listed = [
        (combination, row["algorithm"], layout, dtype, row.get("reason", ""))
        for row in TABLE["targets"][target]
        for combination, layout, dtype in product(row["combinations"], row["layouts"], row["dtypes"])
    ]
    cells = {(each.combination, each.template, each.layout, each.dtype, each.code) for each in asked(target)}
    assert len(listed) == len(set(listed))
    assert set(listed) == cells


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_refused_cell_has_the_reason_that_is_printed(combination: str, target: str) -> None:
    for cell in asked(target):
        if cell.combination != combination or not cell.code:
            continue
        bases = BASES if "C" in combination else BASES[:1]
        codes = [refusal(cell, base, target) for base in bases]
        assert None not in codes, f"{cell} is taken"
        assert cell.code in codes


@pytest.mark.parametrize("target", TARGETS)
def test_a_refused_value_has_the_reason_that_is_printed(target: str) -> None:
    met: dict[tuple[str, str, str, str], Cell] = {}
    for cell in asked(target):
        for axis, value, code in cell.refused:
            met.setdefault((cell.template, axis, value, code), cell)
    for (_, axis, value, code), cell in met.items():
        taken = [base for base in BASES if base in cell.taken]
        codes = [refusal(cell, replace(base, **{axis: value}), target) for base in taken]
        assert None not in codes
        assert code in codes


@pytest.mark.parametrize("target", TARGETS)
def test_every_value_that_is_taken_is_in_a_plan(target: str) -> None:
    """So the tests of cells, which take another of a cell's plans each, come by every value."""
    for cell in asked(target):
        if cell.code or "C" not in cell.combination:
            continue
        out = {(axis, value) for axis, value, _ in cell.refused}
        for axis, values in AXES.items():
            in_plans = {getattr(each, axis) for each in cell.taken}
            assert in_plans == {value for value in values if (axis, value) not in out}

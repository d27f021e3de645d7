"""Holds the supported table to the rules and templates, and its refusals to their reasons."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from cells import ROOT, TABLE, template_of
from docs.pages.supported import TARGETS, page, spread
from fuseplan.backends import backend_of
from fuseplan.cli.combinations import AXES, BASES, COMBINATIONS, PLACES, Cell, Geometry, cells, probe, rows
from fuseplan.errors import Unsupported
from fuseplan.kernels.kernel import Kernel
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import parse_target
from fuseplan.language.dtypes import FACTORS
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


@pytest.fixture
def part(request: pytest.FixtureRequest) -> int | None:
    """The part of the cells that is asked for: each combination in each layout, and in each dtype."""
    return None if request.config.getoption("whole") else 0


@cache
def asked(target: str, part: int | None) -> tuple[Cell, ...]:
    return tuple(cells(parse_target(target), part))


def test_the_page_tells_the_table() -> None:
    assert spread(TABLE) == (ROOT / "docs" / "supported.json").read_text(encoding="utf-8")
    assert page(TABLE) == (ROOT / "docs" / "supported.md").read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("target", TARGETS)
def test_the_table_is_current(target: str, part: int | None) -> None:
    told = {
        place: row
        for row in TABLE["targets"][target]
        for place in product(row["combinations"], [row["algorithm"]], row["layouts"], row["dtypes"])
    }
    for cell in asked(target, part):
        (row,) = rows([cell])
        own, place = row.to_json(), (cell.combination, cell.template, cell.layout, cell.dtype)
        joined = {key: told[place][key] for key in ("combinations", "layouts", "dtypes")}
        assert own | joined == told[place], f"{cell}: run `make docs`"


def test_every_combination_is_asked_of_every_target() -> None:
    assert set(COMBINATIONS) >= MIOPENS
    assert TABLE["combinations"] == list(COMBINATIONS)
    assert list(TABLE["targets"]) == list(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_the_cells_each_once(target: str) -> None:
    listed = [
        place
        for row in TABLE["targets"][target]
        for place in product(row["combinations"], [row["algorithm"]], row["layouts"], row["dtypes"])
    ]
    templates = [each.name for each in backend_of(parse_target(target).backend).templates]
    every = product(COMBINATIONS, templates, PLACES, FACTORS)
    assert len(listed) == len(set(listed))
    assert set(listed) == {each for each in every if "C" not in each[0] or len(each[2]) > 2}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_refused_cell_has_the_reason_that_is_printed(
    combination: str, target: str, part: int | None
) -> None:
    for cell in asked(target, part):
        if cell.combination != combination or not cell.code:
            continue
        bases = BASES if "C" in combination else BASES[:1]
        codes = [refusal(cell, base, target) for base in bases]
        assert None not in codes, f"{cell} is taken"
        assert cell.code in codes


@pytest.mark.parametrize("target", TARGETS)
def test_a_refused_value_has_the_reason_that_is_printed(target: str, part: int | None) -> None:
    met: dict[tuple[str, str, str, str], Cell] = {}
    for cell in asked(target, part):
        for axis, value, code in cell.refused:
            met.setdefault((cell.template, axis, value, code), cell)
    for (_, axis, value, code), cell in met.items():
        taken = [base for base in BASES if base in cell.taken]
        codes = [refusal(cell, replace(base, **{axis: value}), target) for base in taken]
        assert None not in codes
        assert code in codes


@pytest.mark.parametrize("target", TARGETS)
def test_every_value_that_is_taken_is_in_a_plan(target: str, part: int | None) -> None:
    """So the tests of cells, which take another of a cell's plans each, come by every value."""
    for cell in asked(target, part):
        if cell.code or "C" not in cell.combination:
            continue
        out = {(axis, value) for axis, value, _ in cell.refused}
        for axis, values in AXES.items():
            in_plans = {getattr(each, axis) for each in cell.taken}
            assert in_plans == {value for value in values if (axis, value) not in out}

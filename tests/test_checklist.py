"""Holds docs/miopen.md to its data, to the tests it links, and to rules and templates."""

import ast
from pathlib import Path
from typing import Any

import pytest

from docs.pages.miopen import ANSWERS, page, told

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
ROWS: list[dict[str, Any]] = told(DOCS)["row"]
LINKED = sorted({test for row in ROWS for test in row["tests"]})


def functions(place: Path) -> set[str]:
    """The names of a module's functions, those of its classes too."""
    tree = ast.parse(place.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_all_that_miopen_has_is_there() -> None:
    assert [row["number"] for row in ROWS] == list(range(1, 61))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["number"]))
def test_a_row_is_answered_and_tested(row: dict[str, Any]) -> None:
    assert row["answer"] in ANSWERS
    assert row["tests"]


@pytest.mark.parametrize("test", LINKED)
def test_a_linked_test_is_collected(test: str) -> None:
    place, name = test.split("::")
    assert Path(place).name.startswith("test_")
    assert name.startswith("test_")
    assert name in functions(ROOT / "tests" / place)


def test_the_page_is_current() -> None:
    assert (DOCS / "miopen.md").read_text(encoding="utf-8") == page(DOCS), "run `make docs`"

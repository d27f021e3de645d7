"""Holds docs/reference to the code that it is written from."""

import re
import tomllib
from difflib import unified_diff
from pathlib import Path

import pytest

import fuseplan
from docs.pages import reference
from docs.pages.docstrings import markdown, parse, prose
from docs.pages.miopen_stub import stub
from docs.pages.reference import indexed, pages, write
from fuseplan.bench.markdown import table
from fuseplan.messages.reasons import Reason
from fuseplan.miopen import NAMES
from fuseplan.ops import OPERATORS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
WRITTEN = {path.name: path.read_text() for path in FOLDER.glob("*")}


def test_pages_are_current_and_the_same_in_every_process() -> None:
    """Processes have other orders of hashes, and each makes the pages that the folder has."""
    made = pages()
    assert WRITTEN.keys() == made.keys(), "run `make docs`"
    lines = {name: (page.splitlines(), WRITTEN[name].splitlines()) for name, page in made.items()}
    assert [line for pages in lines.values() for line in unified_diff(*pages, n=0)] == [], "run `make docs`"


def test_what_is_announced_is_told() -> None:
    assert [line for page in WRITTEN.values() for line in page.splitlines() if line.endswith(" ")] == []


def test_the_index_of_codes_is_current() -> None:
    page = (ROOT / "docs" / "guide" / "troubleshooting.md").read_text()
    assert indexed(page) == page, "run `make docs`"
    assert [each.code for each in Reason if f"[`{each.code}`]" not in page] == []


def test_the_stub_of_miopens_names_is_current_and_has_them_all() -> None:
    place = ROOT / "src" / "fuseplan" / "miopen" / "__init__.pyi"
    assert place.read_text() == stub(), "run `make docs`"
    found = re.findall(r"^(?:def |from .* as )?(\w+)\b(?=$|:|\()", place.read_text(), re.MULTILINE)
    assert set(found) >= NAMES.keys()


def test_every_public_name_is_told() -> None:
    told = WRITTEN["python.md"] + WRITTEN["operators.md"]
    missing = [name for name in fuseplan.__all__ if f"### {name}\n" not in told and f"`{name}`" not in told]
    assert not missing


def test_every_operator_is_told_with_its_samples() -> None:
    for kind in OPERATORS:
        assert f"\n## {kind.name}\n" in WRITTEN["operators.md"]
        for src, _ in kind.samples():
            assert f"`{src} -> {kind.name}" in WRITTEN["operators.md"]


def test_the_guides_table_has_every_operator() -> None:
    guide = (ROOT / "docs" / "guide" / "operators.md").read_text().partition("## Computed as written")[0]
    assert [op.name for op in OPERATORS if f"`{op.name}`" not in guide] == []


def test_every_reason_is_told_with_who_gives_it() -> None:
    page = WRITTEN["reasons.md"]
    for reason in Reason:
        part = page.split(f"\n## {reason.code}\n")[1].split("\n## ")[0]
        assert "given by: nothing" not in part, f"nothing refuses with {reason.code}: remove it"


def test_the_scripts_of_the_package_are_told() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert all(f"## {name} " in WRITTEN["command_line.md"] for name in scripts)


def test_write_removes_pages_that_are_no_longer_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stale.md").write_text("old")
    monkeypatch.setattr(reference, "pages", lambda: WRITTEN)
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == WRITTEN.keys()


DOCSTRING = """The first line,
    wrapped.

    A paragraph with 2*x and `2*x`.

        code(1)

    reads:  src once
        and again
    writes: dst

    Args:
        one: the first,
            which goes on.
        two, three: the others.

    Returns:
        A number.
    """


def test_a_docstring_is_taken_apart() -> None:
    told = parse(DOCSTRING, ("reads", "writes"))
    assert told.summary == "The first line, wrapped."
    assert told.paragraphs == ("A paragraph with 2*x and `2*x`.", "    code(1)")
    assert told.named == (("reads", "src once and again"), ("writes", "dst"))
    assert told.sections == {
        "Args": (("one", "the first, which goes on."), ("two, three", "the others.")),
        "Returns": (("", "A number."),),
    }


def test_no_docstring_is_an_empty_one() -> None:
    assert parse(None).summary == ""


def test_prose_keeps_what_is_not_markup() -> None:
    assert prose("a*b <c> `a*b`") == r"a\*b \<c> `a*b`"


def test_markdown_lists_sections_and_fences_code() -> None:
    lines = list(markdown(parse(DOCSTRING, ("reads", "writes"))))
    assert lines[:5] == ["", r"A paragraph with 2\*x and `2*x`.", "", "```text", "code(1)"]
    assert "- `two, three`: the others." in lines
    assert lines[-1] == "- A number."


def test_a_table_keeps_its_columns() -> None:
    assert list(table(["a"], [["x|y"]])) == ["| a |", "| --- |", r"| x\|y |"]

"""Runs the pages: each `python` and `console` block of README and docs/guide, in order, one namespace a page.

An `output` block right after a `python` block is what that block prints; `...` in it stands for anything
(times and paths differ from machine to machine). A `python` block that must raise ends with the comment
`# raises Name`. In a `console` block, what stands behind `$ ` is a command of the shell, and the lines below
it are what it prints.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fuseplan.stores import sites, tuned

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs" / "guide").rglob("*.md")))
PAGES = [path for path in CANDIDATES if re.search("^```(python|console)$", path.read_text(), re.MULTILINE)]
PROSE = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^```(?P<language>[a-z]*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
RAISES = re.compile(r"# raises (\w+)\s*$")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


class Block(NamedTuple):
    """A block that runs: its first line's number, language, code, and what the page says it prints."""

    line: int
    language: str
    code: str
    expected: str | None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        line = text.count("\n", 0, fence.start()) + 2
        is_told = following is not None and following["language"] == "output"
        if fence["language"] == "python":
            yield Block(line, "python", fence["body"], following["body"] if following and is_told else None)
        elif fence["language"] == "console":
            for command in re.split(r"^\$ ", fence["body"], flags=re.MULTILINE)[1:]:
                code, _, printed = command.partition("\n")
                yield Block(line, "console", code, printed)


def matches(printed: str, expected: str) -> bool:
    pattern = r".*?".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def run(code: str, where: str, namespace: dict[str, object]) -> str:
    """What the code prints; the name of an error it announces is printed as its last line."""
    printed = io.StringIO()
    announced = RAISES.search(code)
    compiled = compile(code, where, "exec")
    with contextlib.redirect_stdout(printed):
        try:
            exec(compiled, namespace)
        except Exception as error:
            if announced is None or type(error).__name__ != announced[1]:
                raise
            print(f"{type(error).__name__}: {error}")
        else:
            assert announced is None, f"{where}: nothing raised {announced[1]}"
    return printed.getvalue()


def command(code: str, folder: Path) -> str:
    """What a command prints on both outputs; `fuseplan` is this checkout's."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    script = bin_folder / "fuseplan"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fuseplan "$@"\n')
    script.chmod(0o755)
    paths = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    width = {"COLUMNS": "100"}  # that of a pipe; a process of pytest-xdist has its terminal's
    told = subprocess.run(
        ["sh", "-c", code],
        cwd=folder,
        env={**os.environ, **paths, **width},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return told.stdout


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))  # a page may set it; it is put back
    for kept in (sites.KEPT, tuned.OWN):  # what other tests measured in this process is no page's
        monkeypatch.setattr(kept, "unsaved", {})
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, language, code, expected in blocks(page):
        where = f"{page.name}:{line}"
        if language == "python":
            printed = run("\n" * (line - 1) + code, where, namespace)
        else:
            printed = command(code, tmp_path)
        told = f"{where} printed\n{printed}\nthe page says\n{expected}"
        assert expected is None or matches(printed, expected), told


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(FENCE.sub("", page.read_text()))
    assert [place for place, _ in links if not (page.parent / place).exists()] == []
    named = [(page.parent / place if place else page, anchor) for place, anchor in links if anchor]
    assert [(place.name, anchor) for place, anchor in named if anchor not in anchors(place)] == []


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: small letters, hyphens for spaces, nothing else but digits."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_of_the_guide_is_listed() -> None:
    listed = (ROOT / "docs" / "guide" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs" / "guide").glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in listed} == set()


def test_anchors_are_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c_d\n\n```sh\n# no heading\n```\n\n## TF32\n")
    assert anchors(page) == {"a-b-c_d", "tf32"}


def test_outputs_are_compared() -> None:
    assert matches("took 3 ms\n", "took ... ms")
    assert not matches("took 3 ms and more\n", "took ... ms")
    assert not matches("", "took ... ms")

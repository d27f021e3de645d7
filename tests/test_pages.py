"""Runs the pages: each `python` block of README and docs/guide, in order, one namespace a page.

An `output` block right after a `python` block is what that block prints; `...` in it stands for anything
(times and paths differ from machine to machine). A `python` block that must raise ends with the comment `#
raises Name`.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs" / "guide").rglob("*.md")))
PAGES = [path for path in CANDIDATES if "```python" in path.read_text()]
FENCE = re.compile(r"^```(?P<language>[a-z]*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
RAISES = re.compile(r"# raises (\w+)\s*$")


def blocks(page: Path) -> list[tuple[int, str, str | None]]:
    """Line number, code and expected output (None where the page gives none) of each python block."""
    text = page.read_text()
    fences = list(FENCE.finditer(text))
    found = []
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence["language"] != "python":
            continue
        is_told = following is not None and following["language"] == "output"
        line = text.count("\n", 0, fence.start()) + 2
        found.append((line, fence["body"], following["body"] if following is not None and is_told else None))
    return found


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code, expected in blocks(page):
        where = f"{page.name}:{line}"
        printed = run("\n" * (line - 1) + code, where, namespace)
        told = f"{where} printed\n{printed}\nthe page says\n{expected}"
        assert expected is None or matches(printed, expected), told


def test_outputs_are_compared() -> None:
    assert matches("took 3 ms\n", "took ... ms")
    assert not matches("took 3 ms and more\n", "took ... ms")
    assert not matches("", "took ... ms")

"""Charts: formats, contents, and what cannot be drawn."""

import sys
from pathlib import Path

import pytest

from benchmarks.report.chart import OURS, THEIRS, Bar, Panel, Series, speedups
from fuseplan.errors import ArgumentError

PANELS = (
    Panel("first", (Bar("a shape", (1.25, 2.5)), Bar("another", (0.75, None)))),
    Panel("second", (Bar("third", (None, 2.0)),)),
)
SERIES = (Series("ours", OURS), Series("theirs", THEIRS))


def test_an_svg_holds_the_words_and_the_numbers(tmp_path: Path) -> None:
    place = speedups(PANELS, SERIES, "A title", "a note", tmp_path / "new" / "chart.svg")
    drawn = place.read_text()
    words = ("A title", "a note", "first", "second", "a shape", "another", "ours", "theirs")
    for word in (*words, "1.25", "0.75", "2.50"):
        assert f">{word}<" in drawn, word


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    first = speedups(PANELS, SERIES, "t", "n", tmp_path / "a.svg").read_text()
    assert speedups(PANELS, SERIES, "t", "n", tmp_path / "b.svg").read_text() == first


def test_a_png_is_a_png(tmp_path: Path) -> None:
    assert speedups(PANELS, SERIES, "t", "n", tmp_path / "chart.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["chart.jpg", "chart", ".svg"])
def test_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"\.svg or \.png"):
        speedups(PANELS, SERIES, "t", "n", tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write the chart"):
        speedups(PANELS, SERIES, "t", "n", tmp_path / "file" / "chart.svg")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ArgumentError, match=r"pip install '\.\[plot\]'.*pip install matplotlib"):
        speedups(PANELS, SERIES, "t", "n", tmp_path / "chart.svg")

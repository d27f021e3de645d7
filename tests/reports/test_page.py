"""The report as a page: whole, closed in itself, escaped; and drawn by a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.graph.type import Type
from fuseplan.reports.page import page
from fuseplan.reports.report import Report
from onnx_models import cnn

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br"}


def of_network() -> Report:
    told: Report = fuseplan.onnx.load(cnn(), threads=1).report({"x": Type((1, 3, 32, 32), "f32")})
    return told


class Read(HTMLParser):
    """The elements of a page; each that is opened is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def boxes(text: str) -> dict[str, list[str]]:
    """The boxes that each box of the graph reads."""
    found = (attributes for tag, attributes in Read(text).found if tag == "details" and "id" in attributes)
    return {str(each["id"]): str(each["data-reads"]).split() for each in found}


def test_the_graph_has_a_box_a_launch_and_its_edges() -> None:
    report = of_network()
    text = page(report, "network")
    found = boxes(text)
    assert len(found) == len(report.sites) + sum(row.state == "left" for row in report.operators) == 11
    at = {name: f"s{site.number}" for site in report.sites for name in site.operators}
    assert found[at["stem"]] == []
    assert set(found[at["gate"]]) == {at["block.conv"], at["gate.conv"]}  # what it scales, and the factors
    assert found[at["classifier"]] == [at["average"]]  # through a view
    ranks = re.findall(r'data-rank="(\d+)"', text)
    assert ranks == [str(rank) for rank in range(11)]
    for reason in (*report.left, *report.ends):
        assert f"<code>{reason.code}</code>" in text
    assert all(site.template.partition("(")[0] in text for site in report.sites)


def test_the_page_needs_nothing_besides_itself() -> None:
    text = page(of_network(), "network")
    assert not re.search(r"(src|href|url|@import|fetch)\s*[=(]", text)
    assert "http" not in text


def test_names_are_escaped() -> None:
    report = of_network()
    name = '<script>"a" & b'
    first = replace(report.operators[0], name=name, line=name)
    site = replace(report.sites[0], operators=(name, *report.sites[0].operators[1:]))
    rows = (first, *(replace(row, reads=tuple(name if each == "stem" else each for each in row.reads))
                     for row in report.operators[1:]))  # fmt: skip
    text = page(replace(report, operators=rows, sites=(site, *report.sites[1:])), name)
    assert "<script>&quot;" not in text
    assert text.count("<script>") == 1
    assert len(boxes(text)) == 11


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    import onnx

    onnx.save_model(cnn(), tmp_path / "a.onnx")
    arguments = [
        "explain",
        str(tmp_path / "a.onnx"),
        "--shape",
        "x=1x3x32x32",
        "--html",
        str(tmp_path / "a.html"),
    ]
    told = CliRunner().invoke(command, arguments)
    assert told.exit_code == 0, told.output
    assert "<title>a.onnx</title>" in (tmp_path / "a.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed: chromium or google-chrome")
def test_a_browser_draws_every_edge(tmp_path: Path) -> None:
    text = page(of_network(), "network")
    path = tmp_path / "a.html"
    path.write_text(text)
    assert BROWSER is not None
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    made = subprocess.run(
        [BROWSER, *arguments, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    edges = sum(map(len, boxes(text).values()))
    drawn = re.findall(r"<path([^>]*)></path>", made.stdout)  # as the browser writes what the script made
    assert len(drawn) == edges >= 11
    assert sum("skip" in each for each in drawn) == 1  # the gate's src, some ranks above
    assert "NaN" not in "".join(drawn)

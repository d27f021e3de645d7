"""Holds docs/published.md and its charts to the results, and the published figures to their source."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import special, suite
from benchmarks.report.published import CHARTS, chart_name, charts, page, points
from benchmarks.shapes import COMBINATIONS, published, sources
from charts import words
from fuseplan.bench import results
from fuseplan.bench.results import Row

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def test_the_page_is_current() -> None:
    assert (DOCS / "published.md").read_text() == page(RESULTS), "run `make docs`"


def test_the_charts_are_current(tmp_path: Path) -> None:
    drawn = charts(RESULTS, tmp_path)
    kept = DOCS / CHARTS
    assert {place.name for place in drawn} == {place.name for place in kept.glob("published-*.svg")}
    for place in drawn:
        assert words(place) == words(kept / place.name), "run `make docs`"
        assert f"]({CHARTS}/{place.name})" in page(RESULTS)


def test_the_figures_are_those_of_the_source() -> None:
    """Its averages, printed under its tables: 1.550 and 1.171 of CBA, 2.377 and 2.855 of 13 rows of NA."""
    rows = {name: [each for each in published() if each.combination == name] for name in COMBINATIONS}
    assert [len(rows[name]) for name in COMBINATIONS] == [13, 8]
    for name, kernel, wall in (("CBA", 1.550, 1.171), ("NA", 2.377, 2.855)):
        kernels = [ratio for each in rows[name] for ratio in each.table]
        walls = [ratio for each in rows[name] for ratio in each.table_wall]
        assert len(kernels) == len(walls) == 13
        assert sum(kernels) / 13 == pytest.approx(kernel, abs=2e-3)
        assert sum(walls) / 13 == pytest.approx(wall, abs=0.01)
    assert set(sources()) == {"table", "graph"}


def row(peer: str, median: float, **more: Any) -> Row:
    case = suite.load("published_cuda").cases[0]
    machine = {"cpu": "a CPU", "gpu": "A (GPU) 1", "kind": "sm_90", "processors": 1, "driver": ""}
    base = Row("2026-01-02", "published_cuda", case.name, case.group, case.model, case.plan, peer, 1,
               median=median, machine=machine, versions={"torch": "2"}, commit="abc")  # fmt: skip
    return replace(base, **more)


ROWS = [
    row("fuseplan", 2e-5, latency=4e-5),
    row("unfused:nchw", 3e-5, latency=9e-5),
    row("unfused:nhwc", 2.5e-5, latency=3e-5),
    row("unfused:onnxruntime", 4e-5, latency=8e-5),
    row("cudnn", 1.9e-5, latency=5e-5),
]


def test_a_point_is_the_fastest_against_the_fastest() -> None:
    (point,) = points(ROWS)
    assert point.kernel == pytest.approx(1.5)
    assert point.unfused.peer == "unfused:nchw"
    assert point.anyhow == 2.5e-5, "channels last, where the plan takes channels first"
    assert point.wall == pytest.approx(2.0), "another form may be the fastest of the host's clock"
    assert point.ahead == pytest.approx(0.95)
    assert points([each for each in ROWS if not each.peer.startswith("unfused")]) == []


def test_the_page_and_the_charts_of_a_run(tmp_path: Path) -> None:
    results.append(ROWS, "published_cuda", tmp_path)
    told = page(tmp_path)
    assert "## A (GPU) 1" in told
    assert (
        "| 1024-14-14-256-1x1 | 20.0 | 30.0 (nchw) | 1.50 | 40.0 | 80.0 | 2.00 | 19.0 (cudnn) | 0.95 " in told
    )
    assert "| CBA, f32 nchw | 1 | 1.50 | 1.55 | 1.50 | 1.25 | 2.00 | 1.22 | 1.19 | 0.95 | 0.95 |" in told
    assert "- Another library is faster: 1024-14-14-256-1x1 (f32 nchw)." in told
    assert "- Fused is slower than one at a time: nowhere." in told
    (drawn,) = charts(tmp_path, tmp_path / "new")
    assert drawn.name == chart_name("A (GPU) 1", "CBA") == "published-a-gpu-1-cba.svg"
    said = words(drawn)
    assert {"1.50", "2.00", "1.22", "1.19", "fuseplan, wall time", "1024-14-14-256-1x1"} <= {*said}


def test_a_cpu_has_one_clock(tmp_path: Path) -> None:
    machine = {"cpu": "a CPU"}
    of_cpu = [replace(each, machine=machine, threads=2, latency=None, others=0.25) for each in ROWS[:2]]
    results.append(of_cpu, "published_cpu", tmp_path)
    told = page(tmp_path)
    assert "## a CPU, 2 threads" in told
    assert "| 1024-14-14-256-1x1 | 0.02 | 0.03 (nchw) | 1.50 |  |  | 1.22 |" in told
    assert "Other programs used 25% of the machine" in told
    (drawn,) = charts(tmp_path, tmp_path)
    assert "fuseplan, wall time" not in words(drawn)


def test_results_are_kept_where_a_chart_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results.append(ROWS, "published_cuda", tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(special, "CHARTS", tmp_path / "file" / "charts")
    shown: list[str] = []
    special.draw_published(tmp_path, shown.append)
    special.draw_published(None, shown.append)
    (said,) = shown
    assert said.startswith("no chart: cannot write the chart")

"""Holds docs/measured.md to the results it is written from, and the results to their form."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recorded, suite
from benchmarks.drawn import FILE
from benchmarks.report import speed, versions
from benchmarks.report.measured import SINGLE, page
from benchmarks.report.records import COMPILE
from charts import words
from fuseplan.bench import results
from fuseplan.bench.results import Row
from fuseplan.plans.plan import FusionPlan

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINE = {"cpu": "a CPU", "kind": "kind", "cores": 2, "system": "Linux"}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs" / "measured.md").read_text() == page(RESULTS), "run `make docs`"


def test_the_page_of_speed_is_current(tmp_path: Path) -> None:
    written = speed.page(RESULTS)
    assert (ROOT / "docs" / "speed.md").read_text() == written, "run `make docs`"
    drawn, kept = speed.draw(RESULTS, tmp_path / "speed.svg"), ROOT / "docs" / speed.CHART
    assert words(drawn) == words(kept), "run `make docs`"
    assert f"]({speed.CHART})" in written
    assert f"](docs/{speed.CHART})" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("place", sorted(RESULTS.glob("*.jsonl")), ids=lambda place: place.name)
def test_recorded_rows_are_stamped(place: Path) -> None:
    if place.stem in SINGLE or place.stem.startswith(COMPILE) or place.name == versions.FILE:
        records = [json.loads(line) for line in place.read_text().splitlines()]
    else:
        assert place.stem.removeprefix(FILE) in suite.names()
        rows = list(recorded.read(place))
        records = [row.to_json() for row in rows]
        assert all(str(FusionPlan.parse(plan)) == plan for plan in {row.plan for row in rows})
    for record in records:
        assert record["run"]
        assert record["commit"]
        assert record["machine"]["cpu"]
        assert record["versions"]["numpy"]


FACTS = tomllib.loads((ROOT / "benchmarks" / "facts.toml").read_text())["fact"]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: str(fact["claim"])[:50])
def test_a_fact_is_cited_where_it_says(fact: dict[str, Any]) -> None:
    assert fact["cites"] in comments(ROOT / fact["file"])


def test_every_measured_claim_is_a_fact() -> None:
    """A comment that says `measured on` some machine has its line in benchmarks/facts.toml."""
    for path in (ROOT / "src").rglob("*.py"):
        cited = [fact["cites"] for fact in FACTS if ROOT / fact["file"] == path]
        for claim in re.finditer(r"\b[Mm]easured on [A-Z]", comments(path)):
            around = comments(path)[: claim.end()]
            assert any(claim[0] in cites and around.endswith(cites[: cites.index(claim[0]) + len(claim[0])])
                       for cites in cited), f"{path.name}: {claim[0]}..."  # fmt: skip


def comments(path: Path) -> str:
    """A file's text without line breaks, indents and comment signs."""
    return " ".join(path.read_text().replace("#", " ").split())


def test_a_gpu_is_one_machine_whatever_is_beside_it() -> None:
    """A model that was measured again is told once; rows of old records do not say `ieee`."""
    gpu = MACHINE | {"gpu": "a GPU", "processors": 8, "driver": "1.0"}
    rows: tuple[dict[str, Any], ...] = ({"model": "net"}, {"model": "net", "ieee": False})
    records = [
        {"run": f"2026-01-0{day}", "machine": gpu | {"cores": day}, "commit": f"c{day}", "rows": [row]}
        for day, row in enumerate(rows, 1)
    ]
    (told,) = recorded.last_of_models(records)
    assert told["rows"] == [rows[-1] | {"commit": "c2"}]
    assert recorded.name_of(gpu) != recorded.name_of(gpu | {"driver": "2.0"})


STAMP = {"run": "2026-01-01", "machine": MACHINE, "versions": {"numpy": "2.0"}, "commit": "abc"}
RATES = {level: {"read": 1e9} for level in ("l2", "l3", "dram")}
SECONDS = {"fuseplan": 0.01, "onnxruntime": 0.02, "fuseplan f32": 0.03, "onnxruntime f32": 0.05}
QUANTIZED = {
    "model": "m u8",
    "threads": 1,
    "least": SECONDS,
    "cpu": SECONDS,
    "errors": {"fuseplan": 0.01, "onnxruntime": 0.02, "f32": 0.03},
}


def test_a_page_of_every_kind_of_result(tmp_path: Path) -> None:
    case = suite.load("quick").cases[0]
    rows = [
        Row(
            "2026-01-0" + str(day), "quick", case.name, case.group, case.model, case.plan, peer, 2,
            median=seconds, others=0.25, machine=MACHINE, versions={"numpy": "2.0"}, commit="abc",
        )
        for day, peer, seconds in ((1, "fuseplan", 9.0), (2, "fuseplan", 0.001), (2, "ncnn", 0.002))
    ]  # fmt: skip
    results.append(rows, "quick", tmp_path)
    records: dict[str, dict[str, Any]] = {
        "quantized_models": {"rows": [QUANTIZED]},
        "peaks": {"threads": 1, "flops": 1e12, "bytes_a_second": RATES},
        "footprint": {"numpy_import": 0.1, "own_import": 0.2, "installed": {"numpy": 10**6}, "total": 10**6},
        "accuracy": {
            "rows": [
                {"case": "c", "plan": "p", "inputs": "normal", "layer": 1, "peer": "ncnn", "error": 1e-6},
            ]
        },
        "choices": {
            "suites": {
                "rows:2:1": [
                    {
                        "plan": "p",
                        "choice": "a",
                        "candidates": {"a": [1e-6, 3e-6, 32], "b": [2e-6, 2e-6, 40]},
                    },
                    {"plan": "q", "choice": "a", "candidates": {"b": [2e-6, 2e-6, 40]}},
                ]
            }
        },
        "compile-quick": {"rows": [{"case": "c", "cold": 0.5, "cached": None}], "cold": 0.5, "cached": 0.25},
    }
    for name, record in records.items():
        results.append_json([{"benchmark": name, **record, **STAMP}], name, tmp_path)
    told = page(tmp_path)
    assert "## a CPU, 2 cores (kind, Linux)" in told
    assert "| 1 | 1000.0 | l2 | 1.0 |" in told
    assert (
        "| m u8 | 1 | 10.0 (10.0) | 20.0 (20.0) | 30.0 (30.0) | 50.0 (50.0) | 2.00 | 3.00 | 1.0e-02 |" in told
    )
    assert f"| {case.name} |  | 1.000 | 2.000 | 2.00 (ncnn) |" in told
    assert "9000.000" not in told, "an older run is not shown"
    assert "Other programs used 25% of the machine" in told
    assert "| together | 1.0 MB |" in told
    assert "| c | normal | 1.0e-06 |" in told
    assert "| c | 500.0 |  |" in told
    assert "| rows:2:1 | 2 | 3 | 1.50 | 1.50 | 1.50 | 0 of 1 | 1 |" in told
    assert "| `p` | 1.50 | 3.0 |" in told
    assert "| median | 500.0 | 250.0 |" in told

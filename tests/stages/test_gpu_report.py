"""The pages' sections about GPUs, from made-up results."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.report import gpu, speed
from benchmarks.report.measured import page
from benchmarks.report.records import SECTIONS
from fuseplan.bench import results
from fuseplan.bench.results import Row

MACHINE = {
    "gpu": "a GPU", "kind": "sm_90", "processors": 132, "driver": "1.2", "cpu": "a CPU", "cores": 2,
}  # fmt: skip
STAMP = {"run": "2026-01-01", "machine": MACHINE, "versions": {"numpy": "2.0"}, "commit": "abc"}


def made(name: str, group: str, times: dict[str, float]) -> list[Row]:
    case = next(each for each in suite.load(name).cases if each.group == group)
    base = Row(
        "2026-01-01", name, case.name, case.group, case.model, case.plan, "", 1,
        machine=MACHINE, versions={"numpy": "2.0"}, commit="abc",
    )  # fmt: skip
    return [replace(base, peer=peer, median=seconds, floor=1e-5) for peer, seconds in times.items()]


def test_a_suite_is_told_in_microseconds_with_its_losses(tmp_path: Path) -> None:
    rows = made("gpu_conv", "f16 nhwc", {"fuseplan": 2e-5, "cudnn": 1.9e-5, "torch": 5e-5})
    rows += made("gpu_conv", "f32 nchw", {"fuseplan": 2e-4, "cudnn": 3e-4})
    rows[0] = replace(rows[0], wall=4e-6, replay=1.8e-5)
    results.append(rows, "gpu_conv", tmp_path)
    told = page(tmp_path)
    assert "| fuseplan | 4.0 | 18.0 | 20.0 |" in told
    assert "## a GPU (sm_90, 132 multiprocessors, driver 1.2)" in told
    assert "`fuseplan bench gpu_conv --target cuda`; microseconds. 2026-01-01, commit abc" in told
    assert "**f16 nhwc**" in told
    assert "| 20.0 | 19.0 | 50.0 | 0.95 (cudnn) | 2.00 |" in told
    assert "Slower than the fastest other:\n\n- f16 nhwc, " in told
    assert "| f32 nchw | cudnn,torch | 1 | 1.50 | 1.20 | 1.50 |  | yes |" in told


def test_the_page_of_speed_has_a_row_a_group_on_gpus(tmp_path: Path) -> None:
    results.append(made("gpu_conv", "f16 nhwc", {"fuseplan": 2e-5, "cudnn": 3e-5}), "gpu_conv", tmp_path)
    told = speed.gpu_summary(tmp_path)
    assert "| a GPU |" in told
    assert "| Convolution, bias, relu, f16 nhwc | cudnn | 1.50 (1.50) |" in told
    assert "| shapes slower than the fastest other | all | 0 of 1 |" in told


def test_shapes_drawn_at_random_have_a_file_and_a_table_of_their_own(tmp_path: Path) -> None:
    """The rows of a draw tell seed and how many were measured; of a suite, one file has all draws."""
    found = suite.load("gpu_rows:3:7")
    assert (found.file, suite.load("gpu_rows").file) == ("drawn-gpu_rows", "gpu_rows")
    assert speed.drawn_summary(tmp_path) == ""
    case = next(each for each in found.cases if each.group.startswith("softmax"))
    rows = [
        replace(row, suite=found.name, case=case.name, plan=case.plan)
        for row in made("gpu_rows", "softmax", {"fuseplan": 2e-5, "torch": 3e-5})
    ]
    results.append(rows, found.file, tmp_path)
    told = speed.drawn_summary(tmp_path)
    assert "| Rows, 1 shape of seed 7, softmax | torch, torch.compile | 1.50 (1.50) |" in told
    assert "Rows" not in speed.gpu_summary(tmp_path)
    whole = page(tmp_path)
    assert "`fuseplan bench gpu_rows:3:7 --target cuda`; microseconds" in whole
    results.append(
        [replace(row, plan="bf16[2x4] -> softmax", case="2x4") for row in rows], found.file, tmp_path
    )
    assert "2x4" in page(tmp_path), "a draw of a suite that has changed since"


def test_what_was_tried_is_found_by_case_or_group(tmp_path: Path) -> None:
    place = tmp_path / "losses.toml"
    assert gpu.losses(place) == {}
    place.write_text(
        '[[loss]]\nsuite = "s"\ngroup = "g"\ncase = "c"\ntried = "this"\n'
        '[[loss]]\nsuite = "s"\ngroup = "g"\ntried = "that"\n'
    )
    assert gpu.losses(place) == {("s", "g", "c"): "this", ("s", "g", ""): "that"}


def test_what_became_of_a_test_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "losses.toml"
    place.write_text('[[failure]]\ntest = "tests/a.py::b"\ncause = "A race, put right."\n')
    known = gpu.failures(place)
    assert known == {"tests/a.py::b": "A race, put right."}
    monkeypatch.setattr(gpu, "failures", lambda: known)
    record = {"outcomes": {}, "worst_share_of_bound": {}, "failed": ["tests/a.py::b", "tests/a.py::c"]}
    lines = list(SECTIONS["device"].tables(record))
    assert lines[-2:] == ["- failed: `tests/a.py::b`. A race, put right.", "- failed: `tests/a.py::c`."]


def test_the_losses_that_are_told_are_of_shapes_that_are_measured() -> None:
    for name, group, case in gpu.losses():
        known = suite.load(name).cases
        assert any(each.group == group and case in ("", each.name) for each in known), (name, group, case)


def test_a_page_of_every_record_of_a_gpu(tmp_path: Path) -> None:
    records: dict[str, dict[str, Any]] = {
        "gpu_peaks": {"gpu": "a GPU", "bytes_a_second": {"dram": 3e12}, "flops": {"f16": 7e14}},
        "gpu_overhead": {
            "calls": [
                {"what": "torch.mm", "median": 5e-6, "least": 4e-6},
                {"what": "p", "refused": "no\nmore"},
            ],
            "loads": [
                {"plan": "q", "median": 0.02, "least": 0.01, "origin": "disk", "imported_triton": False},
                {"plan": "r", "refused": "not there"},
            ],
        },
        "device": {
            "outcomes": {"test_numeric": {"passed": 7, "failed": 1}},
            "failed": ["tests/device/test_numeric.py::x"],
            "worst_share_of_bound": {"product": 0.25},
        },
        "sanitize": {
            "found": [
                {"template": "product", "plan": "f16[8x8] -> relu", **each}
                for each in (
                    {"tool": "memcheck", "status": 0, "said": ["0 errors"]},
                    {"tool": "racecheck", "status": 9, "said": ["= 2 hazards"]},
                )
            ]
        },
        "registers": {"looked_at": 3, "found": [{"ptxas": "12.8.93", "kernels": 2, "overwriting": 1}]},
    }
    for name, record in records.items():
        results.append_json([{"benchmark": name, **record, **STAMP}], name, tmp_path)
    told = page(tmp_path)
    for line in (
        "| product of f16 matrices | 700 TFLOP/s |",
        "| ptxas | kernels | overwriting |",
        "| 12.8.93 | 2 | 1 |",
        "| copy, bytes read and written | 3000 GB/s |",
        "| torch.mm | 5.00 | 4.00 |",
        "| p | no |  |",
        "| `q` | 20.00 | 10.00 | disk, without triton imported |",
        "| `r` | not there |  |  |",
        "| test_numeric | 7 | 1 | 0 |",
        "| product | 0.25 |",
        "- failed: `tests/device/test_numeric.py::x`",
        "| product | `f16[8x8] -> relu` | clean | 2 hazards |",
    ):
        assert line in told

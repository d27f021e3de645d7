"""Reports on models: closed books, JSON that is read back and checked, attempts, differences."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fuseplan.onnx
import fuseplan.torch
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError
from fuseplan.graph.node import line_of
from fuseplan.graph.type import Type
from fuseplan.reports.difference import difference
from fuseplan.reports.report import SCHEMA, MeasuredRow, Report, read_report
from fuseplan.stores import sites
from onnx_models import cnn, mlp

TYPES = {"x": Type((1, 3, 32, 32), "f32")}
WORDS = {name: Type((1, 5, 24), "f32") for name in ("x", "r")}


def of_network() -> Report:
    told: Report = fuseplan.onnx.load(cnn(), threads=1).report(TYPES)
    return told


class Network(torch.nn.Module):  # type: ignore[misc]
    """A convolution, an operator of torch's, views, and a sum with two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.Linear(8, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        inner = torch.cumprod(self.conv(src).relu(), 1)[:, :, 0, 0]
        return (self.linear(inner) + inner).tanh() * inner.T.T


def test_a_report_is_read_back_from_its_json(tmp_path: Path) -> None:
    told = of_network()
    (tmp_path / "a.json").write_text(json.dumps(told.to_json()))
    assert read_report(tmp_path / "a.json") == told
    assert told.to_json()["schema"] == SCHEMA


def test_a_report_of_the_version_before_is_read_back(tmp_path: Path) -> None:
    """It does not tell why the next start exports the model again."""
    told = of_network()
    older = {name: each for name, each in told.to_json().items() if name != "unkept"}
    (tmp_path / "a.json").write_text(json.dumps({**older, "schema": "fuseplan.report/5"}))
    assert read_report(tmp_path / "a.json") == told


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": "fuseplan.report/1"}, f"its schema is not {SCHEMA}"),
        ({"launches": 3}, "launches is 3; want an object"),
        ({"moved_before": "much"}, "moved_before is 'much'; want a whole number"),
        ({"more": 1}, "has an unknown member 'more'"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**of_network().to_json(), **change}))
    with pytest.raises(ArgumentError, match=problem):
        read_report(tmp_path / "a.json")


def test_bytes_of_operators_and_sites() -> None:
    """An operator moves its inputs and outputs; a site the operands and ends of its plan."""
    told = of_network()
    rows = {row.name: row for row in told.operators}
    image, weight, made = 3 * 32 * 32, 16 * 3 * 7 * 7, 16 * 16 * 16
    assert rows["stem"].moved == 4 * (image + weight + 16 + made)
    assert rows["stem"].between == 4 * made
    assert rows["stem.relu"].moved == rows["stem.relu"].between == 8 * made
    stem = told.sites[0]
    assert stem.operators == ("stem", "stem.norm", "stem.relu")
    assert stem.before == sum(rows[name].moved for name in stem.operators)
    assert stem.after >= 4 * (image + weight + 16 + made)
    assert stem.between == 8 * made
    assert rows["flatten"].moved == 0
    assert told.moved_before == sum(row.moved for row in told.operators)
    left = sum(row.moved for row in told.operators if row.state == "left")
    copied = sum(each.moved for each in told.copies)
    assert told.moved_after == left + copied + sum(site.after for site in told.sites)
    assert told.copies[0].value == "x"
    assert told.copies[0].reader == stem.plan


def test_reasons_stand_once_with_the_most_bytes_first() -> None:
    told = of_network()
    for reasons in (told.left, told.ends):
        assert len({row.code for row in reasons}) == len(reasons)
        assert [row.between for row in reasons] == sorted((row.between for row in reasons), reverse=True)
    assert sum(row.count for row in told.ends) == len(told.sites)
    assert sum(row.count for row in told.left) == sum(row.state == "left" for row in told.operators)


def test_torchs_modules_have_the_same_report(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, src = Network().eval(), torch.randn(2, 4, 6, 6)
    fused = fuseplan.torch.fuse(module, src)
    told: Report = fused.report
    states = {row.name: row.state for row in told.operators}
    assert states["conv2d"] == states["relu"] == states["linear"] == "fused"
    assert states["cumprod"] == "left"
    assert states["select"] == states["permute"] == "view"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its parts
        exported = torch.export.export(module, (src,)).run_decompositions({}).graph.nodes
    called = [node.name for node in exported if node.op == "call_function"]
    assert sorted(row.name for row in told.operators) == sorted(called)
    line = next(row.line for row in told.operators if row.name == "conv2d")
    assert line.startswith("test_report.py:")
    assert "self.conv(src)" in line
    (tmp_path / "a.json").write_text(json.dumps(told.to_json()))
    assert read_report(tmp_path / "a.json") == told
    assert fused.fusion.tried("relu").attempts[0].is_site


def test_launches_of_a_torch_module_are_those_of_the_profiler() -> None:
    """Torch's profiler sees as many plans, operators and copies as the report counts."""
    torch.manual_seed(0)
    src = torch.randn(2, 4, 6, 6)
    fused = fuseplan.torch.fuse(Network().eval(), src)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        fused(src)
    names = [event.name for event in seen.events()]
    launches = fused.report.launches
    assert names.count("fuseplan::run") == launches.kernels == 2
    assert names.count("aten::cumprod") == launches.libraries["torch"] == 1
    assert names.count("aten::clone") == launches.copies


def test_lines_of_source() -> None:
    trace = (
        'File "/a/b/model.py", line 7, in forward\n    x = self.act(x)\n'
        'File "/x/torch/nn/functional.py", line 9, in relu\n    return _relu(x)'
    )
    assert line_of(trace) == "model.py:7: x = self.act(x)"
    assert line_of('File "C:\\c\\d.py", line 1, in f') == "d.py:1"
    assert line_of(None) == line_of("nothing") == ""


def test_attempts_at_an_operator() -> None:
    ours = fuseplan.onnx.load(mlp(), threads=1)
    told = ours.tried("norm", WORDS)
    assert [attempt.is_site for attempt in told.attempts] == [True]
    refused = ours.tried("down", WORDS)
    assert refused.kind == "MatMul"
    assert refused.attempts[-1].operators == ("down", "down.bias", "residual")
    network = fuseplan.onnx.load(cnn(), threads=1)
    ended = network.tried("block.relu", TYPES)
    assert "which ends here: another operator reads the value: squeeze (Glo" in str(ended)
    sums = network.tried("sums", TYPES)
    assert sums.attempts == ()
    assert sums.left.endswith("[not-in-table]")
    with pytest.raises(ArgumentError, match=r"no operator named 'steam'\. Did you mean `stem`"):
        network.tried("steam", TYPES)


def test_a_lost_fusion_is_found() -> None:
    before = of_network()
    site = next(site for site in before.sites if "block.conv" in site.operators)
    place = before.sites.index(site)
    first, *others = site.operators
    lost = replace(site, operators=(first,), seconds=site.seconds * 2)
    rows = tuple(
        replace(row, state="left", sites=(), code="dtype") if row.name in others else row
        for row in before.operators
    )
    after = replace(before, operators=rows, sites=(*before.sites[:place], lost, *before.sites[place + 1 :]))
    found = difference(before, after)
    assert [each.plan for each in found.lost] == [site.plan]
    assert found.lost[0].now == (*(f"{name}: left [dtype]" for name in others), site.plan)
    assert found.is_worse
    assert [each.operators for each in difference(after, before).gained] == [site.operators]
    assert not difference(after, before).is_worse


def test_a_slower_site_is_found() -> None:
    before = of_network()
    slow = replace(before.sites[0], seconds=before.sites[0].seconds * 1.2)
    after = replace(before, sites=(slow, *before.sites[1:]))
    assert [each.operators for each in difference(before, after).slower] == [slow.operators]
    assert difference(before, after, tolerance=0.3).slower == ()
    assert "the same fusions" in str(difference(before, before))


def test_the_command_has_the_status_of_its_finding(tmp_path: Path) -> None:
    before = of_network()
    slow = tuple(replace(site, seconds=2 * site.seconds) for site in before.sites)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, report in zip(paths, (before, replace(before, sites=slow)), strict=True):
        path.write_text(json.dumps(report.to_json()))
    worse = CliRunner().invoke(command, ["diff", *map(str, paths)])
    assert worse.exit_code == 1
    assert worse.output.count("slower: ") == len(slow)
    better = CliRunner().invoke(command, ["diff", *map(str, reversed(paths)), "--json"])
    assert better.exit_code == 0
    assert json.loads(better.output)["is_worse"] is False
    missing = CliRunner().invoke(command, ["diff", str(paths[0]), str(tmp_path / "c.json")])
    assert missing.exit_code == 2
    assert "the report cannot be read" in missing.output


def test_refusals_of_plans_are_reasons() -> None:
    """Where rules and templates refuse a plan, their code is the reason's, and each is in the attempt."""
    strict = fuseplan.onnx.load(cnn(), threads=1, accuracy=1e-12)
    left = {row.code: row for row in strict.report(TYPES).left}
    assert "stem" in left["accuracy"].cases["Conv"]
    assert left["accuracy"].remedy
    told = strict.tried("stem", TYPES)
    attempt = told.attempts[0]
    assert (attempt.is_site, attempt.code) == (False, "accuracy")
    assert {code for code, _ in attempt.refusals} > {"accuracy"}
    assert len(told.attempts) >= 3  # with the activation, without it, ..
    assert "[accuracy]" in told.left


@pytest.mark.usefixtures("resting")
def test_measured_plans_and_those_left_to_the_framework(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times and errors of a choice are in the report, and the plans that lost with their reason."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    network = cnn()
    ours = fuseplan.onnx.load(network, threads=1, choose="measured")
    cut = ours.prepare(TYPES).session.cut
    told = ours.report(TYPES)
    known = {str(site.plan): site.measured for site in cut.sites}
    assert len(cut.sites) + len(told.reverted) == len(of_network().sites)
    for row in told.sites:
        kept = known[row.plan]
        assert kept is not None
        assert row.measured is not None
        assert (row.measured.seconds, row.measured.error) == (kept.seconds[kept.plan], kept.error)
        assert row.measured.gain == kept.gain
    assert [row.plan for row in told.reverted] == [str(site.plan) for site in cut.reverted]
    states = {row.name: row for row in told.operators}
    for lost in told.reverted:
        assert {states[name].state for name in lost.operators} == {"left"}
        assert lost.code in {row.code for row in told.left}
    assert sum(row.measured is not None for row in told.sites) == str(told).count(" measured, ")
    (tmp_path / "a.json").write_text(json.dumps(told.to_json()))
    assert read_report(tmp_path / "a.json") == told


def test_measured_times_count_before_the_models() -> None:
    before = of_network()
    own = MeasuredRow("torch", 1e-5, 2e-5, 1e-7, 1e-7, 1e-6, "")
    fast, slow = (
        replace(before, sites=(replace(before.sites[0], measured=replace(own, seconds=seconds)),))
        for seconds in (1e-5, 3e-5)
    )
    assert [(each.before, each.after) for each in difference(fast, slow).slower] == [(1e-5, 3e-5)]
    assert difference(slow, fast).slower == ()
    assert "0.67 times as fast as torch, error 1.0e-07 of 1.0e-06" in str(slow)
    failed = replace(
        own, seconds=None, peer_seconds=None, error=None, said="not measured: MemoryError: told so"
    )
    told = str(replace(before, sites=(replace(before.sites[0], measured=failed),)))
    assert "      not measured: MemoryError: told so\n" in told

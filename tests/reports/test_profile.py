"""Profiles of models: every operator that runs has a time, and its bytes and operations bound it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

import fuseplan.onnx
import fuseplan.torch
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import BuildError
from fuseplan.measure.peaks import Peaks
from fuseplan.reports.profile import Profile
from onnx_models import cnn, model

IMAGE = {"x": np.random.default_rng(0).standard_normal((1, 3, 32, 32), np.float32)}
PEAKS = Peaks(
    "this", 1, 1e9, {"l2": {"copy": 1e9}, "l3": {"copy": 1e9}, "dram": {"copy": 1e9}}, 1 << 20, 1 << 24
)


def check(told: Profile) -> None:
    seconds = [row.seconds for row in told.operators]
    assert seconds == sorted(seconds, reverse=True)
    assert min(seconds) > 0
    assert sum(seconds) == pytest.approx(told.seconds)
    assert sum(row.share for row in told.operators) == pytest.approx(1)
    gains = [row.gain for row in told.plans]
    assert gains == sorted(gains, reverse=True)
    times = {row.name: row.seconds for row in told.operators}
    for row in told.plans:
        assert row.seconds == pytest.approx(sum(times[name] for name in row.operators))


def test_operators_of_an_onnx_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fuseplan.reports.profile"), "peaks_of", lambda _: PEAKS)
    told = fuseplan.onnx.load(cnn(), threads=1).profile(IMAGE)
    check(told)
    rows = {row.name: row for row in told.operators}
    assert rows.keys() == {node.name for node in cnn().graph.node} - {"flatten"}
    stem, places = rows["stem"], 16 * 16 * 16
    assert stem.flops == 2 * places * 3 * 49 + places  # and its bias
    assert (stem.bound, stem.floor) == ("compute", pytest.approx(stem.flops / 1e9))
    relu = rows["stem.relu"]
    assert (relu.flops, relu.moved, relu.bound) == (places, 8 * places, "l2")
    assert relu.floor == pytest.approx(8 * places / 1e9)
    assert rows["sums"].flops == 0  # no plan says it
    assert rows["depthwise.act"].seconds > 0  # onnxruntime writes it in other operators
    assert told.is_measured
    text = str(told)
    assert "17 operators by onnxruntime" in text
    assert f"{len(told.plans)} plans, which would save" in text


def test_an_operator_of_an_input_that_onnxruntime_takes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("fuseplan.reports.profile"), "peaks_of", lambda _: PEAKS)
    proto = model([onnx.helper.make_node("HardSwish", ["x"], ["y"], "act")], {"x": [4, 8]}, ["y"], {})
    told = fuseplan.onnx.load(proto, threads=1).profile({"x": np.ones((4, 8), np.float32)})
    assert [row.name for row in told.operators] == ["act"]
    check(told)


def test_operators_of_a_torch_module() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    told = fuseplan.torch.profile(module, torch.randn(5, 32))
    check(told)
    assert {row.name for row in told.operators} == {"linear", "gelu", "linear_1"}
    assert {row.operators for row in told.plans} == {("linear", "gelu"), ("linear_1",)}
    flops = {row.name: row.flops for row in told.operators}
    assert flops["linear_1"] == 2 * 5 * 64 * 8 + 5 * 8
    assert told.runner == "torch"


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    onnx.save_model(cnn(), path)
    arguments = ["profile", str(path), "--shape", "x=2x3x32x32", "--threads", "1"]
    made = CliRunner().invoke(command, [*arguments, "--json"])
    assert made.exit_code == 0, made.output
    told = json.loads(made.output)
    assert told["schema"] == "fuseplan.profile/1"
    assert len(told["operators"]) == 17
    shown = CliRunner().invoke(command, arguments, env={"COLUMNS": "200"})
    assert "17 operators by onnxruntime" in shown.output
    assert "depthwise.act" in shown.output
    wrong = CliRunner().invoke(command, ["profile", str(path), "--shape", "x=1x3x16x16"])
    assert wrong.exit_code == 2
    assert "got f32[1x3x16x16]; want f32[?x3x32x32]" in wrong.output


def test_onnx_runtime_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="onnxruntime is not installed"):
        fuseplan.onnx.load(cnn(), threads=1).profile(IMAGE)


def test_what_onnx_runtime_says_of_a_model_that_it_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel of Foo(1)\nand more")

    monkeypatch.setattr("onnxruntime.InferenceSession", refuses)
    with pytest.raises(BuildError, match=r"onnxruntime does not run the model: no kernel of Foo\(1\)$"):
        fuseplan.onnx.load(cnn(), threads=1).profile(IMAGE)

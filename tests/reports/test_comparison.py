"""A run beside float64: the first step that is wrong is named, and whether its plan is to blame."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.graph.place import Launch
from fuseplan.graph.session import Session
from fuseplan.reports.comparison import ALLOWED, distance
from onnx_models import cnn, model

IMAGE = {"x": np.random.default_rng(0).standard_normal((1, 3, 32, 32), np.float32)}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site of `block.conv` writes wrong values in a session."""
    right = Session._launch

    def launched(session: Session, step: Launch) -> Callable[[Any], Any]:
        call, dst = right(session, step), session._room.at(step.dst)
        is_block = any(node.origin.name == "block.conv" for node in step.site.nodes)

        def spoilt(live: Any) -> None:
            call(live)
            dst[...] += 10

        return spoilt if is_block else call

    monkeypatch.setattr(Session, "_launch", launched)


def test_a_right_model() -> None:
    found = fuseplan.onnx.load(cnn(), threads=1).compare(IMAGE)
    assert found.is_right
    assert found.first is None
    assert max(row.error for row in found.steps) < 1e-5
    assert [row.operators[-1] for row in found.steps][-1] == "sums"
    assert "steps are within the allowed error" in str(found)


def test_rounding_is_found_where_it_is_over_the_tolerance() -> None:
    found = fuseplan.onnx.load(cnn(), threads=1).compare(IMAGE, 1e-12)
    assert found.first is not None
    assert found.first == found.steps[0]
    assert found.first.operators[0] == "stem"
    assert found.first.read == 0
    assert found.first.alone == pytest.approx(found.first.error, rel=0.5)


@pytest.mark.usefixtures("wrong")
def test_the_first_wrong_step_is_named() -> None:
    """Steps behind it are wrong too; alone, its plan is right: the run is to blame."""
    found = fuseplan.onnx.load(cnn(), threads=1).compare(IMAGE)
    assert not found.is_right
    first = found.first
    assert first is not None
    assert "block.conv" in first.operators
    assert first.error > 0.1 > first.read
    assert first.alone is not None
    assert first.alone < 1e-5
    place = found.steps.index(first)
    assert all(row.error <= row.allowed for row in found.steps[:place])
    assert any(row.read > row.allowed for row in found.steps[place:])
    assert "where it reads the right values" in str(found)


@pytest.mark.usefixtures("wrong")
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    onnx.save_model(cnn(), path)
    arguments = ["compare", str(path), "--shape", "x=1x3x32x32"]
    plain = CliRunner().invoke(command, arguments)
    assert plain.exit_code == 1
    assert "WRONG" in plain.output
    assert "block.conv" not in plain.output
    bisected = CliRunner().invoke(command, [*arguments, "--bisect", "--json"])
    assert bisected.exit_code == 1
    assert "block.conv" in json.loads(bisected.output)["first"]["operators"]


def test_what_another_library_casts_is_read_in_float64_too() -> None:
    """Where takes its values in one dtype: exp's in float64, and what Cast made of f32."""
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Abs", ["wide"], ["a"]),
        helper.make_node("Cast", ["a"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Greater", ["e", "half"], ["is_large"]),
        helper.make_node("Where", ["is_large", "e", "half"], ["y"]),
    ]
    proto = model(nodes, {"x": [3, 7]}, ["y"], {})
    for each in (*proto.graph.input, *proto.graph.output):
        each.type.tensor_type.elem_type = TensorProto.FLOAT16
    given = {"x": np.random.default_rng(0).standard_normal((3, 7)).astype(np.float16)}
    assert fuseplan.onnx.load(proto, threads=1).compare(given).is_right


def test_a_step_of_i8_is_no_wrong_result() -> None:
    """A third of 7.5 is 2.5 in f32, and more in float64: 2 or 3 of the largest, 100."""
    nodes = [
        helper.make_node("Mul", ["x", "third"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    stored = {"third": np.full(1, 1 / 3, np.float32), "s": np.float32(1), "z": np.int8(0)}
    proto = model(nodes, {"x": [1, 2]}, ["y"], {name: np.asarray(each) for name, each in stored.items()})
    found = fuseplan.onnx.load(proto, threads=1).compare({"x": np.array([[7.5, 300]], np.float32)})
    assert found.outputs["y"] == (0.01, ALLOWED["i8"])
    assert (found.is_right, found.first) == (True, None)


def test_distances() -> None:
    one = np.ones(3, np.float32)
    assert distance(one, np.array([1, 1, 2.0])) == 0.5
    assert distance(one, np.array([1, 1, np.nan])) == np.inf
    assert distance(one, np.ones(4)) == np.inf
    ends = np.array([1, np.inf, np.nan])
    assert distance(ends, ends) == 0
    assert distance(np.array([1, -np.inf, np.nan]), ends) == np.inf
    assert distance(np.array([1, np.nan, np.nan]), ends) == np.inf
    assert distance(np.array([1, 2]), np.array([1, 2])) == 0
    assert distance([1], [1]) == 0

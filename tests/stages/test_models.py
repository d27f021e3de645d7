"""A model or a tensor in the place of a plan: the error says what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import helper

import fuseplan
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import FuseplanError
from onnx_models import model


class ModelProto:
    """As ONNX's is."""

    __module__ = "onnx.onnx_ml_pb2"


TAKES: tuple[Callable[[Any], object], ...] = (
    fuseplan.compile,
    fuseplan.explain,
    fuseplan.unfuse,
    fuseplan.Arguments,
    fuseplan.FusionPlan,
)


@pytest.mark.parametrize("takes", TAKES, ids=lambda value: value.__name__)
@pytest.mark.parametrize(
    ("value", "page"),
    [
        (torch.nn.Linear(64, 32), "From PyTorch"),
        (torch.nn.Sequential(), "From PyTorch"),
        (torch.nn.Linear, "From PyTorch"),
        (ModelProto(), "From ONNX"),
        ("model.onnx", "From ONNX"),
        ("nets/Model.ONNX", "From ONNX"),
        (Path("model.pt2"), "From PyTorch"),
    ],
    ids=["layer", "sequence", "class", "ONNX's", "a file of ONNX", "in capitals", "a file of torch"],
)
def test_a_model_is_told_the_way_in(takes: Callable[[Any], object], value: object, page: str) -> None:
    with pytest.raises(FuseplanError, match="A model is no plan") as refused:
        takes(value)
    assert f"The guide's page {page!r}" in str(refused.value)
    (plan,) = [line.strip() for line in str(refused.value).splitlines() if "->" in line]
    assert fuseplan.FusionPlan.parse(plan).output.shape == (8, 32)
    assert page in (Path(__file__).parents[2] / "docs" / "guide" / "README.md").read_text()


@pytest.mark.parametrize("takes", TAKES, ids=lambda value: value.__name__)
@pytest.mark.parametrize("tensor", [torch.zeros(100, 100), np.zeros((100, 100))], ids=["torch", "numpy"])
def test_a_tensor_is_not_printed(takes: Callable[[Any], object], tensor: object) -> None:
    with pytest.raises(FuseplanError, match=r"TensorSpec\.like\(tensor\)") as refused:
        takes(tensor)
    assert "0." not in str(refused.value)
    assert len(str(refused.value)) < 200


def test_other_files_hold_plans() -> None:
    with pytest.raises(FuseplanError, match=r"pathlib\.Path\('plan.txt'\)\.read_text"):
        fuseplan.compile("plan.txt")


@pytest.mark.parametrize("word", ["explain", "run"])
def test_a_command_says_that_there_is_no_file(word: str) -> None:
    told = CliRunner().invoke(command, [word, "model.onnx"])
    assert told.exit_code == 2
    assert "'model.onnx' cannot be read: No such file or directory" in told.output


@pytest.mark.parametrize("word", ["profile", "compare"])
def test_a_command_on_models_says_that_a_plan_is_none(word: str) -> None:
    told = CliRunner().invoke(command, [word, "f32[2x3] -> relu"])
    assert (told.exit_code, "want the path of an ONNX file" in told.output) == (2, True), told.output


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ("x", "--shape 'x' gives no input a shape; want such as x=1x3"),
        ("x=-1x3", "--shape 'x=-1x3' gives no input a shape"),
        ("x=3x", "--shape 'x=3x' gives no input a shape"),
        ("z=1x3", "no input is named 'z'; want of x"),
        (f"x={10**20}x3", f"f32[{10**20}x3]"),
        ("x=2x4", "got f32[2x4]; want f32[?x3]"),
    ],
)
def test_shapes_that_are_none(shape: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 3]}, ["y"], {}), path)
    for word in ("explain", "run"):
        made = CliRunner().invoke(command, [word, str(path), "--shape", shape])
        assert (made.exit_code, told in made.output) == (2, True), made.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["explain", "f32[2x8] -> relu", "--html", "page.html", "--node", "x"],
            "--node and --html: of a model alone",
        ),
        (["run", "f32[2x8] -> relu", "--shape", "x=1x3"], "--shape: of a model alone"),
        (["explain", "model.onnx", "--measure"], "--measure: of a plan alone"),
        (
            ["explain", "model.onnx", "--node", "x", "--html", "page.html"],
            "--html: of a whole model's report alone",
        ),
        (["run", "model.onnx", "--template", "direct"], "--template: of a plan alone"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(words: list[str], told: str) -> None:
    made = CliRunner().invoke(command, words)
    assert (made.exit_code, told in made.output) == (2, True), made.output


def test_a_layer_in_the_place_of_an_operator_is_told_the_way_in() -> None:
    with pytest.raises(FuseplanError, match=r"got ReLU\(\)\n  A model is no plan"):
        fuseplan.FusionPlan("f32[8x64]", torch.nn.ReLU())

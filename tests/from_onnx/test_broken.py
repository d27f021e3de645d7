"""Models of ONNX that are none: an error names the node, and what it is given."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError, BuildError, PlanError
from onnx_models import model


def test_broken_graphs_name_the_node() -> None:
    node = helper.make_node
    missing = model([node("Relu", ["q"], ["y"], "first")], {"x": [1, 4]}, ["y"], {})
    with pytest.raises(PlanError, match="first: nothing makes its input q"):
        fuseplan.onnx.load(missing).prepare()
    twice = model([node("Relu", ["x"], ["y"]), node("Neg", ["x"], ["y"], "b")], {"x": [1, 4]}, ["y"], {})
    with pytest.raises(PlanError, match=r"b \(Neg\): there is a value y already"):
        fuseplan.onnx.load(twice).prepare()
    unknown = model([node("Nonsense", ["x"], ["y"], "c")], {"x": [1, 4]}, ["y"], {})
    with pytest.raises(BuildError, match=r"nothing runs c \(Nonsense\).*: replace it in the model"):
        fuseplan.onnx.load(unknown).prepare()


@pytest.mark.parametrize(
    ("kind", "attributes", "operand"),
    [
        ("Conv", {"strides": [0, 1]}, np.zeros((4, 3, 3, 3), np.float32)),
        ("Conv", {"pads": [1]}, np.zeros((4, 3, 3, 3), np.float32)),
        ("Conv", {"kernel_shape": [5, 5]}, np.zeros((4, 3, 3, 3), np.float32)),
        ("Add", {}, np.zeros((1, 3, 8, 8), np.int64)),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [0, 0], "ceil_mode": 1}, None),
        ("Cast", {"to": 99}, None),
        ("Expand", {}, np.array([2**40, 2**40], np.int64)),
        ("MatMul", {}, np.zeros((5, 2), np.float32)),
    ],
)
def test_a_node_with_impossible_numbers_is_named(kind: str, attributes: Any, operand: Any) -> None:
    """Division by zero, an index out of range, an overflow: an error with the node and what it is given."""
    stored = {} if operand is None else {"w": operand}
    proto = model(
        [helper.make_node(kind, ["x", *stored], ["y"], "c", **attributes)], {"x": [1, 3, 8, 8]}, ["y"], stored
    )
    with pytest.raises(BuildError, match=rf"nothing runs c \({kind}\) of f32\[1x3x8x8\]"):
        fuseplan.onnx.load(proto).run(None, {"x": np.ones((1, 3, 8, 8), np.float32)})


def test_a_sparse_initializer_is_refused() -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": [1, 4]}, ["y"], {})
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    places = numpy_helper.from_array(np.zeros(1, np.int64), "places")
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    with pytest.raises(PlanError, match="s is a sparse initializer"):
        fuseplan.onnx.load(proto).prepare()


@pytest.mark.parametrize(("shape", "opset"), [([2, 4], 99), ([2**31, 2**31], 18), ([-3, 4], 18)])
def test_the_command_tells_what_it_cannot_do(shape: list[int], opset: int, tmp_path: Path) -> None:
    """ONNX Runtime takes no such opset, and nobody has arrays of such shapes."""
    path = str(tmp_path / "model.onnx")
    onnx.save(model([helper.make_node("Relu", ["x"], ["y"])], {"x": shape}, ["y"], {}, opset), path)
    made = CliRunner().invoke(command, ["run", path])
    told = {
        99: r"float64: right",
        18: r"ArgumentError: (no array of|.* is no tensor with a shape)",
    }
    assert re.search(told[opset], made.output + str(made.exception)), made.output


def test_an_input_has_the_extents_that_the_model_gives_it(tmp_path: Path) -> None:
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": ["n", 3, "m"]}, ["y"], {})
    ours = fuseplan.onnx.load(proto)
    array = np.ones((2, 3, 5), np.float32)
    ours.run(None, {"x": array})
    assert str(ours.report({"x": array})) == str(ours.report({"x": fuseplan.onnx.Type(array.shape, "f32")}))
    for shape in ((2, 4, 5), (2, 3), (2, 3, 5, 1)):
        with pytest.raises(ArgumentError, match=r"another tensor\n  got .*; want f32\[\?x3x\?\]"):
            ours.run(None, {"x": np.ones(shape, np.float32)})
    onnx.save(proto, tmp_path / "model.onnx")
    arguments = ["fuse", str(tmp_path / "model.onnx"), "-o", str(tmp_path / "none" / "made.onnx")]
    made = CliRunner().invoke(command, arguments)
    assert made.exit_code == 1
    assert made.output.endswith("made.onnx: No such file or directory\n")

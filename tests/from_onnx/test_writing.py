"""Models with their sites as functions: checked by ONNX, run by ONNX Runtime, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.graph.type import type_of
from fuseplan.onnx.writing import Written
from onnx_models import cnn, mlp, model, weights

RNG = np.random.default_rng(5)


def runs(proto: Any, given: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def check(proto: Any, given: dict[str, Any]) -> Written:
    """The fused model is right by ONNX's checker and runtime, and has the same plans."""
    types = {name: type_of(each) for name, each in given.items()}
    proto = onnx.shape_inference.infer_shapes(proto)  # the checker wants shapes of outputs
    ours = fuseplan.onnx.load(proto, threads=1)
    made: Written = ours.fused(types)
    onnx.checker.check_model(made.model, full_check=True)
    for got, want in zip(runs(made.model, given), runs(proto, given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    again = fuseplan.onnx.load(made.model, threads=1).report(types)
    assert [site.plan for site in again.sites] == [site.plan for site in ours.report(types).sites]
    return made


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 24])
def test_functions_of_every_opset(opset: int) -> None:
    if opset < 17:  # an older opset has no LayerNormalization
        node = helper.make_node
        nodes = [node("MatMul", ["x", "w"], ["m"], "product"), node("Tanh", ["m"], ["y"], "act")]
        check(model(nodes, {"x": ["n", 8]}, ["y"], {"w": weights(8, 4)}, opset), {"x": weights(3, 8)})
        return
    made = check(mlp(opset), {name: RNG.standard_normal((2, 5, 24), np.float32) for name in ("x", "r")})
    assert len(made.functions) == 4
    assert made.skipped == ()


def test_a_network_with_an_open_batch_stays_open() -> None:
    network = cnn()
    made = check(network, {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)})
    assert "conv2d_bias_relu_1" in made.functions
    assert [node.op_type for node in made.model.graph.node if node.domain != "fuseplan"] == [
        "Flatten",
        "Trilu",
    ]
    batch = {"x": RNG.standard_normal((3, 3, 32, 32), np.float32)}
    np.testing.assert_allclose(runs(made.model, batch)[0], runs(network, batch)[0], rtol=1e-5, atol=1e-6)
    (stem,) = (each for each in made.model.functions if each.name == "conv2d_bias_relu_1")
    assert [node.op_type for node in stem.node] == ["Conv", "BatchNormalization", "Relu"]
    assert stem.doc_string == made.functions[stem.name]


def test_folded_nodes_between_those_of_a_site_go_with_them() -> None:
    """What the reader takes away stands inside of the function, which else would read its own result."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["m"], "product"),
        node("Identity", ["m"], ["same"], "same"),
        node("Identity", ["w"], ["unread"], "elsewhere"),
        node("Relu", ["same"], ["y"], "act"),
    ]
    made = check(model(nodes, {"x": [3, 8]}, ["y"], {"w": weights(8, 4)}), {"x": weights(3, 8)})
    (function,) = made.model.functions
    assert [each.name for each in function.node] == ["product", "same", "act"]


def test_plans_go_on_behind_products_of_rows_between_views() -> None:
    """As PyTorch exports a layer of GPT-2: Gemm takes matrices alone. The function holds the inner view."""
    node = helper.make_node
    nodes = [
        node("LayerNormalization", ["x", "g", "b"], ["n"], "norm", axis=-1),
        node("Reshape", ["n", "rows"], ["flat"], "before"),
        node("Gemm", ["flat", "w", "c"], ["m"], "product"),
        node("Reshape", ["m", "back"], ["sums"], "behind"),
        node("Add", ["sums", "x"], ["a"], "add"),
        node("Tanh", ["a"], ["y"], "act"),
    ]
    stored = {"g": weights(8), "b": weights(8), "w": weights(8, 8), "c": weights(8)}
    stored |= {"rows": np.array([-1, 8]), "back": np.array([2, 3, 8])}
    made = check(model(nodes, {"x": [2, 3, 8]}, ["y"], stored), {"x": weights(2, 3, 8)})
    plans = ["f32[2x3x8] -> layer_norm", "f32[2x3x8] -> linear(8) -> bias -> add -> tanh"]
    assert [*made.functions.values()] == plans
    assert [each.name for each in made.model.functions[1].node] == ["product", "behind", "add", "act"]


def test_names_of_nodes_may_repeat() -> None:
    node = helper.make_node
    nodes = [node("Relu", ["x"], ["r"], "same"), node("Trilu", ["r", "axis"], ["s"], "same")]
    nodes += [node("Tanh", ["s"], ["y"], "same")]
    ours = fuseplan.onnx.load(model(nodes, {"x": [3, 8]}, ["y"], {"axis": np.int64(1)}), threads=1)
    assert [row.name for row in ours.report().operators] == ["same", "same:s", "same:y"]
    made, given = ours.fused(), {"x": weights(3, 8)}
    assert len(made.functions) == 2
    np.testing.assert_allclose(runs(made.model, given)[0], ours.exact(given)[0], rtol=1e-5)  # of other names


def test_the_command_writes_a_model(tmp_path: Path) -> None:
    path, fused = tmp_path / "a.onnx", tmp_path / "b.onnx"
    network = cnn()
    onnx.save_model(network, path)
    told = CliRunner().invoke(command, ["fuse", str(path), "-o", str(fused), "--shape", "x=1x3x32x32"])
    assert told.exit_code == 0, told.output
    assert "10 functions for 16 operators" in told.output
    given = {"x": RNG.standard_normal((2, 3, 32, 32), np.float32)}
    np.testing.assert_allclose(runs(onnx.load(str(fused)), given)[0], runs(network, given)[0], rtol=1e-5)

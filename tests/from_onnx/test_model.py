"""Models of ONNX, read, cut into plans, and run: equal to onnxruntime and to float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError
from fuseplan.graph import trial
from fuseplan.graph.trial import launch
from fuseplan.graph.type import Type, type_of
from fuseplan.graph.why import Reason, Why
from fuseplan.onnx import choosing
from fuseplan.onnx.model import OnnxModel
from fuseplan.stores import sites
from onnx_cases import cases, outcome
from onnx_models import cnn, mlp, model, positive, weights

RNG = np.random.default_rng(3)


def peer(proto: Any, given: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return list(session.run(None, given))


def check(proto: Any, given: dict[str, Any], rtol: float = 2e-5) -> OnnxModel:
    """Runs a model twice, and compares the results with onnxruntime's."""
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    for _ in range(2):
        for made, want in zip(ours.run(None, given), peer(proto, given), strict=True):
            assert made.dtype == want.dtype
            np.testing.assert_allclose(made, want, rtol=rtol, atol=rtol * max(1e-3, np.abs(want).max()))
    return ours


def plans(ours: OnnxModel, given: dict[str, Any]) -> list[str]:
    prepared = ours.prepare({name: type_of(each) for name, each in given.items()})
    return [str(site.plan) for site in prepared.session.cut.sites]


def test_a_network_of_convolutions() -> None:
    given = {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    ours = check(cnn(), given)
    assert plans(ours, given) == [
        "f32[1x3x32x32, nhwc] -> conv2d(16, kernel=7, stride=2, padding=3) -> bias -> relu",
        "f32[1x16x16x16, nhwc] -> max_pool2d(3, stride=2, padding=1)",
        "f32[1x16x8x8, nhwc] -> conv2d(16, kernel=3, padding=1) -> add -> relu",
        "f32[1x16x8x8, nhwc] -> mean((2, 3), keepdim=True)",
        "f32[1x16x1x1, nhwc] -> conv2d(16, kernel=1) -> sigmoid",
        "f32[1x16x8x8, nhwc] -> scale",
        "f32[1x16x8x8, nhwc] -> conv2d(16, kernel=3, stride=2, padding=1, groups=16) -> hardswish",
        "f32[1x16x4x4, nhwc] -> mean((2, 3), keepdim=True)",
        "f32[1x16] -> linear(10) -> bias",
        "f32[1x10] -> softmax",
    ]
    check(cnn(), {"x": RNG.standard_normal((3, 3, 32, 32), np.float32)})


@pytest.mark.parametrize("opset", [17, 24])
def test_a_feed_forward_block(opset: int) -> None:
    given = {name: RNG.standard_normal((2, 5, 24), np.float32) for name in ("x", "r")}
    ours = check(mlp(opset), given)
    found = plans(ours, given)
    assert len(found) == 4
    assert found[2].startswith('f32[2x5x24] -> linear(64) -> bias -> elementwise("')
    assert found[3] == "f32[2x5x64] -> linear(24) -> bias -> add"


def test_the_graph_is_right_in_float64() -> None:
    given = {name: RNG.standard_normal((2, 5, 24), np.float32) for name in ("x", "r")}
    ours = fuseplan.onnx.load(mlp(), threads=1)
    prepared = ours.prepare({name: type_of(each) for name, each in given.items()})
    exact = prepared.model.graph.evaluate(given)
    for made, want in zip(ours.run(None, given), exact.values(), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5)


def test_each_shape_is_compiled_once_and_kept() -> None:
    ours = fuseplan.onnx.load(mlp(), threads=1)
    types = [{name: Type((1, rows, 24), "f32") for name in ("x", "r")} for rows in (3, 4)]
    first, other, again = (ours.prepare(each) for each in (*types, types[0]))
    assert first is again is not other
    with pytest.raises(ArgumentError, match="the shape of the input 'x' is not known"):
        ours.prepare()


@pytest.mark.usefixtures("resting")
def test_sites_are_measured_beside_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    proto, given = cnn(), {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    seen: dict[str, Any] = {}
    monkeypatch.setattr(choosing, "launch", lambda site, values: seen.update(values) or launch(site, values))
    ours = fuseplan.onnx.load(proto, threads=1, choose="measured")
    made = ours.run(None, given)[0]
    np.testing.assert_allclose(made, peer(proto, given)[0], rtol=2e-5, atol=1e-6)
    cut = ours.prepare({"x": type_of(given["x"])}).session.cut
    assert len(cut.sites) + len(cut.reverted) >= 9
    for site in (*cut.sites, *cut.reverted):
        assert site.measured is not None
        assert site.measured.said == "" or site.measured.code == "slower"
        assert site.measured.peer_error is not None
        assert site.measured.peer_error < 1e-5
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(seen.keys() - given.keys()))
    values = dict(zip([each.name for each in proto.graph.output], peer(proto, given), strict=True)) | given
    assert len(seen) > 8
    for name, each in seen.items():
        np.testing.assert_allclose(each, values[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("resting")
def test_sites_that_lose_are_onnxruntimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    monkeypatch.setattr(trial, "_lost", lambda *_: Reason(Why.SLOWER, "told so"))
    proto, given = cnn(), {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    ours = fuseplan.onnx.load(proto, threads=1, choose="measured")
    np.testing.assert_allclose(ours.run(None, given)[0], peer(proto, given)[0], rtol=2e-5, atol=1e-6)
    report = ours.report({"x": type_of(given["x"])})
    assert report.launches.kernels == 0
    assert {each.code: each.count for each in report.left}["slower"] == 16
    assert report.launches.libraries["onnxruntime"] >= 16


def test_rules_name_operators_and_are_in_the_report() -> None:
    """The SiLU of each element by its own formula, in the spelling of this model."""
    nodes = [
        helper.make_node("Neg", ["x"], ["n"]),
        helper.make_node("Exp", ["n"], ["e"]),
        helper.make_node("Add", ["one", "e"], ["s"]),
        helper.make_node("Div", ["x", "s"], ["y"]),
    ]
    proto, given = (
        model(nodes, {"x": (2, 24)}, ["y"], {"one": np.ones(1, np.float32)}),
        {"x": RNG.standard_normal((2, 24), np.float32)},
    )
    rule = fuseplan.rule("x / (1 + exp(-x)) -> silu", name="stable SiLU")
    ours = fuseplan.onnx.load(proto, threads=1, rules=[rule])
    np.testing.assert_allclose(ours.run(None, given)[0], peer(proto, given)[0], rtol=2e-5, atol=1e-6)
    (site,) = ours.report().sites
    assert (site.plan, site.rules) == ("f32[2x24] -> silu", ("stable SiLU",))
    assert "by 1 rule: stable SiLU" in str(ours.report())


def test_a_file_with_data_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(cnn(), path, save_as_external_data=True, location="model.data", size_threshold=0)
    given = {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    made = fuseplan.onnx.load(path, threads=1).run(["y"], given)[0]
    np.testing.assert_allclose(made, peer(onnx.load(str(path)), given)[0], rtol=1e-4, atol=1e-6)
    (tmp_path / "model.data").rename(tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match=r"the file 'model.data', with the data of .*, is missing"):
        fuseplan.onnx.load(path)
    (tmp_path / "inner").mkdir()
    for name in ("../elsewhere", str(tmp_path / "elsewhere"), "link"):
        broken = onnx.load(str(path), load_external_data=False)
        for tensor in broken.graph.initializer:
            tensor.external_data[0].value = name
        (tmp_path / "inner" / "broken.onnx").write_bytes(broken.SerializeToString())
        if name == "link":
            (tmp_path / "inner" / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ArgumentError, match="outside of the model's folder"):
            fuseplan.onnx.load(tmp_path / "inner" / "broken.onnx")


def test_wrong_files_and_calls(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ArgumentError, match="is no ONNX model"):
        fuseplan.onnx.load(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(ArgumentError, match="it has no graph"):
        fuseplan.onnx.load(tmp_path / "empty.onnx")
    with pytest.raises(FileNotFoundError):
        fuseplan.onnx.load(tmp_path / "none.onnx")
    with pytest.raises(ArgumentError, match="want the path of an ONNX model"):
        fuseplan.onnx.load(3)
    with pytest.raises(ArgumentError, match="models run on the cpu and on GPUs"):
        fuseplan.onnx.load(cnn(), "reference")
    ours = fuseplan.onnx.load(cnn(), threads=1)
    image = np.zeros((1, 3, 32, 32), np.float32)
    for given, problem in (
        ({}, "the input 'x' is missing"),
        ({"x": image, "z": image}, "the input 'z' is not the model's"),
        ({"x": image.astype(np.float64)}, r"got f64\[1x3x32x32\]; want f32"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            ours.run(None, given)
    with pytest.raises(ArgumentError, match=r"the input 'x' is a list; want an array of f32"):
        ours.run(None, {"x": image.tolist()})
    with pytest.raises(ArgumentError, match="a dictionary of arrays by name; got a list"):
        ours.run(None, [image])
    with pytest.raises(ArgumentError, match="no output is named 'z'; want of y"):
        ours.run(["z"], {"x": image})
    with pytest.raises(ArgumentError, match=r"output_names='y' is one name; want a list: \['y'\]"):
        ours.run("y", {"x": image})


def test_nodes_may_stand_in_any_order() -> None:
    proto = mlp()
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    given = {name: RNG.standard_normal((2, 5, 24), np.float32) for name in ("x", "r")}
    want = peer(mlp(), given)[0]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(mlp().graph.initializer)
    assert fuseplan.onnx.load(proto, threads=1).run(["y"], given)[0].shape == want.shape


def test_control_flow_reads_values_from_outside() -> None:
    node = helper.make_node
    told = helper.make_tensor_value_info("t", TensorProto.FLOAT, None)
    other = helper.make_tensor_value_info("e", TensorProto.FLOAT, None)
    then = helper.make_graph([node("Add", ["l", "x"], ["t"])], "then", [], [told])
    els = helper.make_graph([node("Sub", ["l", "x"], ["e"])], "else", [], [other])
    nodes = [
        node("MatMul", ["x", "w"], ["l"], "product"),
        node("ReduceMax", ["x"], ["top"], "top", keepdims=0),
        node("Greater", ["top", "limit"], ["c"], "compare"),
        node("If", ["c"], ["y"], "branch", then_branch=then, else_branch=els),
    ]
    proto = model(nodes, {"x": [3, 4]}, ["y"], {"w": weights(4, 4), "limit": np.float32(2)})
    for size in (0.1, 10.0):
        ours = check(proto, {"x": size * RNG.standard_normal((3, 4)).astype(np.float32)})
    assert plans(ours, {"x": np.zeros((3, 4), np.float32)}) == [
        "f32[3x4] -> linear(4)",
        "f32[3x4] -> amax((0, 1))",
    ]


def test_control_flow_reads_a_value_that_another_one_stands_for() -> None:
    """An Identity keeps its name where an inner graph reads it, and what reads the branches has a type."""
    node = helper.make_node
    told, other = (helper.make_empty_tensor_value_info(name) for name in "te")
    then = helper.make_graph([node("Relu", ["same"], ["t"])], "then", [], [told])
    els = helper.make_graph([node("Neg", ["same"], ["e"])], "else", [], [other])
    nodes = [
        node("Identity", ["x"], ["same"], "identity"),
        node("If", ["c"], ["v"], "branch", then_branch=then, else_branch=els),
        node("Tanh", ["v"], ["y"], "tanh"),
    ]
    proto = model(nodes, {"x": [3, 4]}, ["y"], {"c": np.array(False)})
    ours = check(proto, {"x": RNG.standard_normal((3, 4)).astype(np.float32)})
    assert plans(ours, {"x": np.zeros((3, 4), np.float32)}) == ["f32[3x4] -> tanh"]


def test_shapes_that_data_decide_are_left_to_onnx() -> None:
    node = helper.make_node
    nodes = [
        node("Relu", ["x"], ["r"], "relu"),
        node("NonZero", ["r"], ["places"], "places"),
        node("Cast", ["places"], ["f"], "cast", to=TensorProto.FLOAT),
        node("Mul", ["f", "f"], ["y"], "square"),
    ]
    ours = check(model(nodes, {"x": [3, 4]}, ["y"], {}), {"x": RNG.standard_normal((3, 4), np.float32)})
    assert plans(ours, {"x": np.zeros((3, 4), np.float32)}) == ["f32[3x4] -> relu"]


def test_what_depends_on_shapes_and_constants_alone_is_computed_once() -> None:
    node = helper.make_node
    nodes = [
        node("Shape", ["x"], ["shape"], "shape"),
        node("Gather", ["shape", "zero"], ["n"], "rows"),
        node("Concat", ["n", "rest"], ["wanted"], "wanted", axis=0),
        node("Reshape", ["x", "wanted"], ["flat"], "flat"),
        node("Transpose", ["w"], ["t"], "transpose"),
        node("MatMul", ["flat", "t"], ["y"], "product"),
        node("Identity", ["x"], ["same"], "same"),
    ]
    stored = {"zero": np.zeros(1, np.int64), "rest": np.array([-1], np.int64), "w": weights(5, 12)}
    proto = model(nodes, {"x": ["n", 3, 4]}, ["y", "same"], stored)
    given = {"x": RNG.standard_normal((2, 3, 4), np.float32)}
    ours = check(proto, given)
    graph = ours.prepare({"x": type_of(given["x"])}).model.graph
    assert {each.name for each in graph.folded} == {"shape", "rows", "wanted", "transpose", "same"}
    assert [node.op.word for node in graph.nodes] == ["reshape", "matmul"]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes(dtype: Any) -> None:
    node = helper.make_node
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [
            node("Gemm", ["x", "w", "b"], ["l"], transB=1, alpha=0.5, beta=2.0),
            node("Elu", ["l"], ["y"], alpha=0.3),
        ],
        "model",
        [helper.make_tensor_value_info("x", element, [3, 8])],
        [helper.make_tensor_value_info("y", element, None)],
        [
            numpy_helper.from_array(weights(4, 8).astype(dtype), "w"),
            numpy_helper.from_array(positive(4).astype(dtype), "b"),
        ],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    rtol = 1e-12 if dtype == np.float64 else 3e-3
    ours = check(proto, {"x": RNG.standard_normal((3, 8)).astype(dtype)}, rtol)
    assert len(plans(ours, {"x": np.zeros((3, 8), dtype)})) == 1


def test_the_report_closes_the_books() -> None:
    """Each operator of the model is in one row, and each launch is counted."""
    types = {"x": Type((1, 3, 32, 32), "f32")}
    ours: OnnxModel = fuseplan.onnx.load(cnn(), threads=1)
    told = ours.report(types)
    assert sorted(row.name for row in told.operators) == sorted(node.name for node in cnn().graph.node)
    states = {row.name: row.state for row in told.operators}
    assert states["stem"] == states["stem.norm"] == states["gate"] == states["classifier"] == "fused"
    assert states["flatten"] == "view"
    assert {row.code: row.cases for row in told.left} == {"not-in-table": {"Trilu": ("sums",)}}
    launches = told.launches
    assert (launches.before, launches.kernels, launches.numpy) == (17, 10, 0)
    assert launches.libraries == {"onnxruntime": 1}
    session = ours.prepare(types).session
    steps = session.placement.steps
    assert len(steps) == launches.after == launches.kernels + launches.numpy + launches.copies + 1
    assert len(told.copies) == launches.copies
    after = ours.report(types)
    assert after.launches.libraries == {"onnxruntime": 1}
    assert "1 x not-in-table, 40 B: the operator has no row in the table" in str(after)
    assert after.operators[0].sites == (1,)


def test_arithmetic_of_no_plan_is_onnx_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that plans do not take; NumPy computes it where ONNX Runtime is not installed."""
    nodes = [helper.make_node("Relu", ["x"], ["r"], "relu"), helper.make_node("Tanh", ["r"], ["y"], "tanh")]
    proto, given = model(nodes, {"x": [2] * 6}, ["y"], {}), {"x": RNG.standard_normal([2] * 6, np.float32)}
    ours = check(proto, given)
    types = {"x": type_of(given["x"])}
    told = ours.report(types)
    assert (told.launches.numpy, told.launches.libraries) == (0, {"onnxruntime": 2})
    assert [row.code for row in told.left] == ["shape"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    without: OnnxModel = fuseplan.onnx.load(proto)
    np.testing.assert_allclose(without.run(None, given)[0], ours.run(None, given)[0], rtol=1e-6)
    assert without.report(types).launches.numpy == 2


@pytest.mark.usefixtures("resting")
def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    path = tmp_path / "network.onnx"
    onnx.save_model(cnn(), path)
    told = CliRunner().invoke(command, ["explain", str(path), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["launches"]["before"] == 17
    shaped = CliRunner().invoke(command, ["explain", str(path), "--shape", "x=2x3x32x32"])
    first = "f32[2x3x32x32, nhwc] -> conv2d(16, kernel=7, stride=2, padding=3) -> bias -> relu"
    assert first in " ".join(shaped.output.split())
    ran = CliRunner().invoke(command, ["run", str(path), "--threads", "1", "--choose", "measured"])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "cache" / sites.FILE).exists()
    assert "beside onnxruntime: right" in ran.output
    wrong = CliRunner().invoke(command, ["explain", str(path), "--shape", "z=1"])
    assert wrong.exit_code == 2
    assert "no input is named 'z'; want of x" in wrong.output


# Of ONNX's own tests of single operators; benchmarks/onnx_node_tests.py runs all 1,884.
MODULES = (
    "ceil", "clip", "flatten", "floor", "gelu", "gemm", "hardswish", "maxpool", "reduce_log_sum",
    "reducel1", "reducel2", "reducesumsquare", "rnn", "scan", "selu", "softmax", "squeeze", "swish",
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # the package's cases compute infinities on the way
@pytest.mark.parametrize("module", MODULES)
def test_onnx_tests_of_operators(module: str) -> None:
    found = cases(module)
    assert found
    wrong = {case.name: outcome(case)[0] for case in found}
    assert {name: told for name, told in wrong.items() if told} == {}

"""The operators of a model that no plan computes: ONNX Runtime, else ONNX's reference evaluator, and why."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.errors import ArgumentError, BuildError
from fuseplan.graph.type import type_of
from fuseplan.onnx.model import OnnxModel
from fuseplan.onnx.runtime import session_of
from fuseplan.system import limits
from onnx_models import cnn, mlp, model, weights

RNG = np.random.default_rng(5)


def test_without_onnx_runtime_the_reference_evaluator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(cnn(), threads=1)
    (made,), (exact,) = ours.run(None, given), ours.exact(given)
    np.testing.assert_allclose(made, exact, rtol=1e-5)
    ((name, count),) = ours.report({"x": type_of(given["x"])}).launches.libraries.items()
    assert (name.split(":")[0], count) == ("onnx's reference evaluator (onnxruntime", 1)
    assert "onnxruntime is not installed" in name
    with pytest.raises(BuildError, match="onnxruntime is not installed"):
        ours.peer(given)


@pytest.mark.parametrize("peer", ["onnxruntime", "float64"])
def test_a_run_judges_each_output_by_its_own_dtype(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside float64, and no output by the bound of another one of fewer bits."""
    find = importlib.util.find_spec
    missing = lambda name: None if (name, peer) == ("onnxruntime", "float64") else find(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", missing)
    nodes = [
        helper.make_node("Tanh", ["x"], ["y"]),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT16),
    ]
    proto = model(nodes, {"x": [2, 3]}, ["y", "z"], {})
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save_model(proto, tmp_path / "m.onnx")
    told = CliRunner().invoke(command, ["run", str(tmp_path / "m.onnx"), "--json"])
    found = json.loads(told.stdout)
    assert (told.exit_code, found["peer"], found["right"], found["allowed"]) == (0, peer, True, 1e-3)
    if peer == "float64":
        assert "onnxruntime is not installed: `pip install onnxruntime`" in told.stderr


def test_the_types_of_onnx_runtimes_own_operators_are_known() -> None:
    """ONNX does not define them, so ONNX Runtime tells the types: plans begin behind such an operator."""
    nodes = [
        helper.make_node("BiasGelu", ["x", "b"], ["g"], "gelu", domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "w"], ["m"], "product"),
        helper.make_node("Relu", ["m"], ["y"], "relu"),
    ]
    proto = model(nodes, {"x": [3, 8]}, ["y"], {"b": weights(8), "w": weights(8, 4)})
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    given = {"x": RNG.standard_normal((3, 8), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=1e-5, atol=1e-6)
    assert [str(site.plan) for site in ours.report().sites] == ["f32[3x8] -> linear(4) -> relu"]
    assert ours.report().launches.libraries == {"onnxruntime": 1}


def test_an_operator_that_onnx_runtime_refuses_takes_no_neighbours_with_it() -> None:
    """ONNX Runtime runs what it takes, and the report tells its reason for the rest."""
    nodes = [
        helper.make_node("Trilu", ["x", "axis"], ["a"], "before"),
        helper.make_node("MaxUnpool", ["a", "places", "shape"], ["b"], "unpool", kernel_shape=[1, 2]),
        helper.make_node("Trilu", ["b", "axis"], ["c"], "behind"),
        helper.make_node("Trilu", ["c", "axis"], ["y"], "last"),
    ]
    stored = {"axis": np.array(3), "shape": np.array([1, 2, 4, 8])}
    stored["places"] = 2 * np.arange(24).reshape(1, 2, 3, 4) % 24
    given = {"x": RNG.standard_normal((1, 2, 3, 4), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": [1, 2, 3, 4]}, ["a", "y"], stored), threads=1)
    for made, exact in zip(ours.run(None, given), ours.exact(given), strict=True):
        np.testing.assert_allclose(made, exact, rtol=1e-5, atol=1e-5)
    assert ours.report().launches.libraries == {
        "onnxruntime": 3,
        "onnx's reference evaluator (onnxruntime: BuildError: its MaxUnpool gives another result than "
        "ONNX defines)": 1,
    }


def test_a_run_that_fails_goes_to_the_reference_evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr("onnxruntime.InferenceSession.run", broken)
    given = {"x": RNG.standard_normal((1, 3, 32, 32), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(cnn(), threads=1)
    np.testing.assert_allclose(ours.run(None, given)[0], ours.exact(given)[0], rtol=1e-5)


def peer(proto: Any, given: dict[str, Any]) -> list[Any]:
    return list(onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given))


@pytest.mark.parametrize(
    "attributes",
    [
        {"group": 2},
        {"strides": [2, 3], "pads": [1, 0, 0, 1]},
        {"strides": [2, 2], "output_padding": [1, 1], "dilations": [2, 1]},
    ],
)
def test_transposed_convolutions_are_onnx_runtimes(attributes: dict[str, Any]) -> None:
    features = 4 // attributes.get("group", 1)
    nodes = [helper.make_node("ConvTranspose", ["x", "w"], ["y"], "up", **attributes)]
    proto = model(nodes, {"x": [2, 4, 5, 6]}, ["y"], {"w": weights(4, features, 3, 3)})
    given = {"x": RNG.standard_normal((2, 4, 5, 6), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    (made,), (want,) = ours.run(None, given), peer(proto, given)
    np.testing.assert_allclose(made, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    told = ours.report()
    assert not told.launches.libraries
    assert not told.left


def test_a_large_weight_may_be_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose weight is a lookup's table too: the turned weight is the table's own memory."""
    monkeypatch.setattr(limits, "FOLDED_BYTES", 0)
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["found"], "lookup"),
        node("Add", ["x", "found"], ["sum"], "sum"),
        node("Transpose", ["table"], ["turned"], "turn", perm=[1, 0]),
        node("MatMul", ["sum", "turned"], ["y"], "head"),
    ]
    table = weights(11, 8)
    proto = model(nodes, {"x": [3, 8]}, ["y"], {"table": table, "ids": np.array([4, 0, 10])})
    given = {"x": RNG.standard_normal((3, 8), np.float32)}
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    np.testing.assert_allclose(ours.run(None, given)[0], ours.exact(given)[0], rtol=1e-5, atol=1e-6)
    prepared = ours.prepare({"x": type_of(given["x"])})
    assert str(prepared.session.cut.sites[-1].plan) == "f32[3x8] -> linear(11)"
    graph = prepared.model.graph
    assert np.shares_memory(graph.constants["turned"], graph.constants["table"])


def test_threads_of_onnxruntime_leave_the_cores_to_ours() -> None:
    """They wait without spinning between two of its calls: kernels run there."""
    options = session_of(mlp(), threads=2).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_onnx_runtime_is_exact_where_the_reference_evaluator_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of onnx 1.23 takes no axis from the end, which BERT's models have."""
    node = helper.make_node("GatherElements", ["x", "places"], ["a"], "pick", axis=-1)
    nodes = [node, helper.make_node("Mul", ["a", "a"], ["y"])]
    places = RNG.integers(0, 7, (3, 5, 2))
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": [3, 5, 7]}, ["y"], {"places": places}), threads=1)
    given = {"x": RNG.standard_normal((3, 5, 7), np.float32)}
    want = np.take_along_axis(given["x"].astype(np.float64), places, -1) ** 2
    np.testing.assert_allclose(ours.exact(given)[0], want)
    assert "right" in str(ours.compare(given))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match=r"evaluates pick \(GatherElements\)\n  onnxruntime: .*\n  onnx's "):
        ours.exact(given)


@pytest.mark.parametrize(
    ("kind", "attributes", "opset", "want"),
    [
        ("Softmax", {"axis": 0}, 11, np.full((2, 2), 0.25)),
        ("Hardmax", {"axis": 0}, 13, np.array([[1.0, 1.0], [0.0, 0.0]])),
        ("LpNormalization", {"axis": 1, "p": 1}, 13, np.full((2, 2), 0.5)),
    ],
)
def test_the_reference_evaluator_is_asked_for_no_wrong_results(
    kind: str, attributes: dict[str, int], opset: int, want: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of onnx 1.23 has one Softmax for all opsets: constants, runs and float64 are ONNX Runtime's."""
    node = helper.make_node(kind, ["x"], ["y"], "n", **attributes)
    given = {"x": np.ones((2, 2), np.float32)}
    proto = model([node], {"x": [2, 2]}, ["y"], {}, opset)
    stored = model([helper.make_node("Add", ["y", "z"], ["w"]), node], {"z": [2, 2]}, ["w"], given, opset)
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    np.testing.assert_allclose(ours.exact(given)[0], want)
    folded = fuseplan.onnx.load(stored, threads=1).run(None, {"z": np.zeros((2, 2), np.float32)})
    np.testing.assert_allclose(folded[0], want)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    problem = f"onnx's reference evaluator: BuildError: its {kind} gives another result than ONNX defines"
    with pytest.raises(BuildError, match=problem):
        fuseplan.onnx.load(proto, threads=1).run(None, given)


def test_transposed_convolutions_of_groups_are_not_the_reference_evaluators() -> None:
    """ONNX Runtime has none of f64, and those of onnx 1.23 mix the groups."""
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], "n", group=2)
    proto = model([node], {"x": [1, 2, 3], "w": [2, 1, 2]}, ["y"], {})
    for each in (*proto.graph.input, *proto.graph.output):
        each.type.tensor_type.elem_type = TensorProto.DOUBLE
    given = {"x": RNG.standard_normal((1, 2, 3)), "w": RNG.standard_normal((2, 1, 2))}
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    want = np.stack([np.convolve(given["x"][0, each], given["w"][each, 0]) for each in range(2)])[None]
    np.testing.assert_allclose(ours.exact(given)[0], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(BuildError, match="its ConvTranspose gives another result than ONNX defines"):
        ours.run(None, given)


def test_quantized_models_before_opset_19_have_a_meaning_in_float64() -> None:
    """The reference evaluator lacks their DequantizeLinear, and ONNX Runtime takes it in float32 alone."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    stored = {"s": np.array(0.05, np.float32), "z": np.array(3, np.uint8)}
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": ["n", 7]}, ["y"], stored, opset=17), threads=1)
    given = {"x": RNG.standard_normal((3, 7), np.float32)}
    (exact,) = ours.exact(given)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(
        exact, 0.05 * np.maximum(np.round(given["x"] / np.float32(0.05)), 0), atol=1e-6
    )
    assert "right" in str(ours.compare(given))
    with pytest.raises(ArgumentError, match=r"give it, as in \{'x': fuseplan.onnx.Type\(\(1, 7\), 'f32'\)\}"):
        ours.report()


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_split_may_leave_out_a_result(is_inside: bool) -> None:
    """onnxruntime 1.32 ends the process there."""
    nodes = [
        helper.make_node("Split", ["x"], ["a", "", "c"], axis=1, num_outputs=3),
        helper.make_node("Concat", ["a", "c"], ["y"], axis=1),
    ]
    if is_inside:
        branch = helper.make_graph(nodes, "branch", [], [onnx.ValueInfoProto(name="y")])
        nodes = [helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)]
    proto = model(nodes, {"x": (2, 6), "yes": ()}, ["y"], {})
    for each in (*proto.graph.input, *proto.graph.output):
        is_condition = each.name == "yes"
        each.type.tensor_type.elem_type = TensorProto.BOOL if is_condition else TensorProto.INT64
    x = np.arange(12).reshape(2, 6)
    (made,) = fuseplan.onnx.load(proto).run(None, {"x": x, "yes": np.array(True)})
    np.testing.assert_array_equal(made, x[:, [0, 1, 4, 5]])


def test_a_call_may_give_tensors_that_the_model_has() -> None:
    """An initializer that is listed as an input is what the input is unless given."""
    nodes = [helper.make_node("MatMul", ["x", "v"], ["h"]), helper.make_node("Add", ["h", "w"], ["y"])]
    stored = {"v": weights(4, 4), "w": weights(4, 4)}
    shapes = {"x": (4, 4), "v": (4, 4), "w": (4, 4)}
    ours, x, other = fuseplan.onnx.load(model(nodes, shapes, ["y"], stored)), weights(4, 4), weights(4, 4)
    assert [*ours.inputs] == ["x"]
    for given in ({}, {"v": other}, {"w": other}):
        now = stored | given
        (made,) = ours.run(None, {"x": x, **given})
        np.testing.assert_allclose(made, x @ now["v"] + now["w"], rtol=1e-5, atol=1e-5)


def test_operators_whose_results_nobody_reads_are_not_run() -> None:
    names = {"LpNormalization": ("x", "a"), "Sin": ("a", "b"), "Relu": ("x", "y")}
    nodes = [helper.make_node(kind, [src], [dst]) for kind, (src, dst) in names.items()]
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": [2, 3]}, ["y"], {}), threads=1)
    (made,) = ours.run(None, {"x": np.full((2, 3), -1, np.float32)})
    assert (made == 0).all()


@pytest.mark.parametrize("condition", ["", "true"])
def test_a_loop_on_constants_is_computed_with_what_its_body_reads(condition: str) -> None:
    """ONNX's reference evaluator takes no condition for one that is false, and runs no such loop."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Mul", ["s", "w"], ["t"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [2]),
        ],
        [
            helper.make_tensor_value_info("d", TensorProto.BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [2]),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["count", condition, "ones"], ["p"], body=body),
        helper.make_node("Add", ["x", "p"], ["y"]),
    ]
    stored = {"count": np.array(3), "true": np.array(True), "ones": np.ones(2, np.float32)}
    stored["w"] = np.array([2, 3], np.float32)
    ours: OnnxModel = fuseplan.onnx.load(model(nodes, {"x": [2]}, ["y"], stored), threads=1)
    (made,) = ours.run(None, {"x": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(made, [8, 27])
    assert [each.origin.kind for each in ours.prepare().model.graph.nodes] == ["Add"]


def test_corners_are_aligned_by_the_length_of_the_result() -> None:
    """5 elements of a scale of 1.5 are 7; ONNX's reference evaluator takes 7.5 for it."""
    node = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="align_corners"
    )
    proto = model([node], {"x": [1, 1, 5]}, ["y"], {"s": np.array([1, 1, 1.5], np.float32)})
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    given = {"x": np.arange(5, dtype=np.float32).reshape(1, 1, 5)}
    for made in (ours.run(None, given)[0], ours.exact(given)[0]):
        np.testing.assert_allclose(made[0, 0], np.arange(7) * 4 / 6, atol=1e-6)
    assert ours.report().launches.libraries == {"onnxruntime": 1}


def test_the_types_of_operators_that_onnx_calls_deprecated_are_known() -> None:
    """An operator behind GroupNormalization of opset 18 ran nowhere: nothing told the type that it reads."""
    nodes = [
        helper.make_node("GroupNormalization", ["x", "s", "b"], ["n"], num_groups=1),
        helper.make_node("MaxPool", ["n"], ["y", "places"], kernel_shape=[2, 2], ceil_mode=1),
    ]
    proto = model(nodes, {"x": [1, 2, 4, 4], "s": [1], "b": [1]}, ["y"], {})
    given = {"x": RNG.standard_normal((1, 2, 4, 4), np.float32), "s": weights(1), "b": weights(1)}
    ours: OnnxModel = fuseplan.onnx.load(proto, threads=1)
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=1e-5, atol=1e-6)


def test_operators_inside_of_others_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX's reference evaluator gave a branch's Hardmax along all axes from the first."""
    branch = helper.make_graph(
        [helper.make_node("Hardmax", ["x"], ["h"], axis=0)], "branch", [], [onnx.ValueInfoProto(name="h")]
    )
    nodes = [helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)]
    proto = model(nodes, {"x": [2, 2]}, ["y"], {"yes": np.array(True)})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="its Hardmax gives another result than ONNX defines"):
        fuseplan.onnx.load(proto, threads=1).run(None, {"x": np.ones((2, 2), np.float32)})

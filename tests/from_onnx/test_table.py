"""The table of ONNX's operators, for each opset."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import fuseplan.onnx
from onnx_models import RNG, model, positive, weights

KINDS = ("Relu", "LeakyRelu", "Softplus", "Softsign", "Elu", "Sigmoid", "Neg", "Exp", "Tanh")


@pytest.mark.parametrize("opset", [9, *range(13, 25)])
def test_rows_hold_for_every_opset(opset: int) -> None:
    """Operators whose version is older than opset 13, and of opset 9, which older models have."""
    ends = ["x", *(f"v{place}" for place in range(1, len(KINDS))), "y"]
    nodes = [
        helper.make_node(kind, [src], [dst], kind)
        for kind, src, dst in zip(KINDS, ends[:-1], ends[1:], strict=True)
    ]
    ours = fuseplan.onnx.load(model(nodes, {"x": [3, 8]}, ["y"], {}, opset), threads=1)
    assert {row.name: row.state for row in ours.report().operators} == dict.fromkeys(KINDS, "fused")
    given = {"x": weights(3, 8)}
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum"])
@pytest.mark.parametrize("opset", [11, 13, 18])
def test_formulas_around_a_sum_are_one_plan(kind: str, opset: int) -> None:
    """The axes are an attribute before opset 18."""
    told = {} if opset == 18 else {"axes": [-1, 1]}
    node = helper.make_node(kind, ["x", "axes"] if opset == 18 else ["x"], ["y"], kind, keepdims=0, **told)
    stored = {"axes": np.array([-1, 1])} if opset == 18 else {}
    ours = fuseplan.onnx.load(model([node], {"x": [3, 4, 5]}, ["y"], stored, opset), threads=1)
    assert len(ours.report().sites) == 1
    given = {"x": positive(3, 4, 5)}
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["Round", "Floor", "Ceil", "Sign", "Max", "Min", "Div"])
def test_elements_that_are_no_numbers(kind: str) -> None:
    """Zeros, ties, infinities and NaN are those of ONNX Runtime; a second tensor is read in the same plan."""
    inputs = ["x", "z"] if kind in ("Max", "Min", "Div") else ["x"]
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node(kind, ["n", *inputs[1:]], ["y"])]
    ours = fuseplan.onnx.load(model(nodes, {name: [2, 6] for name in inputs}, ["y"], {}, 18), threads=1)
    assert len(ours.report().sites) == 1
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0, 0.5], [1.5, 2.5, -2.5, 3.0, 0.1, -7.0]], np.float32)
    given = {name: np.roll(x, place) for place, name in enumerate(inputs)}
    np.testing.assert_array_equal(ours.run(None, given)[0], ours.peer(given)()[0])


@pytest.mark.parametrize(
    ("kind", "opset", "numbers", "attributes"),
    [
        ("InstanceNormalization", 13, 6, {}),
        ("InstanceNormalization", 22, 6, {"epsilon": 0.1}),
        ("GroupNormalization", 18, 3, {"num_groups": 3}),
        ("GroupNormalization", 21, 6, {"num_groups": 3, "epsilon": 0.1}),
    ],
)
def test_norms_of_channels(kind: str, opset: int, numbers: int, attributes: dict[str, object]) -> None:
    """Before opset 21 GroupNormalization has a number for each group."""
    nodes = [helper.make_node(kind, ["x", "s", "b"], ["n"], "norm", **attributes),
             helper.make_node("Relu", ["n"], ["y"], "relu")]  # fmt: skip
    constants = {"s": weights(numbers), "b": weights(numbers)}
    ours = fuseplan.onnx.load(model(nodes, {"x": [2, 6, 5, 7]}, ["y"], constants, opset), threads=1)
    assert {row.name: row.state for row in ours.report().operators} == {"norm": "fused", "relu": "fused"}
    given = {"x": weights(2, 6, 5, 7)}
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(2, 8, 8, 8), (4, 7, 1), (5, 8, 8)])
def test_a_product_of_rows_with_a_constant_for_each_element(shape: tuple[int, ...]) -> None:
    """With channels first the product would be along another axis."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "c"], ["y"])]
    stored = {"w": weights(shape[-1], shape[-1]), "c": weights(*shape)}
    ours = fuseplan.onnx.load(model(nodes, {"x": shape}, ["y"], stored), threads=1)
    given = {"x": weights(*shape)}
    np.testing.assert_allclose(ours.run(None, given)[0], ours.peer(given)()[0], rtol=2e-5, atol=2e-6)
    assert [row.state for row in ours.report().operators] == ["fused", "fused"]


def test_numbers_in_f64_are_those_of_files() -> None:
    """ONNX's numbers are f32, its defaults too: an epsilon of 1e-5 is 2.5e-13 away from that in f64."""
    for attributes in ({}, {"epsilon": 1e-5}):
        node = helper.make_node("LayerNormalization", ["x", "s"], ["y"], **attributes)
        proto = model([node], {"x": [4, 6]}, ["y"], {"s": weights(6).astype(np.float64)})
        for each in (*proto.graph.input, *proto.graph.output):
            each.type.tensor_type.elem_type = TensorProto.DOUBLE
        x = 1e-3 * np.random.default_rng(0).standard_normal((4, 6))  # none lies near a row's mean
        ours = fuseplan.onnx.load(proto, threads=1)
        (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": x})
        np.testing.assert_allclose(ours.run(None, {"x": x})[0], want, rtol=1e-13)
        assert ours.report().operators[0].state == "fused"


@pytest.mark.parametrize(
    ("shape", "features"), [((1, 3, 1, 2), 1), ((1, 3, 1, 1), 4), ((2, 3, 1, 2), 3), ((1, 3, 3, 3), 4)]
)
def test_a_product_s_features_are_no_channels_of_a_norm_behind_it(
    shape: tuple[int, ...], features: int
) -> None:
    """Batch normalization scales axis 1 there, and the product's features are its last axis."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["m"], kernel_shape=[1, 1]),  # names the axes of an image
        helper.make_node("MatMul", ["m", "w"], ["p"]),
        helper.make_node("BatchNormalization", ["p", "a", "b", "c", "d"], ["y"]),
    ]
    stored = {"w": weights(shape[-1], features), **{name: positive(3) for name in "abcd"}}
    proto = model(nodes, {"x": shape}, ["y"], stored)
    given = {"x": RNG.standard_normal(shape, np.float32)}
    (want,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given)
    np.testing.assert_allclose(fuseplan.onnx.load(proto, threads=1).run(None, given)[0], want, rtol=2e-5)

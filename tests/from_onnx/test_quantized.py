"""What ONNX Runtime is kept from writing anew in the operators of quantized models that no plan computes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

import fuseplan.onnx
from onnx_models import model


def test_quantizations_are_those_of_the_model() -> None:
    """ONNX Runtime would leave the first of two out, and quantize weights of f32 behind a quantization."""
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("QuantizeLinear", ["d", "t", "z"], ["r"]),
        node("DequantizeLinear", ["r", "t", "z"], ["e"]),
        node("Conv", ["e", "w"], ["c"]),
        node("QuantizeLinear", ["c", "s", "z"], ["p"]),
        node("DequantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    weight = np.array([1, 0.0039], np.float32).reshape(2, 1, 1, 1)  # of which 127 steps leave nothing
    stored = {"s": np.float32(1 / 32), "t": np.float32(1 / 21), "z": np.array(128, np.uint8), "w": weight}
    x = np.arange(-12, 12, dtype=np.float32).reshape(1, 1, 4, 6) / 8
    made = fuseplan.onnx.load(model(nodes, {"x": x.shape}, ["c", "e", "y"], stored), threads=1).run(
        None, {"x": x}
    )
    twice = np.round(np.round(x * 32) / 32 * 21) / 21
    for got, want in zip(made, (twice * weight[:, 0], twice), strict=False):
        np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-6)
    last = fuseplan.onnx.load(model(nodes, {"x": x.shape}, ["y"], stored), threads=1).run(None, {"x": x})
    np.testing.assert_allclose(last[0], np.round(made[0] * 32) / 32, atol=1e-6)


def test_inner_graphs_read_dequantized_values_and_views_of_them() -> None:
    """ONNX Runtime's own rewriting of such a model ends the process."""
    node, info = helper.make_node, helper.make_tensor_value_info
    inner = [
        node("Add", ["c", "d"], ["a"]),
        node("Sub", ["a", "e"], ["n"]),
        node("Identity", ["go"], ["more"]),
    ]
    flag, value = (TensorProto.BOOL, list[int]()), (TensorProto.FLOAT, [3])
    starts = [info("turn", TensorProto.INT64, []), info("go", *flag), info("c", *value)]
    ends = [info("more", *flag), info("n", *value)]
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("Squeeze", ["d"], ["e"]),
        node("Loop", ["turns", "", "e"], ["y"], body=helper.make_graph(inner, "body", starts, ends)),
    ]
    stored = {"s": np.float32(1 / 8), "z": np.array(9, np.uint8), "turns": np.array(2)}
    x = np.arange(3, dtype=np.float32)
    made = fuseplan.onnx.load(model(nodes, {"x": [3]}, ["d", "e", "y"], stored), threads=1).run(
        None, {"x": x}
    )
    for each in made:
        np.testing.assert_array_equal(each, x)


def test_a_pool_of_dequantized_i8_runs() -> None:
    """ONNX Runtime writes the quantization anew, and without its removal of pairs refuses what it wrote."""
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("MaxPool", ["d"], ["y"], kernel_shape=[2, 2], auto_pad="SAME_LOWER"),
    ]
    stored = {"s": np.float32(1 / 8), "z": np.array(1, np.int8)}
    x = np.arange(-10, 10, dtype=np.float32).reshape(1, 1, 4, 5) / 8
    proto = model(nodes, {"x": x.shape}, ["y"], stored, 21)
    (made,) = fuseplan.onnx.load(proto, threads=1).run(None, {"x": x})
    np.testing.assert_array_equal(made, x)

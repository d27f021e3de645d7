"""Small models of ONNX, made by its helper, with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)


def weights(*shape: int) -> Any:
    """Normal values, which keep the size of a sum over all axes but the first."""
    fan = int(np.prod(shape[1:])) if len(shape) > 1 else 1
    return (RNG.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def positive(*shape: int) -> Any:
    """Values from 0.5 to 1.5."""
    return RNG.uniform(0.5, 1.5, shape).astype(np.float32)


def model(
    nodes: Sequence[Any],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    stored: Mapping[str, Any],
    opset: int = 18,
) -> Any:
    """A model of nodes, f32 inputs, and initializers."""
    graph = helper.make_graph(
        nodes,
        "model",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def cnn() -> Any:
    """A small residual network: stem, pool, a residual block, squeeze-and-excite, classifier."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], "stem", strides=[2, 2], pads=[3, 3, 3, 3]),
        node("BatchNormalization", ["c1", "g", "b", "m", "v"], ["n1"], "stem.norm"),
        node("Relu", ["n1"], ["r1"], "stem.relu"),
        node("MaxPool", ["r1"], ["p1"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Conv", ["p1", "w2"], ["c2"], "block.conv", pads=[1, 1, 1, 1]),
        node("Add", ["c2", "p1"], ["a1"], "block.add"),
        node("Relu", ["a1"], ["r2"], "block.relu"),
        node("GlobalAveragePool", ["r2"], ["squeezed"], "squeeze"),
        node("Conv", ["squeezed", "w4"], ["c4"], "gate.conv"),
        node("Sigmoid", ["c4"], ["s4"], "gate.sigmoid"),
        node("Mul", ["r2", "s4"], ["gated"], "gate"),
        node("Conv", ["gated", "wd"], ["cd"], "depthwise", group=16, pads=[1, 1, 1, 1], strides=[2, 2]),
        node("HardSwish", ["cd"], ["hd"], "depthwise.act"),
        node("GlobalAveragePool", ["hd"], ["pooled"], "average"),
        node("Flatten", ["pooled"], ["flat"], "flatten"),
        node("Gemm", ["flat", "w3", "b3"], ["logits"], "classifier", transB=1),
        node("Softmax", ["logits"], ["shares"], "softmax"),
        node("Trilu", ["shares", "axis"], ["y"], "sums"),
    ]
    stored = {
        "w1": weights(16, 3, 7, 7),
        "b1": weights(16),
        "g": positive(16),
        "b": weights(16),
        "m": weights(16),
        "v": positive(16),
        "w2": weights(16, 16, 3, 3),
        "w4": weights(16, 16, 1, 1),
        "wd": weights(16, 1, 3, 3),
        "w3": weights(10, 16),
        "b3": weights(10),
        "axis": np.int64(1),
    }
    return model(nodes, {"x": ["n", 3, 32, 32]}, ["y"], stored)


def mlp(opset: int = 18) -> Any:
    """A transformer's feed-forward block with GELU in pieces, normalized before; a second output."""
    node = helper.make_node
    nodes = [
        node("Add", ["x", "r"], ["sum"], "add"),
        node("LayerNormalization", ["sum", "scale", "shift"], ["n"], "norm", epsilon=1e-6),
        node("MatMul", ["n", "w1"], ["l1"], "up"),
        node("Add", ["b1", "l1"], ["z"], "up.bias"),
        node("Div", ["z", "root"], ["d"], "gelu.div"),
        node("Erf", ["d"], ["e"], "gelu.erf"),
        node("Add", ["e", "one"], ["f"], "gelu.add"),
        node("Mul", ["z", "f"], ["g"], "gelu.mul"),
        node("Mul", ["g", "half"], ["h"], "gelu.half"),
        node("MatMul", ["h", "w2"], ["l2"], "down"),
        node("Add", ["l2", "b2"], ["z2"], "down.bias"),
        node("Add", ["z2", "sum"], ["y"], "residual"),
    ]
    stored = {
        "scale": positive(24),
        "shift": weights(24),
        "w1": weights(24, 64) / 4,
        "b1": weights(64),
        "root": np.float32(np.sqrt(2)),
        "one": np.ones(1, np.float32),
        "half": np.float32(0.5),
        "w2": weights(64, 24) / 8,
        "b2": weights(24),
    }
    return model(nodes, {"x": ["b", "s", 24], "r": ["b", "s", 24]}, ["y", "sum"], stored, opset)

"""Gated products of ONNX's models, beside onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from from_onnx.test_model import RNG, check, plans
from onnx_models import model

TWO = [
    helper.make_node("MatMul", ["x", "w"], ["g"]),
    helper.make_node("Sigmoid", ["g"], ["s"]),
    helper.make_node("Mul", ["g", "s"], ["a"]),
    helper.make_node("MatMul", ["x", "v"], ["u"]),
]
PACKED = [
    helper.make_node("Gemm", ["x", "p", "b"], ["q"]),
    helper.make_node("Split", ["q"], ["u", "g"], axis=-1, num_outputs=2),
    helper.make_node("Gelu", ["g"], ["a"]),
]


@pytest.mark.parametrize(
    ("nodes", "plan"),
    [
        (TWO, "f32[3x16] -> linear(48) -> glu(silu, gate=first)"),
        (PACKED, "f32[3x16] -> linear(48) -> bias -> glu(gelu)"),
    ],
)
def test_a_gated_product_is_one_plan(nodes: list[helper.NodeProto], plan: str) -> None:
    shapes = {"w": (16, 24), "v": (16, 24), "p": (16, 48), "b": (48,)}
    read = {name for each in nodes for name in each.input}
    weights = {name: RNG.standard_normal(shape, np.float32) for name, shape in shapes.items() if name in read}
    last = helper.make_node("Mul", ["u", "a"], ["y"])
    given = {"x": RNG.standard_normal((3, 16), np.float32)}
    ours = check(model([*nodes, last], {"x": (3, 16)}, ["y"], weights, 20), given)
    assert plans(ours, given) == [plan]
    assert ours.report().launches.kernels == 1

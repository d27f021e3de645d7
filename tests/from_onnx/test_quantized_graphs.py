"""Quantized models whose operators are in several plans, or in none: graphs that random models found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import helper

import fuseplan.onnx
from fuseplan.onnx.runtime import session_of
from onnx_models import model

node = helper.make_node
RNG = np.random.default_rng(6)
NUMBERS = {"s": np.float32(0.0201), "z": np.int8(0)}


def again(nodes: list[Any], src: str, name: str) -> str:
    """A value rounded to integers of i8 and back, as a model has it."""
    nodes.append(node("QuantizeLinear", [src, "s", "z"], [f"{name}_q"], f"{name}_q"))
    nodes.append(node("DequantizeLinear", [f"{name}_q", "s", "z"], [name], name))
    return name


def both(nodes: Sequence[Any], shape: Sequence[int], stored: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """The results of plans and of ONNX Runtime, and the plans."""
    proto = model(nodes, {"x": shape}, ["y"], NUMBERS | stored, 21)
    ours, given = fuseplan.onnx.load(proto, threads=1), {"x": RNG.standard_normal(shape, np.float32)}
    (made,), (want,) = ours.run(None, given), session_of(proto, 1).run(None, given)
    return made, want, [str(site.plan) for site in ours.report().sites]


def test_a_sum_of_a_value_that_another_plan_dequantizes() -> None:
    """The plan of hardswish writes numbers, and their integers nowhere."""
    nodes = list[Any]()
    again(nodes, "x", "a")
    nodes += [node("HardSwish", ["a"], ["b"]), node("HardSwish", ["b"], ["c"])]
    again(nodes, "c", "d")
    nodes.append(node("Add", ["d", "a"], ["e"]))
    again(nodes, "e", "y")
    made, want, plans = both(nodes, (1, 13, 5, 8, 9), {})
    np.testing.assert_allclose(made, want, atol=1e-6)
    assert plans[1].endswith("quantize(i8) -> dequantize"), plans


def test_a_convolution_of_floats_whose_integers_onnxruntime_reads() -> None:
    """Between operators of ONNX Runtime's, a plan may read and write channels first: floats alone do."""
    nodes = [
        node("Trilu", ["x"], ["a"]),
        node("Conv", ["a", "w"], ["c"], pads=[1] * 4),
        node("QuantizeLinear", ["c", "s", "z"], ["q"]),
        node("BitwiseNot", ["q"], ["r"]),
        node("DequantizeLinear", ["r", "s", "z"], ["y"]),
    ]
    stored = {"w": RNG.standard_normal((7, 3, 3, 3), np.float32) / 5}
    made, want, plans = both(nodes, (2, 3, 6, 5), stored)
    np.testing.assert_allclose(made, want, atol=1e-6)
    assert [plan[:3] for plan in plans] == ["f32", "i8["], plans


def test_values_whose_names_end_in_numbers() -> None:
    """Names of what a row adds, and of a dequantized value for each reader, are none of the model's."""
    nodes = [node("DynamicQuantizeLinear", ["x"], ["q", "t", "u"]), node("DequantizeLinear", "qtu", ["a"])]
    nodes += [node("Sigmoid", ["a"], ["a.1"]), node("Softmax", ["a"], ["a.2"], axis=0)]
    nodes += [node("Add", ["a.1", "a.2"], ["y.0"]), node("Add", ["a", "y.0"], ["e"])]
    nodes += [node("Gemm", ["e", "w", "b"], ["y.1"], alpha=0.7), node("Gemm", ["y.1", "w"], ["y"], alpha=0.6)]
    stored = {"w": RNG.standard_normal((5, 5), np.float32), "b": RNG.standard_normal(5, np.float32)}
    made, want, _ = both(nodes, (3, 5), stored)
    np.testing.assert_allclose(made, want, atol=1e-5)

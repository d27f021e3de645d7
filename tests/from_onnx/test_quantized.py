"""Quantized models: numbers rounded by plans; and what ONNX Runtime is kept from writing anew in the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

import fuseplan.onnx
from fuseplan.cli.commands import fuseplan as command
from fuseplan.onnx.model import OnnxModel
from fuseplan.onnx.reader import input_types, read
from fuseplan.onnx.runtime import session_of
from fuseplan.reports.comparison import ALLOWED
from onnx_models import model

RNG = np.random.default_rng(5)


def by_plans(proto: Any) -> Callable[..., list[Any]]:
    return partial(fuseplan.onnx.load(proto, threads=1).run, None)


def by_onnxruntime(proto: Any) -> Callable[..., list[Any]]:
    return partial(session_of(proto, 1).run, None)


BOTH = pytest.mark.parametrize("ran", [by_plans, by_onnxruntime])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_values_between_operators_are_rounded_in_their_plans(dtype: str, is_moved: bool) -> None:
    """The input beyond the range of integers; the second scale and zero point of a value its own."""
    node, made = helper.make_node, np.dtype(dtype).type
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "t", "u"] if is_moved else ["q", "s", "z"], ["d"], "d"),
        node("Conv", ["d", "w"], ["c"], "c", pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"], "r"),
        node("QuantizeLinear", ["r", "t"], ["p"], "p", **({} if dtype == "uint8" else {"output_dtype": 3})),
        node("DequantizeLinear", ["p", "t"], ["y"], "e"),
    ]
    middle = np.iinfo(dtype).max // 2
    stored = {"s": np.float32(1 / 64), "t": np.float32(1 / 24), "z": made(middle), "u": made(middle - 2)}
    stored["w"] = RNG.standard_normal((3, 2, 3, 3), np.float32) / 8
    proto = model(nodes, {"x": (1, 2, 5, 7)}, ["y"], stored, 21)
    x = np.float32(np.iinfo(dtype).max / 90) * RNG.standard_normal((1, 2, 5, 7), np.float32)
    ours = fuseplan.onnx.load(proto, threads=1)
    if dtype.endswith("8"):
        np.testing.assert_allclose(ours.run(None, {"x": x})[0], by_onnxruntime(proto)({"x": x})[0], atol=1e-6)
    np.testing.assert_allclose(ours.run(None, {"x": x})[0], ours.exact({"x": x})[0], atol=1e-6)
    report = ours.report()
    assert not report.to_json()["left"], report


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"s": np.full(2, 1 / 8, np.float32), "z": np.zeros(2, np.uint8)}, "not one number"),
        ({"t": np.float32(1 / 16)}, "None"),
    ],
    ids=["scales of channels", "integers that another operator makes"],
)
def test_quantizations_that_onnxruntime_takes_part_in(changed: dict[str, Any], told: str) -> None:
    node, between = helper.make_node, "q" if "s" in changed else "v"
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        *([node("Neg", ["q"], ["v"], "v")] if between == "v" else []),
        node("DequantizeLinear", [between, "s", "z"], ["d"], "d"),
        node("Relu", ["d"], ["y"], "r"),
    ]
    kind = np.uint8 if "s" in changed else np.int8
    stored = {"s": np.float32(1 / 8), "z": kind(0)} | changed
    proto = model(nodes, {"x": (3, 2, 4)}, ["y"], stored, 17)
    x = RNG.standard_normal((3, 2, 4), np.float32)
    np.testing.assert_allclose(by_plans(proto)({"x": x})[0], by_onnxruntime(proto)({"x": x})[0], atol=1e-6)
    reasons = {node.origin.name: str(node.why) for node in read(proto, input_types(proto)).graph.nodes}
    assert told in reasons["d"]


@pytest.mark.parametrize("told", [("QuantizeLinear", "precision"), ("DequantizeLinear", "output_dtype")])
def test_a_quantization_in_another_dtype_is_onnxruntimes(told: tuple[str, str]) -> None:
    nodes = [
        helper.make_node(kind, [src, "s", "z"], [dst], dst, **({told[1]: 10} if kind == told[0] else {}))
        for kind, src, dst in (("QuantizeLinear", "x", "q"), ("DequantizeLinear", "q", "d"))
    ]
    stored = {"s": np.float32(1 / 8), "z": np.int8(3)}
    proto = model(nodes, {"x": (3, 4)}, ["d"], stored, 23)
    reasons = [str(each.why) for each in read(proto, input_types(proto)).graph.nodes]
    assert any("in another dtype than its input's" in each for each in reasons)


def test_an_integer_that_others_read_is_stored_too() -> None:
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
        node("Relu", ["d"], ["y"], "r"),
    ]
    stored = {"s": np.float32(1 / 8), "z": np.array(3, np.int8)}
    proto = model(nodes, {"x": (3, 4)}, ["y", "q"], stored, 17)
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.INT8
    x = RNG.standard_normal((3, 4), np.float32)
    made, whole = by_plans(proto)({"x": x})
    np.testing.assert_array_equal(whole, (np.round(x * 8) + 3).astype(np.int8))
    np.testing.assert_array_equal(made, np.maximum(np.round(x * 8) / 8, 0))


def test_a_run_that_onnxruntime_is_far_from_is_judged_beside_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of its products of 8 bits saturate on CPUs without VNNI."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "h"),
        node("QuantizeLinear", ["h", "s", "z"], ["q"], "q"),
        node("DequantizeLinear", ["q", "s", "z"], ["y"], "d"),
    ]
    stored = {"s": np.float32(1 / 8), "z": np.array(3, np.uint8), "w": np.eye(4, dtype=np.float32)}
    proto = model(nodes, {"x": (3, 4)}, ["y"], stored, 17)
    onnx.save_model(proto, tmp_path / "network.onnx")
    given = {"x": RNG.standard_normal((3, 4), np.float32)}
    assert fuseplan.onnx.load(proto, threads=1).compare(given).outputs["y"][1] == ALLOWED["i8"]
    monkeypatch.setattr(OnnxModel, "peer", lambda self, given: lambda: [np.full((3, 4), 9, np.float32)])
    ran = CliRunner().invoke(command, ["run", str(tmp_path / "network.onnx"), "--threads", "1"])
    assert "beside float64, from which onnxruntime's results are" in ran.output
    assert "of the largest element beside float64: right" in ran.output


@BOTH
def test_quantizations_are_those_of_the_model(ran: Callable[[Any], Callable[..., list[Any]]]) -> None:
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
    made = ran(model(nodes, {"x": x.shape}, ["c", "e", "y"], stored))({"x": x})
    twice = np.round(np.round(x * 32) / 32 * 21) / 21
    for got, want in zip(made, (twice * weight[:, 0], twice), strict=False):
        np.testing.assert_allclose(got, want.reshape(got.shape), atol=1e-6)
    last = ran(model(nodes, {"x": x.shape}, ["y"], stored))({"x": x})
    np.testing.assert_allclose(last[0], np.round(made[0] * 32) / 32, atol=1e-6)


@BOTH
def test_inner_graphs_read_dequantized_values_and_views_of_them(
    ran: Callable[[Any], Callable[..., list[Any]]],
) -> None:
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
    for each in ran(model(nodes, {"x": [3]}, ["d", "e", "y"], stored))({"x": x}):
        np.testing.assert_array_equal(each, x)


@BOTH
def test_a_pool_of_dequantized_i8_runs(ran: Callable[[Any], Callable[..., list[Any]]]) -> None:
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
    (made,) = ran(proto)({"x": x})
    np.testing.assert_array_equal(made, x)

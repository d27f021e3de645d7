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
from fuseplan.graph import find
from fuseplan.graph.why import Why
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
        *([node("BitwiseNot", ["q"], ["v"], "v")] if between == "v" else []),
        node("DequantizeLinear", [between, "s", "z"], ["d"], "d"),
        node("Relu", ["d"], ["y"], "r"),
    ]
    kind = np.uint8 if "s" in changed else np.int8
    stored = {"s": np.float32(1 / 8), "z": kind(0)} | changed
    proto = model(nodes, {"x": (3, 2, 4)}, ["y"], stored, 21)
    x = RNG.standard_normal((3, 2, 4), np.float32)
    np.testing.assert_allclose(by_plans(proto)({"x": x})[0], by_onnxruntime(proto)({"x": x})[0], atol=1e-6)
    exact, want = fuseplan.onnx.load(proto, threads=1).exact({"x": x}), by_onnxruntime(proto)({"x": x})
    np.testing.assert_allclose(exact[0], want[0], atol=1e-6)
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


def bottleneck(dtype: type, zero: int) -> Any:
    """A pool, two convolutions, a residual of their input, a view and a product, quantized throughout."""
    node, rng = helper.make_node, np.random.default_rng(3)
    stored: dict[str, Any] = {"z": dtype(zero)}
    nodes = []

    def quantized(src: str, name: str, scale: float) -> str:
        stored[f"{name}_s"] = np.float32(scale**1.037)  # so that few sums are ties
        nodes.append(node("QuantizeLinear", [src, f"{name}_s", "z"], [f"{name}_q"], f"{name}_q"))
        nodes.append(node("DequantizeLinear", [f"{name}_q", f"{name}_s", "z"], [name], name))
        return name

    def weight(name: str, shape: tuple[int, ...], axis: int) -> str:
        stored[f"{name}_i"] = rng.integers(-127, 128, shape).astype(np.int8)
        stored[f"{name}_s"] = ((1 + rng.random(shape[axis])) / 2000).astype(np.float32)
        stored[f"{name}_z"] = np.zeros(shape[axis], np.int8)
        ends = [f"{name}_i", f"{name}_s", f"{name}_z"]
        nodes.append(node("DequantizeLinear", ends, [name], name, axis=axis))
        return name

    quantized("x", "a", 1 / 40)
    nodes.append(node("MaxPool", ["a"], ["b0"], "pool", kernel_shape=[3, 3], pads=[1] * 4))
    quantized("b0", "b", 1 / 40)
    nodes.append(node("Conv", ["b", weight("v", (8, 6, 3, 3), 0)], ["c0"], "first", pads=[1] * 4))
    nodes.append(node("Relu", ["c0"], ["c1"], "relu"))
    quantized("c1", "c", 1 / 60)
    nodes.append(node("Conv", ["c", weight("w", (6, 8, 1, 1), 0)], ["d0"], "second"))
    quantized("d0", "d", 1 / 50)
    nodes.append(node("Add", ["d", "b"], ["e0"], "residual"))
    quantized("e0", "e", 1 / 30)
    nodes.append(node("Reshape", ["e", "shape"], ["f0"], "rows"))
    stored["shape"] = np.array([10, 42])
    quantized("f0", "f", 1 / 30)
    nodes.append(node("MatMul", ["f", weight("u", (42, 9), 1)], ["g0"], "product"))
    quantized("g0", "y", 1 / 20)
    return model(nodes, {"x": (2, 6, 5, 7)}, ["y"], stored, 21)


@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, 0), (np.uint8, 0), (np.uint8, 120), (np.int8, -7)])
@pytest.mark.parametrize("exactly", [False, True], ids=["as estimated", "as integers"])
def test_quantized_values_are_integers_between_plans(
    dtype: type, zero: int, exactly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual, the pool and the view read and write them; the product of integers where it is taken."""
    if exactly:
        monkeypatch.setattr(find, "faster", lambda one, _: one)
    ours = fuseplan.onnx.load(bottleneck(dtype, zero), threads=1)
    x = np.random.default_rng(4).standard_normal((2, 6, 5, 7), np.float32)
    (made,), (want,) = ours.run(None, {"x": x}), ours.exact({"x": x})
    assert np.mean(np.abs(made - want) > 1e-5) <= 0.03  # a number between two integers may become either
    assert np.abs(made - want).max() < 1 / 10
    report = ours.report()
    plans = [str(site.plan) for site in report.sites]
    word = np.dtype(dtype).name.replace("uint", "u").replace("int", "i")
    assert not report.to_json()["left"], report
    assert [plan[:2] for plan in plans] == ["f3", *[word] * 4]
    assert [f"add_dequantized({word}" in plan for plan in plans] == [False, False, False, True, False]
    assert not exactly or sum("dequantize(per=channel)" in plan for plan in plans) == 3
    assert not ours.fused().skipped


def test_a_dequantized_value_that_others_read_too_is_made_for_them() -> None:
    """By a plan that reads it, as an output of the model, and by an inner graph that has its name."""
    node, info = helper.make_node, helper.make_tensor_value_info
    branch = helper.make_graph(
        [node("Neg", ["d"], ["n"])], "branch", [], [info("n", TensorProto.FLOAT, [2, 6])]
    )
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("MatMul", ["d", "w"], ["y"]),
        node("Add", ["d", "x"], ["a"]),
        node("If", ["yes"], ["b"], then_branch=branch, else_branch=branch),
    ]
    stored = {"s": np.float32(1 / 8), "z": np.array(9, np.uint8), "w": np.eye(6, dtype=np.float32)}
    stored["yes"] = np.array(True)
    x = RNG.standard_normal((2, 6), np.float32)
    made = by_plans(model(nodes, {"x": (2, 6)}, ["d", "y", "a", "b"], stored))({"x": x})
    rounded = np.maximum(np.round(x * 8), -9) / 8
    for got, want in zip(made, (rounded, rounded, rounded + x, -rounded), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("kind", ["ConvInteger", "MatMulInteger"])
def test_what_onnxruntime_joins_with_sums_of_integers_is_left_to_it(kind: str) -> None:
    is_product, node = kind == "MatMulInteger", helper.make_node
    shape, weights, features = (
        ((9, 6), (6, 8), (8,)) if is_product else ((2, 6, 5, 7), (8, 6, 3, 3), (8, 1, 1))
    )
    stored: dict[str, Any] = {"w": RNG.integers(-60, 60, weights).astype(np.int8)}
    stored |= {"ws": (RNG.random(features) / 200).astype(np.float32), "b": RNG.random(features, np.float32)}
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "q"),
        node(kind, ["q", "w", "z"], ["p"], "p"),
        node("Cast", ["p"], ["f"], "f", to=TensorProto.FLOAT),
        node("Mul", ["s", "ws"], ["t"], "t"),
        node("Mul", ["f", "t"], ["m"], "m"),
        node("Add", ["m", "b"], ["a"], "a"),
        node("Mul", ["a", "a"], ["v"], "v"),
        node("Add", ["v", "b"], ["y"], "y"),
    ]
    proto = model(nodes, {"x": shape}, ["y"], stored, 21)
    ours, x = fuseplan.onnx.load(proto, threads=1), RNG.standard_normal(shape, np.float32)
    (made,), (exact,) = ours.run(None, {"x": x}), ours.exact({"x": x})
    np.testing.assert_allclose(made, exact, rtol=1e-5, atol=1e-5)
    left = {node.origin.name: node.why for node in read(proto, input_types(proto)).graph.nodes}
    joined = {name for name, why in left.items() if why is not None and why.why is Why.JOINED}
    assert joined == {"f", "t", "m", "a"}
    assert left["v"] is None


def test_joins_and_views_of_equal_scales_move_integers() -> None:
    """Branches of an Inception module, each quantized, joined, quantized, sliced and turned."""
    node, stored = helper.make_node, dict[str, Any](s=np.float32(0.0321), z=np.uint8(101))
    nodes = []

    def again(src: str, name: str) -> str:
        nodes.append(node("QuantizeLinear", [src, "s", "z"], [f"{name}_q"], f"{name}_q"))
        nodes.append(node("DequantizeLinear", [f"{name}_q", "s", "z"], [name], name))
        return name

    again("x", "a")
    for branch, size in enumerate((1, 3)):
        stored[f"w{branch}"] = RNG.standard_normal((4, 6, size, size), np.float32) / 8
        ends = ["a", f"w{branch}"]
        nodes.append(node("Conv", ends, [f"c{branch}"], f"c{branch}", pads=[size // 2] * 4))
        again(f"c{branch}", f"d{branch}")
    nodes.append(node("Concat", ["d0", "d1"], ["j"], "join", axis=1))
    again("j", "k")
    nodes.append(node("Slice", ["k", "begin", "end", "one"], ["l"], "slice"))
    nodes.append(node("Transpose", ["l"], ["m"], "turn", perm=[0, 2, 3, 1]))
    again("m", "n")
    nodes.append(node("Relu", ["n"], ["y"], "relu"))
    stored |= {"begin": np.array([1]), "end": np.array([7]), "one": np.array([1])}
    ours = fuseplan.onnx.load(model(nodes, {"x": (2, 6, 5, 7)}, ["y"], stored, 21), threads=1)
    x = RNG.standard_normal((2, 6, 5, 7), np.float32)
    made, want = ours.run(None, {"x": x})[0], ours.exact({"x": x})[0]
    assert np.mean(np.abs(made - want) > 1e-5) <= 0.01
    plans = [str(site.plan) for site in ours.report().sites]
    assert [plan[:2] for plan in plans] == ["f3", "u8", "u8", "u8"], plans
    assert sum("within(8)" in plan for plan in plans) == 2, plans

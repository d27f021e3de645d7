"""Operators that change the dtype: against torch, and at every rank and odd size on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import fuseplan
from closeness import assert_close
from every_number import every_code, exact_codes, floats
from fuseplan.errors import PlanError
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.language.dtypes import CONVERTED, DTYPES, dtype_of
from fuseplan.measure.data import deviation, random_arrays, reference
from fuseplan.measure.ground import allowed_deviation
from fuseplan.measure.spaces import exact
from fuseplan.ops.conversion import CONVERSIONS, Cast
from fuseplan.plans.plan import FusionPlan

SAMPLES = [FusionPlan(tensor, op) for kind in CONVERSIONS for tensor, op in kind.samples()]
COMPUTED = ("f64", "f32", "f16", "bf16")


@pytest.mark.parametrize("plan", SAMPLES, ids=str)
def test_samples(plan: FusionPlan) -> None:
    assert_close(fuseplan.compile(plan, "cpu", cache=False), random_arrays(plan, 1))


@pytest.mark.part(2)
@pytest.mark.parametrize("before", COMPUTED)
@pytest.mark.parametrize("after", [name for name in CONVERTED if name != "f64"])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_cast_is_torchs(before: str, after: str, target: str) -> None:
    x = torch.from_numpy(floats(dtype_of(after))).float().to(getattr(torch, DTYPES[before].package))
    if not dtype_of(after).is_float and after != "bool":
        row = dtype_of(after)
        x = x[(x > row.least - 1) & (x < row.largest)]  # the others, PyTorch does not define
    x = x[: x.numel() // 7 * 7].reshape(7, -1)
    got = fuseplan.compile(f"{before}[7x{x.shape[1]}] -> cast({after})", target, cache=False)(x)
    want = x.to(getattr(torch, DTYPES[after].package))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.double().numpy(), want.double().numpy())


@pytest.mark.part(2)
@pytest.mark.parametrize("before", [name for name in CONVERTED if name not in COMPUTED])
@pytest.mark.parametrize("after", COMPUTED)
def test_every_element_becomes_torchs_float(before: str, after: str) -> None:
    codes = every_code(dtype_of(before))
    x = torch.from_numpy(codes).view(getattr(torch, DTYPES[before].package)).reshape(2, -1)
    got = fuseplan.compile(f"{before}[2x{x.shape[1]}] -> cast({after})", "cpu", cache=False)(x)
    want = x.to(getattr(torch, DTYPES[after].package)).double().numpy()
    np.testing.assert_array_equal(got.double().numpy(), want)
    if after == "f64":
        np.testing.assert_array_equal(want.reshape(-1), exact_codes(dtype_of(before)))


@pytest.mark.part(4)
@pytest.mark.parametrize("shape", ["3x5", "2x3x7", "2x5x3x7", "1x3x3x2x5", "4x1031", "1x1"])
@pytest.mark.parametrize(
    "chain",
    [
        "cast(f8e4m3) -> relu -> cast(f32)",
        "cast(f16) -> bias -> add -> cast(i8) -> cast(f32)",
        "gelu -> cast(f64) -> bias -> cast(f8e5m2)",
        "cast(bool) -> cast(bf16) -> add",
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_operators_behind_a_cast_see_the_rounded_number(dtype: str, chain: str, shape: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{shape}] -> {'cast(f32) -> ' if dtype == 'i8' else ''}{chain}")
    assert_close(fuseplan.compile(plan, "cpu", cache=False), random_arrays(plan, 2))


@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strides=500:100:10:1", "strides=1:500:100:10"])
def test_a_cast_keeps_the_place_of_every_element(layout: str) -> None:
    plan = FusionPlan.parse(f"f16[3x5x4x7, {layout}] -> add -> cast(i32)")
    compiled = fuseplan.compile(plan, "cpu", cache=False)
    arrays = random_arrays(plan, 3)
    np.testing.assert_array_equal(
        exact(compiled(**arrays)), plan.reference(arrays["src"], {"other": arrays["other"]})
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("i8[2x3] -> relu", "relu computes with floating-point numbers"),
        ("f32[2x3] -> cast(i32) -> linear(4)", "linear computes with floating-point numbers"),
        ("bool[2x3x4x5] -> batch_norm_training", "computes with floating-point numbers"),
        ("i16[2x3x4x5] -> conv_transpose2d(3, kernel=2)", "computes with floating-point numbers"),
        ("i32[2x3] -> cast(i8)", "integers are converted to wider ones"),
        ("i32[2x3] -> cast(i32)", "integers are converted to wider ones"),
        ("f32[2x3] -> cast(f8)", "there is no dtype 'f8'"),
        ("f32[2x3] -> cast(int8)", "there is no dtype 'int8'"),
        ("f32[2x3] -> cast", "cast needs dtype"),
        ("i8[2x3] -> quantize(i8)", "quantize computes with floating-point numbers"),
        ("f32[2x3] -> quantize(i32)", "dtype is not 'i32'"),
        ("f32[2x3] -> quantize(f8e4m3, zero_points=True)", "zero_points are for i8 and u8"),
        ("f32[2x3] -> quantize(i8, block=3)", "block has no meaning here"),
        ("f32[2x3] -> quantize(i8, per=axis)", "per is not 'axis'"),
        ("f32[2x3] -> dequantize", "dequantize takes i8 or u8 or f8e4m3 or f8e5m2 or i32"),
        ("f8e4m3[2x3] -> dequantize(zero_points=True)", "dequantize with zero points takes i8"),
        ("u8[2x3] -> cast(i8)", "integers are converted to wider ones"),
        ("i8[2x3] -> cast(u8)", "integers are converted to wider ones"),
        ("f32[2x3] -> dequantize(i16)", "dequantize takes i8 or u8"),
        ("i8[2x3] -> dequantize(i8)", "dtype is not 'i8'"),
        ("f32[2x3x4x5] -> conv2d(3, kernel=1) -> quantize(i8, per=row)", "quantize: it reads the last axis"),
        ("i8[2x3x4] -> dequantize(per=channel) -> linear(3)", "its channels may be axis 1"),
    ],
)
def test_plans_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(PlanError) as refused:
        FusionPlan.parse(text)
    assert says in str(refused.value)
    assert "^" in str(refused.value)


def drawn(shape: tuple[int, ...], seed: int = 5) -> tuple[Any, Any, Any]:
    """Numbers of every size, scales that are powers of two (so that a quotient is exact), zero points."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp(rng.uniform(-3, 4, shape))).astype(np.float32)
    exponents = rng.integers(-6, 2, shape)
    return x, np.exp2(exponents).astype(np.float32), rng.integers(-20, 20, shape).astype(np.int8)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 7), (2, 5, 3, 7), (1, 3, 3, 2, 5)])
@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # deprecated there
def test_quantizing_and_back_is_torchs(dtype: str, shape: tuple[int, ...], target: str) -> None:
    x, scales, points = drawn(shape)
    kind = torch.qint8
    if dtype == "u8":
        points, kind = (points + 100).astype(np.uint8), torch.quint8
    text = "x".join(map(str, shape))
    for per, scale, zero in (
        ("tensor", scales.reshape(-1)[:1], points.reshape(-1)[:1]),
        ("channel", scales.reshape(-1)[: shape[1]], points.reshape(-1)[: shape[1]]),
    ):
        given = torch.from_numpy(x)
        wide = torch.from_numpy(scale).double(), torch.from_numpy(zero).long()
        want = (
            torch.quantize_per_channel(given, *wide, 1, kind)
            if per == "channel"
            else torch.quantize_per_tensor(given, float(scale[0]), int(zero[0]), kind)
        )
        plan = f"f32[{text}] -> quantize({dtype}, per={per}, zero_points=True)"
        got = fuseplan.compile(plan, target, cache=False)(x, scale=scale, zero_point=zero)
        np.testing.assert_array_equal(got, want.int_repr().numpy())
        back = f"{dtype}[{text}] -> dequantize(per={per}, zero_points=True)"
        made = fuseplan.compile(back, target, cache=False)(got, scale=scale, zero_point=zero)
        np.testing.assert_array_equal(made, want.dequantize().numpy())


@pytest.mark.parametrize("dtype", ["i8", "u8", "f8e4m3", "f8e5m2"])
@pytest.mark.parametrize(("per", "block"), [("tensor", 0), ("channel", 0), ("block", 4)])
def test_quantizing_and_back_is_onnxs(dtype: str, per: str, block: int) -> None:
    shape = (3, 8) if per == "block" else (3, 7, 5)
    x, scales, _ = drawn(shape)
    far = 1e6 if dtype in ("i8", "u8") else math.inf  # onnx's own reference takes no infinity to an integer
    x.reshape(-1)[:6] = [0.0, -0.0, 1e5, -1e5, far, -far]
    flat = scales.reshape(-1)
    scale = {"tensor": flat[0], "channel": flat[:7], "block": scales[:, :2]}[per]
    attributes = {"axis": 1} | ({"block_size": block} if block else {})
    kind, made = DTYPES[dtype].onnx, onnx.helper
    zero = onnx.TensorProto(data_type=kind, dims=np.shape(scale), raw_data=bytes(int(np.size(scale))))
    nodes = [
        made.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], **attributes),
        made.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **attributes),
    ]
    ends = [made.make_tensor_value_info(name, 1, None) for name in ("x", "scale")]
    zero.name = "zero"
    outputs = [made.make_tensor_value_info("q", kind, None), made.make_tensor_value_info("y", 1, None)]
    graph = made.make_graph(nodes, "graph", ends, outputs, [zero])
    model = made.make_model(graph, opset_imports=[made.make_opsetid("", 21)])
    quantized, back = ReferenceEvaluator(model).run(None, {"x": x, "scale": np.asarray(scale, np.float32)})
    fields = f"per={per}" + (f", block={block}" if block else "")
    text = "x".join(map(str, shape))
    given = {"scale": np.asarray(scale, np.float32).reshape(np.shape(scale) or (1,))}
    got = fuseplan.compile(f"f32[{text}] -> quantize({dtype}, {fields})", "cpu", cache=False)(x, **given)
    np.testing.assert_array_equal(exact(got, dtype), np.asarray(quantized).astype(np.float64))
    again = fuseplan.compile(f"{dtype}[{text}] -> dequantize({fields})", "cpu", cache=False)(got, **given)
    np.testing.assert_array_equal(again, back)


@pytest.mark.parametrize("dtype", ["i8", "u8", "f8e4m3", "f8e5m2"])
def test_what_is_too_large_saturates_and_nan_has_its_place(dtype: str) -> None:
    x = np.array([[1e30, -1e30, math.inf, -math.inf, math.nan]], np.float32)
    compiled = fuseplan.compile(f"f32[1x5] -> quantize({dtype})", "cpu", cache=False)
    got = exact(compiled(x, scale=np.ones(1, np.float32)), dtype)[0].tolist()
    most, least = DTYPES[dtype].largest, DTYPES[dtype].least
    assert got[:4] == [most, least, most, least]
    assert math.isnan(got[4]) if DTYPES[dtype].is_float else got[4] == 0


CHAINS = (
    "quantize(i8, per=row) -> dequantize(per=row)",
    "bias -> quantize(f8e4m3, per=block, block=5) -> dequantize(f16, per=block, block=5) -> gelu",
    "quantize(i8, per=channel, zero_points=True)",
    "quantize(f8e5m2, per=channel) -> dequantize(f64, per=channel) -> add",
    "quantize(u8, zero_points=True) -> dequantize(i16, zero_points=True) -> linear(9) -> dequantize(f32)",
    "layer_norm -> quantize(i8, per=row)",
    "rms_norm -> quantize(f8e4m3, per=block, block=4)",
    "linear(11) -> bias -> quantize(i8, per=row)",
    "quantize(i8, per=row) -> dequantize(per=row) -> softmax -> cast(f16)",
    "quantize(i8) -> dequantize(per=tensor) -> linear(9) -> relu -> quantize(f8e5m2, per=block, block=3)",
)


@pytest.mark.part(4)
@pytest.mark.parametrize(
    "tensor", ["3x5", "2x3x7, bsc", "2x5x3x37, abhc", "1x3x3x2x5, xabhc", "9x130", "7x2", "3x4x6, bsc"]
)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_scales_of_any_extent(dtype: str, chain: str, tensor: str) -> None:
    plan = FusionPlan.parse(f"{dtype}[{tensor}] -> {chain}")
    assert_near(plan, fuseplan.compile(plan, "cpu", cache=False))


def assert_near(plan: FusionPlan, compiled: Any) -> None:
    """Right, but for elements whose number lies on the edge between two quantized ones."""
    arrays = random_arrays(plan, 7)
    error = deviation(compiled(**arrays), reference(plan, arrays), dtype=plan.output.dtype)
    assert error <= allowed_deviation(lower(match(plan)), compiled.choice.template)


@pytest.mark.part(2)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strides=600:1:60:7"])
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16"])
@pytest.mark.parametrize(
    "chain",
    [
        "conv2d(6, kernel=3, padding=1)",
        "{} -> conv2d(5, kernel=1) -> dequantize(per=channel) -> bias -> quantize(u8, zero_points=True)",
        "{} -> conv2d(10, kernel=3, groups=5, stride=2, padding=1) -> dequantize(f64)",
    ],
)
def test_sums_of_integers_are_exact(chain: str, dtype: str, layout: str) -> None:
    front = "cast(f32) -> cast(i16)" if dtype == "i16" else "dequantize(i16, zero_points=True)"
    plan = FusionPlan.parse(f"{dtype}[3x5x9x7, {layout}] -> {chain.format(front)}")
    arrays = random_arrays(plan, 7)
    got = fuseplan.compile(plan, "cpu", cache=False)(**arrays)
    np.testing.assert_array_equal(exact(got), exact(fuseplan.compile(plan, "reference")(**arrays)))


@pytest.mark.part(2)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "strides=600:1:60:7"])
@pytest.mark.parametrize(
    "chain",
    [
        "dequantize(per=channel) -> conv2d(6, kernel=3, padding=1) -> bias -> quantize(i8, per=channel)",
        "dequantize(f16, per=channel, zero_points=True) -> conv2d(5, kernel=1) -> relu -> cast(f8e4m3)",
        "dequantize -> conv2d(5, kernel=3, groups=5, padding=1) -> quantize(i8, zero_points=True)",
        "cast(f32) -> batch_norm_training -> quantize(i8, per=channel)",
    ],
)
def test_around_convolutions_and_statistics(chain: str, layout: str) -> None:
    plan = FusionPlan.parse(f"i8[3x5x9x7, {layout}] -> {chain}")
    compiled = fuseplan.compile(plan, "cpu", cache=False)
    arrays = random_arrays(plan, 7)
    outcome = compiled(**arrays)
    got = outcome[0] if isinstance(outcome, tuple) else outcome
    error = deviation(got, reference(plan, arrays), dtype=plan.output.dtype)
    assert error <= allowed_deviation(lower(match(plan)), compiled.choice.template)


@pytest.mark.parametrize(
    "text", ["i8[7x5] -> linear(9)", "i8[2x3x37, bsc] -> linear(4)", "i8[5x4099] -> linear(3)"]
)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_products_of_i8_are_exact(text: str, target: str) -> None:
    """The last one has sums beyond 2^24, where float32 has no odd numbers."""
    compiled = fuseplan.compile(text, target, cache=False)
    rng = np.random.default_rng(3)
    weight_shape = compiled.plan.operands[0].shape
    src = rng.integers(-128, -120, compiled.plan.src.shape).astype(np.int8)
    weight = rng.integers(-128, -120, weight_shape).astype(np.int8)
    got = compiled(src, weight=weight)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, src.astype(np.int64) @ weight.astype(np.int64).T)


@pytest.mark.parametrize(
    "chain", ["dequantize(per=row) -> scale", "dequantize(f16, per=channel) -> bias -> gelu"]
)
def test_sums_of_i8_are_dequantized_in_the_same_kernel(chain: str) -> None:
    plan = FusionPlan.parse(f"i8[33x70] -> linear(19) -> {chain}")
    assert_near(plan, fuseplan.compile(plan, "cpu", cache=False))


def test_a_dtype_may_be_another_packages() -> None:
    named: Any = torch.float8_e5m2
    assert Cast(named) == Cast("f8e5m2")

"""Operators on rows in other libraries, as benchmarks call them: what they give is what float64 says."""

from pathlib import Path

import numpy as np
import pytest

from fuseplan.bench import worker
from fuseplan.bench.peers import known
from fuseplan.bench.peers.torch_peer import Torch
from fuseplan.bench.results import dtypes_of, wrong
from fuseplan.measure.data import deviation, evaluated, random_arrays
from fuseplan.measure.layers import CannotRunError, running
from fuseplan.measure.spaces import unwritten
from fuseplan.measure.torch_eager import eager_calls
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.torch_tensors import NAMES

BY_NAME = known(False).by_name

ROWS = (
    "f32[6x64] -> add -> save(sum) -> layer_norm",
    "f32[6x64] -> save(own) -> rms_norm(affine=False) -> mul(other=own) -> cast(f64)",
    "f32[3x8x5x2] -> group_norm(4) -> silu",
    "f32[3x8x5] -> instance_norm(affine=False)",
    "f32[6x5] -> softmax -> sum(0)",
    "f32[2x7x5] -> relu -> cumsum(1) -> tanh",
    "f32[2x7x5, nwc] -> log_softmax(1)",
    "f32[6x9] -> cross_entropy",
    "f32[6x9] -> cross_entropy_backward",
    "f32[2x8x3x16, bshd] -> rms_norm -> rotary",
    "f32[2x3x8x16, bhsd] -> rotary(interleaved=True, dims=8)",
    "f32[2x8x3x16, bshd] -> rotary(inverse=True, batched=True)",
    "f32[6x32] -> linear(64) -> bias -> glu(silu, gate=first) -> quantize(f8e4m3)",
    "f32[6x32] -> silu -> mul -> quantize(i8, per=row)",
    "f32[6x32] -> glu(gelu, interleaved=True) -> dynamic_quantize(i8, each=tensor)",
    "f32[6x256] -> rms_norm -> dynamic_quantize(f8e4m3, each=block)",
    "i8[6x32] -> dequantize(per=channel)",
    "f32[6x16] -> layer_norm_backward",
    "f32[6x16] -> rms_norm_backward",
    "f32[2x6x16] -> rms_norm_backward(gradients=True)",
    "f32[6x16] -> rms_norm_backward(affine=False)",
    "f32[6x16] -> layer_norm_backward(gradients=True)",
    "f32[2x3x16] -> rms_norm_backward(gradients=True)",
    "f32[2x3x16] -> layer_norm_backward(gradients=True, statistics=saved)",
    "f32[6x16] -> rms_norm_backward(statistics=saved)",
    "f32[6x16] -> softmax_backward",
    "f32[6x16] -> log_softmax_backward",
    "f32[6x32] -> glu_backward(silu, gate=first)",
    "f32[6x16] -> var(-1, correction=0)",
    "f32[6x16] -> logsumexp(0, keepdim=True)",
)


@pytest.mark.parametrize("text", ROWS)
def test_torch_computes_rows(text: str) -> None:
    """All that a plan gives, in its dtypes; numbers that rounding decides may be the next ones."""
    plan = FusionPlan.parse(text)
    tensors = [random_arrays(plan, seed=seed, device="cpu") for seed in (3, 4)]
    for call, given in zip(eager_calls(plan, tensors, Torch(1).stages), tensors, strict=True):
        out, made = evaluated(plan, {**tensors[0], **{key: given[key] for key in running(plan)}})
        got = call()
        results = got if isinstance(got, tuple) else (got,)
        for each, want, dtype in zip(results, (out, *made.values()), dtypes_of(plan), strict=True):
            assert NAMES[each.dtype] == dtype
            assert deviation(each, want, dtype=dtype) < 2e-6


@pytest.mark.parametrize(
    "text",
    [
        "f32[6x9] -> cross_entropy(label_smoothing=0.1)",
        "f32[6x9] -> cross_entropy_backward(label_smoothing=0.1)",
        "f32[2x3x9] -> softmax((1, 2))",
        "f32[6x9] -> cumsum(exclusive=True)",
        "f32[6x9] -> quantize(i8, zero_points=True)",
        "f32[6x8] -> identity",
        "f32[6x8] -> glu(softplus)",
        "f32[6x8] -> glu_backward(relu, interleaved=True)",
        "f32[2x6x3x3] -> glu(axis=c, interleaved=True)",
    ],
)
def test_rows_that_torch_is_not_measured_with(text: str) -> None:
    plan = FusionPlan.parse(text)
    with pytest.raises(CannotRunError, match="torch"):
        BY_NAME["torch"](1).prepare(plan, [random_arrays(plan)])


IN_ONNX = (
    "f32[6x64] -> add -> save(sum) -> layer_norm",
    "f32[6x64] -> save(own) -> rms_norm(affine=False) -> mul(other=own)",
    "f32[6x64] -> layer_norm(affine=False) -> save(end)",
    "f32[2x7x5, nwc] -> log_softmax(1)",
    "f32[2x7x5] -> relu -> cumsum(1, exclusive=True, reverse=True) -> tanh",
    "f32[6x9] -> cross_entropy",
    "f32[2x3x8x16, bhsd] -> rms_norm -> rotary(8, interleaved=True, inverse=True)",
    "f32[2x3x8x16, bhsd] -> rotary(batched=True)",
    "f32[6x32] -> linear(64) -> bias -> glu(silu, gate=first) -> leaky_relu(0.2)",
)


@pytest.mark.parametrize("text", IN_ONNX)
@pytest.mark.parametrize("name", ["onnxruntime", "unfused:onnxruntime", "openvino"])
def test_models_of_onnx_compute_rows(name: str, text: str) -> None:
    """All that a plan gives, on each copy of its tensors."""
    pytest.importorskip("onnx")
    pytest.importorskip(name.removeprefix("unfused:"))
    plan = FusionPlan.parse(text)
    copies = [random_arrays(plan, seed=seed) for seed in (3, 4)]
    prepared = BY_NAME[name](1).prepare(plan, copies)
    got, (out, made) = prepared.result(), evaluated(plan, copies[0])
    results = got if isinstance(got, tuple) else (got,)
    for each, want in zip(results, (out, *made.values()), strict=True):
        assert deviation(each, want) < 2e-6
    for _ in range(3):
        prepared.call()


@pytest.mark.parametrize(
    "text",
    [
        "f32[6x9] -> cross_entropy(label_smoothing=0.1)",
        "f32[2x3x9] -> softmax((1, 2))",
        "f32[6x8] -> glu(interleaved=True)",
        "f32[2x8x3x16, bshd] -> rotary",
        "f32[6x8] -> glu_backward",
    ],
)
def test_rows_that_models_of_onnx_are_not_measured_with(text: str) -> None:
    pytest.importorskip("onnxruntime")
    plan = FusionPlan.parse(text)
    with pytest.raises(CannotRunError, match="ONNX"):
        BY_NAME["onnxruntime"](1).prepare(plan, [random_arrays(plan)])


def test_a_tensor_of_integers_is_no_result_before_a_kernel_writes_it() -> None:
    plan = FusionPlan.parse("f32[6x64] -> rms_norm -> dynamic_quantize(i8)")
    tensors = random_arrays(plan, device="cpu")
    prepared = BY_NAME["fuseplan"](1).prepare(plan, [tensors])
    out, results = evaluated(plan, tensors)
    for each, want in zip(prepared.result(), (out, *results.values()), strict=True):
        assert deviation(each, want) < 1e-2
    assert [unwritten(each) for each in ("i8", "u8", "bool")] == [-128, 255, 1]
    assert np.isnan(unwritten("f16"))


@pytest.mark.parametrize("name", ["fuseplan", "torch"])
@pytest.mark.parametrize(
    "text",
    ["bf16[6x64] -> add -> save(sum) -> rms_norm", "bf16[6x64] -> rms_norm -> dynamic_quantize(f8e4m3)"],
)
def test_narrow_results_go_through_files(name: str, text: str, tmp_path: Path) -> None:
    """Of bf16 and fp8 as their bits."""
    plan, place = FusionPlan.parse(text), tmp_path / "y.npy"
    asked = {"plan": text, "data": {"seed": 3}, "copies": 1, "result": str(place)}
    assert worker.Worker(BY_NAME[name](1)).answer({"do": "prepare", **asked})["outputs"] == 2
    out, results = evaluated(plan, random_arrays(plan, seed=3))
    made = [np.load(worker.part(place, number)) for number in range(2)]
    compared = zip(made, (out, *results.values()), dtypes_of(plan), strict=True)
    assert (
        wrong(
            [deviation(each, want, dtype=dtype) for each, want, dtype in compared],
            dtypes_of(plan),
            plan.src.dtype,
        )
        is None
    )


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("f32[6x64] -> dynamic_quantize(f8e4m3)", (0.07, 1e-3)),
        ("f32[6x64] -> add -> save(sum) -> rms_norm", (1e-6, 2e-4)),
        ("i8[6x64] -> dequantize", (1e-3,)),
    ],
)
def test_each_result_is_judged_by_its_own_dtype(text: str, errors: tuple[float, ...]) -> None:
    plan = FusionPlan.parse(text)
    assert wrong([*errors[:-1], 1e-6], dtypes_of(plan), plan.src.dtype) is None
    assert (
        wrong(errors, dtypes_of(plan), plan.src.dtype)
        == f"wrong: off by {errors[-1]:.1e} of the largest output"
    )

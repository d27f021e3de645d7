"""Gradients of normalizations of rows and of softmax: torch's in float64, and each backend's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import PlanError, Unsupported
from fuseplan.kernels.match import match
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

F = torch.nn.functional
THEIRS: dict[str, Any] = {
    "layer_norm_backward": lambda x, scale: F.layer_norm(x, x.shape[-1:], scale, None, 1e-5),
    "rms_norm_backward": lambda x, scale: F.rms_norm(x, x.shape[-1:], scale, 1e-5),
    "group_norm_backward(2)": lambda x, scale: F.group_norm(x, 2, scale),
    "instance_norm_backward": lambda x, scale: F.instance_norm(x, weight=scale),
    "softmax_backward(1)": lambda x: F.softmax(x, 1),
    "log_softmax_backward": lambda x: F.log_softmax(x, -1),
}
PLANS = (
    "[37x70] -> layer_norm_backward -> add",
    "[3x4x7] -> gelu -> rms_norm_backward",
    "[2x6x5x3, nhwc] -> group_norm_backward(3) -> add",
    "[3x5x21] -> relu -> instance_norm_backward",
    "[2x5x3x7, nhwc] -> softmax_backward(hw) -> bias",
    "[33x40] -> scale -> log_softmax_backward",
    "[37x70] -> layer_norm_backward(gradients=True) -> add",
    "[2x3x4x7, bhsc] -> gelu -> rms_norm_backward(gradients=True)",
    "[300x130] -> add -> layer_norm_backward(gradients=True) -> save(sum) -> relu",
    "[2x19x70] -> gelu -> layer_norm_backward(gradients=True, statistics=saved) -> add",
    "[37x130] -> rms_norm_backward(gradients=True, statistics=saved)",
    "[2x3x9x33, bhsd] -> layer_norm_backward(affine=False, statistics=saved)",
)
SUMS = "f16[9x301] -> layer_norm_backward(gradients=True)"


@pytest.mark.parametrize("text", THEIRS)
def test_the_gradient_is_torchs(text: str) -> None:
    plan = FusionPlan.parse(f"f64[3x4x9] -> {text}")
    arrays = random_arrays(plan, 0)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 4, 9))).requires_grad_()
    out = THEIRS[text](x, *(torch.from_numpy(arrays[key]) for key in arrays if key == "scale"))
    out.backward(torch.from_numpy(arrays["src"]))
    arrays |= {"input": x.detach().numpy()} if "input" in arrays else {"result": out.detach().numpy()}
    got = plan.reference(arrays.pop("src"), arrays)
    np.testing.assert_allclose(got, x.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_gradients_of_scale_and_shift_are_torchs(name: str) -> None:
    plan = FusionPlan.parse(f"f64[3x4x9] -> {name}_backward(gradients=True)")
    arrays = random_arrays(plan, 0)
    leaves = [torch.from_numpy(arrays[key]).clone().requires_grad_() for key in ("input", "scale", "scale")]
    x, scale, shift = leaves
    is_layer = name == "layer_norm"
    made = F.layer_norm(x, (9,), scale, shift) if is_layer else F.rms_norm(x, (9,), scale, 1e-5)
    made.backward(torch.from_numpy(arrays["src"]))
    out, results = evaluated(plan, arrays)
    for got, leaf in zip((out, *results.values()), leaves, strict=False):
        np.testing.assert_allclose(got, leaf.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_statistics_may_be_given(name: str) -> None:
    plan = FusionPlan.parse(f"f64[3x4x9] -> {name}_backward(gradients=True, statistics=saved)")
    again = FusionPlan.parse(f"f64[3x4x9] -> {name}_backward(gradients=True, epsilon=0.01)")
    arrays = random_arrays(plan, 0)
    x = arrays["input"]
    middle = x.mean(-1) if name == "layer_norm" else 0 * x.mean(-1)
    arrays["inverse"] = 1 / np.sqrt(np.square(x - middle[..., None]).mean(-1) + 0.01)
    given = {key: arrays[key] for key in ("src", "input", "scale")}
    out, results = evaluated(plan, arrays | {"mean": middle} if name == "layer_norm" else arrays)
    want, wanted = evaluated(again, given)
    np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-12)
    for key, value in results.items():
        np.testing.assert_allclose(value, wanted[key], rtol=1e-10, atol=1e-12)


def test_sums_do_not_depend_on_the_threads() -> None:
    plan = FusionPlan.parse("f32[700x301] -> layer_norm_backward(gradients=True)")
    arrays = random_arrays(plan, 2)
    made = [forced(plan, Reduction, narrowed(32, threads))(**arrays) for threads in (1, 2, 2)]
    for first, *others in zip(*made, strict=True):
        assert all(np.array_equal(first, each) for each in others)


@pytest.mark.parametrize(
    ("text", "knobs"),
    [
        (SUMS, (2, 128, 1, 1, False, 1, 0)),
        (SUMS, (4, 64, 1, 4, True, 1, 0)),
        (SUMS, (1, 512, 1, 1, False, 2, 3)),
        (SUMS, (4, 64, 1, 1, True, 16, 0)),
        (SUMS, (1, 64, 1, 4, True, 2, 1)),
        ("f32[5x1] -> layer_norm_backward(gradients=True)", (8, 1, 1, 1, False, 1, 0)),
        ("f64[21x31] -> rms_norm_backward(gradients=True)", (4, 32, 1, 1, False, 1, 2)),
    ],
)
def test_triton_sums_of_tiles_and_of_parts_of_them(text: str, knobs: tuple[Any, ...]) -> None:
    assert_interpreted(text, GpuReduction(*knobs), slack=64)


@pytest.mark.parametrize(
    "text",
    [
        "f32[8x16] -> linear(12) -> layer_norm_backward(gradients=True)",
        "f32[8x16] -> softmax -> layer_norm_backward(gradients=True)",
        "f32[8x16] -> layer_norm_backward(gradients=True) -> rms_norm",
        "f32[8x16] -> glu -> layer_norm_backward(gradients=True)",
        "f32[*x16] -> layer_norm_backward(gradients=True)",
    ],
)
def test_sums_beside_others_are_refused(text: str) -> None:
    with pytest.raises(Unsupported):
        match(FusionPlan.parse(text))


def test_there_are_no_gradients_of_a_scale_that_is_none() -> None:
    with pytest.raises(PlanError, match="gradients=True without a scale"):
        FusionPlan.parse("f32[8x16] -> rms_norm_backward(affine=False, gradients=True)")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", PLANS)
def test_a_cpu_computes_the_plan(dtype: str, text: str) -> None:
    plan = FusionPlan.parse(dtype + text)
    assert_close(forced(plan, Reduction, narrowed(32)), random_arrays(plan, 5), slack=64)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("text", PLANS)
def test_triton_computes_the_plan(dtype: str, text: str) -> None:
    assert_interpreted(dtype + text, GpuReduction, slack=64)

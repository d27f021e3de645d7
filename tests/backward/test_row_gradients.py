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
from fuseplan.measure.data import random_arrays
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
)


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


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("text", PLANS)
def test_a_cpu_computes_the_plan(dtype: str, text: str) -> None:
    plan = FusionPlan.parse(dtype + text)
    assert_close(forced(plan, Reduction, narrowed(32)), random_arrays(plan, 5), slack=64)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("text", PLANS)
def test_triton_computes_the_plan(dtype: str, text: str) -> None:
    assert_interpreted(dtype + text, GpuReduction, slack=64)

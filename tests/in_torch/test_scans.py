"""Cumulative sums of modules are plans, with what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fuseplan.torch
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import arithmetic_of
from fuseplan.ops.scan import Cumsum
from fuseplan.plans.plan import FusionPlan


class Summed(nn.Module):  # type: ignore[misc]
    def __init__(self, formula: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.formula(src)


FORMULAS = {
    "f32[3x7x20] -> relu -> cumsum -> tanh": lambda x: x.relu().cumsum(-1).tanh(),
    "f32[3x7x20] -> relu -> cumsum(1)": lambda x: torch.cumsum(x.relu(), 1),
    "f32[3x7x20] -> cumsum(0) -> gelu": lambda x: nn.functional.gelu(x.cumsum(-3)),
}


def plans(module: nn.Module) -> list[str]:
    return [site.plan for site in module.report.sites]


@pytest.mark.parametrize("plan", FORMULAS)
def test_a_sum_is_one_plan(plan: str) -> None:
    module, src = Summed(FORMULAS[plan]).eval(), torch.randn(3, 7, 20)
    fused = fuseplan.torch.fuse(module, src)
    assert plans(fused) == [plan]
    torch.testing.assert_close(fused(src), module.double()(src.double()).float())


def test_a_sum_in_a_wider_dtype() -> None:
    module, src = Summed(lambda x: x.cumsum(1, dtype=torch.float32)).eval(), torch.randn(5, 301).half()
    fused = fuseplan.torch.fuse(module, src)
    assert any("cumsum" in plan for plan in plans(fused))
    made = fused(src)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, src.double().cumsum(1).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("src", [torch.arange(12).reshape(3, 4), torch.rand(9)], ids=["integers", "a vector"])
def test_other_sums_are_torchs(src: torch.Tensor) -> None:
    module = Summed(lambda x: x.cumsum(0)).eval()
    fused = fuseplan.torch.fuse(module, src)
    assert plans(fused) == []
    torch.testing.assert_close(fused(src), module(src))


@pytest.mark.parametrize(
    "text", ["cumsum", "cumsum(0, exclusive=True)", "cumsum(exclusive=True, reverse=True)"]
)
def test_the_meaning_of_torchs_tensors_has_gradients(text: str) -> None:
    plan = FusionPlan.parse(f"f64[5x7] -> {text}")
    src = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    made, _ = plan.meaning(src, {}, {}, by=arithmetic_of(src))
    np.testing.assert_allclose(made.detach().numpy(), plan.reference(src.detach().numpy(), {}), rtol=1e-12)
    grad = torch.randn(5, 7, dtype=torch.float64)
    (back,) = (op.backward for op in plan.ops if isinstance(op, Cumsum))
    want = FusionPlan(plan.src, back).reference(grad.numpy(), {})
    (got,) = torch.autograd.grad(made, src, grad)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("text", ["layer_norm_backward(gradients=True)", "rms_norm_backward(gradients=True)"])
def test_sums_over_no_axis_are_their_terms(text: str) -> None:
    """NumPy and torch differ there: a row alone has gradients of scale that are sums over no rows."""
    plan = FusionPlan.parse(f"f64[17] -> {text}")
    arrays = random_arrays(plan, 1)
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    for got, want in zip(evaluated(plan, tensors), evaluated(plan, arrays), strict=True):
        for one, other in zip(listed(got), listed(want), strict=True):
            np.testing.assert_allclose(one.numpy(), other, rtol=1e-12, atol=1e-12)


def listed(made: Any) -> list[Any]:
    return [*made.values()] if isinstance(made, dict) else [made]

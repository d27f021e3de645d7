"""Gradients of weights: both backends against float64, at every rank and dtype; torch's numbers."""

import numpy as np
import pytest
import torch

from closeness import assert_close
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.direct import Direct
from fuseplan.backends.triton.templates.product import Product
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

PLANS = (
    "{d}[7x5] -> linear_weight_gradient(9)",
    "{d}[2x33x40] -> linear_weight_gradient(24)",
    "{d}[3x1] -> linear_weight_gradient(1)",
    "{d}[1x70] -> linear_weight_gradient(33)",
    "{d}[2x3x7x1] -> linear_weight_gradient(19)",
    "{d}[1x3x2x5x3] -> linear_weight_gradient(2)",
    "{d}[50x30, strides=64:1] -> linear_weight_gradient(5)",
)


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("text", PLANS)
def test_cpu(text: str, dtype: str) -> None:
    plan = FusionPlan.parse(text.format(d=dtype))
    for width in (16, 64):
        assert_close(forced(plan, Direct, narrowed(width, 2)), random_arrays(plan, 2), slack=80)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("text", PLANS)
def test_triton(text: str, dtype: str) -> None:
    assert_interpreted(text.format(d=dtype), Product, slack=80)


def test_torchs_gradient_and_the_same_bits_each_time() -> None:
    generator = torch.Generator().manual_seed(3)
    layer, x = torch.nn.Linear(40, 24, bias=False), torch.randn(3, 50, 40, generator=generator)
    grad = torch.randn(3, 50, 24, generator=generator)
    layer(x).backward(grad)
    compiled = compile_plan("f32[3x50x40] -> linear_weight_gradient(24)")
    made = compiled(x, grad=grad)
    torch.testing.assert_close(made, layer.weight.grad, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(made, compiled(x, grad=grad))

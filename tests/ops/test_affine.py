"""Operators with operands against torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from fuseplan.errors import PlanError
from fuseplan.ops.affine import Add, AddAlong, BatchNorm, Bias, MulAlong, Prelu, Scale
from fuseplan.plans.plan import FusionPlan
from strategies import random_operands, random_src

SHAPES = ["3x5", "2x3x7", "2x5x3x7", "1x3x3x2x5", "1x1x1x1"]


def drawn(plan: FusionPlan) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
    """src and operands, as arrays and as tensors."""
    rng = np.random.default_rng(7)
    src, operands = random_src(plan, rng), random_operands(plan, rng)
    return (
        src,
        operands,
        torch.from_numpy(src),
        {key: torch.from_numpy(value) for key, value in operands.items()},
    )


def per_channel(value: Any, rank: int) -> Any:
    return value.reshape(1, -1, *(1,) * (rank - 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_bias_and_scale(shape: str) -> None:
    src, operands, x, given = drawn(plan := FusionPlan(f"f32[{shape}]", Bias(), Scale()))
    expected = (x + per_channel(given["bias"], x.ndim)) * per_channel(given["scale"], x.ndim)
    np.testing.assert_array_equal(plan.reference(src, operands), expected.numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_add(shape: str) -> None:
    src, operands, x, given = drawn(plan := FusionPlan(f"f32[{shape}]", Add(), Add(0.5, -2)))
    expected = 0.5 * torch.add(x, given["other"]) - 2 * given["other_2"]
    np.testing.assert_allclose(plan.reference(src, operands), expected.numpy(), rtol=1e-15)


@pytest.mark.parametrize("axes", [(0,), (1, 2), (-3, -1), (0, 1), (0, 1, 2)])
def test_operands_with_some_axes(axes: tuple[int, ...]) -> None:
    plan = FusionPlan("f32[2x5x3]", AddAlong(axes, alpha2=-2), MulAlong(axes))
    src, operands, x, given = drawn(plan)
    shape = [extent if {axis, axis - 3} & {*axes} else 1 for axis, extent in enumerate((2, 5, 3))]
    expected = (x - 2 * given["other"].reshape(shape)) * given["other_2"].reshape(shape)
    np.testing.assert_allclose(plan.reference(src, operands), expected.numpy(), rtol=1e-15)
    assert FusionPlan.parse(str(plan)) == plan


@pytest.mark.parametrize("axes", [(1,), (2,), (0, 3), (1, 0), (0, 0), (-4,)])
def test_axes_without_the_first_are_all_others(axes: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"axes must be in order, with the outermost[\s\S]*all but the first"):
        FusionPlan("f32[2x5x3]", AddAlong(axes))
    with pytest.raises(PlanError, match="axes must be numbers of axes, at least one"):
        MulAlong(())


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
@pytest.mark.parametrize("shape", SHAPES)
def test_spatial_batch_norm(shape: str, epsilon: float) -> None:
    src, operands, x, given = drawn(plan := FusionPlan(f"f32[{shape}]", BatchNorm(epsilon=epsilon)))
    statistics = given["mean"], given["variance"], given["scale"], given["shift"]
    expected = F.batch_norm(x, *statistics, eps=epsilon).numpy()
    np.testing.assert_allclose(plan.reference(src, operands), expected, rtol=1e-13, atol=1e-14)
    inverse = FusionPlan(f"f32[{shape}]", BatchNorm(inverse=True))
    operands["inverse_variance"] = 1 / np.sqrt(operands.pop("variance") + epsilon)
    np.testing.assert_allclose(inverse.reference(src, operands), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_per_activation(shape: str, inverse: bool) -> None:
    plan = FusionPlan(f"f32[{shape}]", BatchNorm("per_activation", inverse=inverse))
    src, operands, x, given = drawn(plan)
    # each place of an image is a channel of its own
    flat = {name: value.reshape(-1) for name, value in given.items()}
    variance = 1 / flat["inverse_variance"] ** 2 if inverse else flat["variance"]
    statistics = flat["mean"], variance, flat["scale"], flat["shift"]
    epsilon = 1e-30 if inverse else 1e-5  # 2.11 takes no 0
    expected = F.batch_norm(x.reshape(len(x), -1), *statistics, eps=epsilon).reshape(x.shape)
    np.testing.assert_allclose(plan.reference(src, operands), expected.numpy(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_prelu(shape: str, shared: bool) -> None:
    src, operands, x, given = drawn(plan := FusionPlan(f"f32[{shape}]", Prelu(shared=shared)))
    np.testing.assert_array_equal(plan.reference(src, operands), F.prelu(x, given["slope"]).numpy())


@pytest.mark.parametrize(
    "op", [Bias(), Scale(), Add(), BatchNorm(), BatchNorm(inverse=True), Prelu()], ids=str
)
def test_nan_goes_in_and_comes_out(op: Any) -> None:
    plan = FusionPlan("f32[1x3]", op)
    _, operands, _, _ = drawn(plan)
    result = plan.reference(np.array([[np.nan, 1.0, 2.0]]), operands)
    np.testing.assert_array_equal(np.isnan(result), [[True, False, False]])

"""Each activation against torch in float64, an implementation that is not ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.op import Elementwise
from fuseplan.ops import activation
from fuseplan.ops.activation import ACTIVATIONS

Torch = Callable[[Any], Any]


def power(a: float, b: float, g: float, threshold: float) -> Torch:
    """MIOpen's kernel, line by line."""

    def function(x: Any) -> Any:
        t = a + b * x
        return torch.where(t <= threshold, torch.zeros_like(t), torch.pow(t, g))

    return function


CASES: list[tuple[Elementwise, Torch]] = [
    (activation.Identity(), lambda x: x),
    (activation.Sigmoid(), torch.sigmoid),
    (activation.Tanh(), torch.tanh),
    (activation.Tanh(0.5, -1.7), lambda x: -1.7 * torch.tanh(0.5 * x)),
    (activation.Relu(), F.relu),
    (activation.Softplus(), lambda x: F.softplus(x, threshold=700)),
    (activation.Abs(), torch.abs),
    (activation.Power(), power(0, 1, 1, 1e-6)),
    (activation.Power(0.5, 0.25, 1.75), power(0.5, 0.25, 1.75, 1e-6)),
    (activation.Power(1, -2, -0.5, threshold=0.1), power(1, -2, -0.5, 0.1)),
    (activation.ClippedRelu(), F.relu6),
    (activation.ClippedRelu(0.3), lambda x: torch.clamp(x, 0, 0.3)),
    (activation.LeakyRelu(), F.leaky_relu),
    (activation.LeakyRelu(-0.4), lambda x: F.leaky_relu(x, -0.4)),
    (activation.Elu(), F.elu),
    (activation.Elu(0.3), lambda x: F.elu(x, 0.3)),
    (activation.Clamp(-0.5, 0.75), lambda x: torch.clamp(x, -0.5, 0.75)),
    (activation.Clamp(-math.inf, 1), lambda x: torch.clamp(x, max=1)),
    (activation.Gelu(), F.gelu),
    (activation.Gelu("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    (activation.Silu(), F.silu),
    (activation.Hardswish(), F.hardswish),
    (activation.Hardsigmoid(), F.hardsigmoid),
    (activation.Mish(), F.mish),
    (activation.Softsign(), F.softsign),
]
NAMES = [str(op) for op, _ in CASES]
SPREAD = np.concatenate(
    [np.linspace(-40, 40, 1601), [-0.0, 0.0, 1e-300, -1e-300, 1e-9, -1e-9, 6, 3, -3, 700, -700, 1e5, -1e5]]
)


def ours(op: Elementwise, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return op.reference(x.reshape(1, -1), {}, {}).reshape(-1)


def test_every_activation_is_compared() -> None:
    assert {type(op) for op, _ in CASES} == set(ACTIVATIONS)


@pytest.mark.parametrize(("op", "theirs"), CASES, ids=NAMES)
def test_activation_is_torchs(op: Elementwise, theirs: Torch) -> None:
    expected = theirs(torch.from_numpy(SPREAD)).numpy()
    # gelu cancels on its negative side, in torch as here: its error there is absolute
    np.testing.assert_allclose(ours(op, SPREAD), expected, rtol=4e-15, atol=1e-15)


@pytest.mark.parametrize(("op", "theirs"), CASES, ids=NAMES)
@given(x=st.floats(-1e4, 1e4))
def test_activation_is_torchs_anywhere(op: Elementwise, theirs: Torch, x: float) -> None:
    expected = theirs(torch.tensor([x], dtype=torch.float64)).numpy()
    np.testing.assert_allclose(ours(op, np.array([x])), expected, rtol=4e-14, atol=1e-15)


@pytest.mark.parametrize(("op", "theirs"), CASES, ids=NAMES)
def test_nan_goes_in_and_comes_out(op: Elementwise, theirs: Torch) -> None:
    assert np.isnan(ours(op, np.array([math.nan]))).all()


@pytest.mark.parametrize(("op", "theirs"), CASES, ids=NAMES)
def test_infinities_are_torchs(op: Elementwise, theirs: Torch) -> None:
    x = np.array([math.inf, -math.inf])
    np.testing.assert_array_equal(ours(op, x), theirs(torch.from_numpy(x)).numpy())


def test_clamp_of_crossed_bounds_is_miopens() -> None:
    x = np.array([-9.0, 0.0, 9.0])
    np.testing.assert_array_equal(ours(activation.Clamp(1, -1), x), [1, 1, 1])


@pytest.mark.parametrize(("op", "theirs"), CASES, ids=NAMES)
def test_run_time_parameters_take_the_place_of_the_plans(op: Elementwise, theirs: Torch) -> None:
    x = np.linspace(-3, 3, 31).reshape(1, -1)
    values = {each.name: 0.25 + 0.5 * position for position, each in enumerate(op.parameters())}
    fixed: dict[str, Any] = op.attributes() | values
    np.testing.assert_array_equal(op.reference(x, {}, values), type(op)(**fixed).reference(x, {}, {}))

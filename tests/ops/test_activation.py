"""Each activation against torch in float64, an implementation that is not ours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.op import Elementwise
from fuseplan.ops import activation
from fuseplan.ops.activation import ACTIVATIONS
from torch_activations import CASES, Torch

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

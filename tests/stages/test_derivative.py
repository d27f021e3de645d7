"""Derivatives against torch's, against finite differences, and against MIOpen's own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuseplan.language.derivative import derivative
from fuseplan.language.formula import parse_expression
from fuseplan.op import Elementwise
from fuseplan.ops import activation
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.training import ActivationBackward
from fuseplan.scalar import FUNCTIONS, NUMPY, Scalar, const, fold, text
from strategies import MODERATE, scalars

Array = NDArray[np.float64]
NEAR = 1e-7


def value(root: Scalar, x: Any, **given: float) -> Array:
    leaves: dict[str, Any] = {"x": np.asarray(x, np.float64), **given}
    with np.errstate(all="ignore"):
        return np.broadcast_to(fold(root, leaves, NUMPY), np.shape(x))


def by_torch(root: Scalar, x: float, k: float) -> tuple[float, float]:
    """The value, and torch's gradient along x."""
    table = {name: getattr(torch, name) for name in FUNCTIONS}
    table |= {"const": lambda number: torch.tensor(number, dtype=torch.float64)}
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    made = fold(root, {"x": at, "k": torch.tensor(k, dtype=torch.float64)}, table)
    if not made.requires_grad:
        return float(made.detach()), 0.0
    (gradient,) = torch.autograd.grad(made, at, allow_unused=True)
    return float(made.detach()), 0.0 if gradient is None else float(gradient)


@settings(deadline=None)  # torch is imported by the first
@given(scalars(number=MODERATE), MODERATE, st.floats(0.5, 2))
def test_the_slope_is_torchs_where_there_is_one(root: Scalar, x: float, k: float) -> None:
    if root.is_condition:
        return
    around = [by_torch(root, x + step, k) for step in (-NEAR, 0, NEAR)]
    slopes = [slope for _, slope in around]
    if not all(math.isfinite(number) and abs(number) < 1e6 for pair in around for number in pair):
        return
    if max(slopes) - min(slopes) > 1e-3 * (1 + abs(slopes[1])):
        return  # an edge: each library chooses a side
    got = float(value(derivative(root), x, k=k))
    assume(math.isfinite(got))  # at the edge of a domain, 0 times infinity: torch leaves some of these out
    assert got == pytest.approx(slopes[1], rel=1e-3, abs=1e-3), text(derivative(root))


@pytest.mark.parametrize("kind", ACTIVATIONS, ids=lambda kind: kind.name)
def test_every_activation_has_the_slope_of_its_formula(kind: type[Elementwise]) -> None:
    x = np.random.default_rng(0).uniform(-4, 4, 2000)
    for _, op in kind.samples():
        assert isinstance(op, Elementwise)
        given = {each.name: each.value for each in op.parameters()}
        formula = op.formula()
        numeric = (value(formula, x + NEAR, **given) - value(formula, x - NEAR, **given)) / (2 * NEAR)
        np.testing.assert_allclose(value(derivative(formula), x, **given), numeric, rtol=1e-5, atol=1e-6)


Formula = Callable[[Array], Any]


def logistic(x: Array) -> Any:
    return 1 / (1 + np.exp(-x))


# What MIOpen multiplies dy by, of activation_functions.h; y is the forward value. POWER is the exception:
# MIOpen returns b*g*y/t without dy, and what stands here is what dy is to be multiplied by.
MIOPEN: list[tuple[Elementwise, Formula]] = [
    (activation.Identity(), np.ones_like),
    (activation.Sigmoid(), lambda x: logistic(x) * (1 - logistic(x))),
    (activation.Tanh(0.5, -1.7), lambda x: 0.5 * (-1.7 - (-1.7 * np.tanh(0.5 * x)) ** 2 / -1.7)),
    (activation.Relu(), lambda x: 1.0 * (x > 0)),
    (activation.Softplus(), lambda x: np.exp(np.minimum(x, 50)) / (np.exp(np.minimum(x, 50)) + 1)),
    (activation.Abs(), lambda x: np.where(x > 0, 1.0, -1.0)),
    (
        activation.Power(0.5, 0.25, 1.75),
        lambda x: np.where(0.5 + 0.25 * x <= 1e-6, 0, 0.25 * 1.75 * np.float_power(0.5 + 0.25 * x, 0.75)),
    ),
    (activation.ClippedRelu(0.3), lambda x: 1.0 * ((x > 0) & (x <= 0.3))),
    (activation.LeakyRelu(0.1), lambda x: np.where(x > 0, 1.0, 0.1)),
    (activation.Elu(0.7), lambda x: np.where(x > 0, 1.0, 0.7 * (np.exp(x) - 1) + 0.7)),
]


@pytest.mark.parametrize(("op", "want"), MIOPEN, ids=[str(op) for op, _ in MIOPEN])
def test_miopens_ten(op: Elementwise, want: Formula) -> None:
    """At every place but 0 of ABS: there MIOpen's slope is -1 and ours 0, as torch's."""
    x = np.concatenate([np.linspace(-5, 5, 4001), [0.0, 0.3, 6.0]])
    x = x[x != 0] if isinstance(op, activation.Abs) else x
    given = {each.name: each.value for each in op.parameters()}
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(
            value(derivative(op.formula()), x, **given), want(x), rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize(
    ("source", "x", "want"),
    [
        ("maximum(x, 0)", 0, 0),
        ("maximum(0, x)", 0, 1),
        ("minimum(6, maximum(x, 0))", 6, 1),
        ("maximum(-1, minimum(1, x))", 1, 1),
        ("maximum(-1, minimum(1, x))", -1, 1),
        ("abs(x)", 0, 0),
        ("sigmoid(x)", 0, 0.25),
        ("softplus(x)", 0, 0.5),
        ("x * sigmoid(x)", 0, 0.5),
        ("x / (1 + abs(x))", 0, 1),
        ("x / (1 + abs(x))", math.inf, 0),
        ("x / (1 - abs(x))", 0.5, 4),
        ("x * (minimum(relu(x + 3), 6) / 6)", -math.inf, 0),
        ("x * (minimum(relu(x + 3), 6) / 6)", math.inf, 1),
        ("x**2", 0, 0),
        ("x**1", 0, 1),
        ("0**x", 2, 0),
        ("2**x", 0, math.log(2)),
        ("sqrt(relu(x))", -1, 0),
        ("log(minimum(x, 1))", 2, 0),
    ],
)
def test_the_slope_at_an_edge(source: str, x: float, want: float) -> None:
    assert float(value(derivative(parse_expression(source)), x)) == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("x", [-80.0, -30.0, 30.0, 80.0])
def test_no_digits_are_lost_where_an_activation_is_flat(x: float) -> None:
    """1 - sigmoid, 1 - tanh**2 and 1 - |softsign| are rounding errors there; exp(-|x|) is not."""
    for source, want in (
        ("sigmoid(x)", math.exp(-abs(x))),
        ("tanh(x)", 4 * math.exp(-2 * abs(x))),
        ("1e8 * x / (1 + abs(1e8 * x))", 1e8 / (1 + abs(1e8 * x)) ** 2),
    ):
        got = float(value(derivative(parse_expression(source)), x))
        assert got == pytest.approx(want, rel=1e-10, abs=0)


@pytest.mark.parametrize("x", [-4.0, 4.0])
def test_a_slope_that_is_0_by_choice_is_no_factor(x: float) -> None:
    """Whatever comes back, be it infinite: where a clamp holds, nothing passes."""
    for op in (
        activation.Relu(),
        activation.Hardsigmoid(),
        activation.ClippedRelu(2),
        activation.Clamp(-1, 1),
    ):
        src = np.full((1, 1), np.inf)
        got = ActivationBackward(op).reference(src, {"input": np.full((1, 1), x)}, {})
        assert got == (math.inf if op == activation.Relu() and x > 0 else 0)


def test_what_does_not_depend_on_it_has_no_slope() -> None:
    root = parse_expression("k * log(k)")
    assert derivative(root) == const(0)
    assert derivative(parse_expression("x + k"), "k") == const(1)
    assert text(derivative(parse_expression("k * x"))) == "k"

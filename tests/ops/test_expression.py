"""Formulas of the user: against NumPy, from text and from functions."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan.errors import PlanError
from fuseplan.ops.activation import Silu
from fuseplan.ops.expression import Expression
from fuseplan.scalar import DERIVED, FUNCTIONS, Scalar, exp, sigmoid, text, where

X = np.linspace(-3, 3, 13).reshape(1, -1)


def ours(op: Expression, **parameters: float) -> Any:
    return op.reference(X, {}, parameters)


def test_a_text_means_what_numpy_makes_of_it() -> None:
    np.testing.assert_array_equal(ours(Expression("2*x**2 - x/3 + 1")), 2 * X**2 - X / 3 + 1)
    np.testing.assert_array_equal(ours(Expression("where(x > low, x, low)", low=-1)), np.maximum(X, -1))
    np.testing.assert_array_equal(ours(Expression("minimum(abs(x), inf)")), np.abs(X))
    np.testing.assert_array_equal(ours(Expression("x * sigmoid(x)")), Silu().reference(X, {}, {}))


def test_parameters_are_given_at_run_time() -> None:
    op = Expression("x * k + shift", shift=1, k=2)
    assert [(each.name, each.value) for each in op.parameters()] == [("k", 2.0), ("shift", 1.0)]
    np.testing.assert_array_equal(ours(op), X * 2 + 1)
    np.testing.assert_array_equal(ours(op, k=5), X * 5 + 1)


def test_spacing_and_order_of_parameters_make_no_difference() -> None:
    assert Expression("x*a+b", a=1, b=2) == Expression(" x * a + b ", b=2, a=1)
    assert hash(Expression("x*a+b", a=1, b=2)) == hash(Expression("(x*a) + b", b=2, a=1))
    assert Expression("x*a", a=1) != Expression("x*a", a=2)
    assert Expression("x+1").expression == "x + 1"


def test_a_function_is_traced_into_text() -> None:
    def swish(x: Scalar, k: Scalar) -> Scalar:
        return x / (1 + exp(-k * x))

    op = Expression(swish, k=1.5)
    assert op.expression == "x / (1 + exp(-k * x))"
    assert op == Expression(op.expression, k=1.5)
    np.testing.assert_array_equal(ours(op), X / (1 + np.exp(-1.5 * X)))
    assert Expression(lambda x: where(x > 0, x, 0)).expression == "where(x > 0, x, 0)"
    np.testing.assert_array_equal(ours(Expression(sigmoid)), ours(Expression("sigmoid(x)")))


def test_its_formula_takes_the_plans_keys() -> None:
    assert text(Expression("x * k", k=2).formula({"k": "k_2"})) == "x * k_2"


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_function_may_stand_in_a_formula(name: str) -> None:
    call = f"{name}(x, 0.5)" if FUNCTIONS[name] == 2 else f"{name}(x)"
    formula = {"where": "where(x > 0, x, 1)", "gt": "where(gt(x, 0), x, 1)", "ge": "where(ge(x, 0), x, 1)"}
    assert ours(Expression(formula.get(name, call))).shape == X.shape


@pytest.mark.parametrize(
    ("arguments", "parameters", "says"),
    [
        (("k * x",), {}, "there is no 'k' here"),
        (("x",), {"k": 1}, "without k"),
        (("k",), {"k": 1}, "without x"),
        (("x > 0",), {}, "such as where(x > 0, 1, 0)"),
        ((3,), {}, "expression must be a formula"),
        (("",), {}, "this is not an expression"),
        (("x + k",), {"k": "1"}, "k must be a number"),
        (("x + k",), {"k": float("nan")}, "k must be a number"),
        (("x + exp",), {"exp": 1}, "can be named 'exp'"),
        (("x + x",), {"x": 1}, "can be named 'x'"),
        (("x * self",), {"self": 2}, "can be named 'self'"),
        (("x + _k",), {"_k": 1}, "can be named '_k'"),
        (("x + lambda",), {"lambda": 1}, "can be named 'lambda'"),
        (("x + é",), {"é": 1}, "can be named 'é'"),
        ((lambda x: 1.0,), {}, "without x"),
        ((lambda x: None,), {}, "got None"),
        ((lambda x: x > 0,), {}, "is a comparison"),
        ((lambda x: max(x, 0),), {}, "not true or false"),
        ((np.exp,), {}, "from fuseplan.scalar import exp"),
        ((math.exp,), {}, "the functions of fuseplan.scalar"),
        ((torch.relu,), {}, "the functions of fuseplan.scalar"),
    ],
)
def test_what_is_no_formula_is_refused(arguments: Any, parameters: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Expression(*arguments, **parameters)
    assert says in str(caught.value)


def test_the_docstring_names_every_function() -> None:
    written = {"add", "sub", "mul", "div", "neg", "gt", "ge"}  # by signs
    told = set(re.findall(r"\w+", Expression.__doc__ or ""))
    assert {*FUNCTIONS, *DERIVED} - written <= told


def test_errors_of_a_users_function_are_its_own() -> None:
    def broken(x: Scalar) -> Scalar:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        Expression(broken)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        Expression(lambda x, slope: x * slope)

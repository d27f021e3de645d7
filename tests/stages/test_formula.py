from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carets import above_carets
from fuseplan.errors import PlanError
from fuseplan.language.formula import parse_expression
from fuseplan.scalar import FUNCTIONS, erf, exp, leaf, maximum, sigmoid, softplus, text, where

x, k = leaf("x"), leaf("k")


def test_every_form_is_read() -> None:
    assert parse_expression("x*sigmoid( k*x )") == x * sigmoid(k * x)
    assert parse_expression("where(x <= 0, -x, +x**2)") == where(x <= 0, -x, x**2)
    assert parse_expression("maximum(x, 0) / softplus(x) - 1.5e0") == maximum(x, 0) / softplus(x) - 1.5
    assert parse_expression("add(x, mul(2, erf(x)))") == x + 2 * erf(x)
    assert parse_expression("where(gt(x, inf), 1, exp(\n x))") == where(x > float("inf"), 1, exp(x))


@pytest.mark.parametrize(
    ("source", "carets", "says"),
    [
        ("x + sigmid(x)", "sigmid", "Did you mean `sigmoid`?"),
        ("x + kk", "kk", "Did you mean `k`?"),
        ("é + x", "é", "Known here: x, k"),
        ("x if k else 1", "x if k else 1", "is not supported in an expression"),
        ("x + (k if x else 1)", "k if x else 1", "is not supported in an expression"),
        ("x + maximum(k)", "maximum(k)", "got 1; want 2"),
        ("exp(x, k)", "exp(x, k)", "got 2; want 1"),
        ("exp(x=k)", "exp(x=k)", "is not supported in"),
        ("exp(*x)", "*x", "is not supported in"),
        ("x.real", "x.real", "is not supported in"),
        ("x[0]", "x[0]", "is not supported in"),
        ("x @ k", "x @ k", "is not supported in"),
        ("x % 2", "x % 2", "is not supported in"),
        ("x == 1", "x == 1", "is not supported in"),
        ("not x", "not x", "is not supported in"),
        ("1 < x < 2", "1 < x < 2", "is not supported in"),
        ("(lambda: x)()", "(lambda: x)()", "is not supported in"),
        ("x + 'a'", "'a'", "is not supported in"),
        ("x + 1j", "1j", "is not supported in"),
        ("x + True", "True", "is not supported in"),
        ("x + __import__('os')", "__import__", "there is no function"),
        ("1 + (x > 1)", "1 + (x > 1)", "a comparison in `add`"),
        ("where(x, 1, 2)", "where(x, 1, 2)", "want where(x > 0, a, b)"),
        (f"x + 1{'0' * 400}", f"1{'0' * 400}", "too large"),
        ("x +", "", "this is not an expression"),
    ],
)
def test_the_piece_to_blame_is_underlined(source: str, carets: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_expression(source, ("x", "k"))
    assert says in str(caught.value)
    assert above_carets(caught.value).strip() == carets


def test_an_expression_is_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError):
        parse_expression("print(1)")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "source", ["x" + " + x" * 1000, "-" * 150 + "x" + "**x" * 150, "exp(" * 190 + "x" + ")" * 190]
)
def test_expressions_too_large_for_the_stack_are_refused(source: str) -> None:
    with pytest.raises(PlanError):
        parse_expression("exp(" * 50 + source + ")" * 50)


@given(st.text(alphabet="xk0159.e+-*/()<>=, \n'[]" + "".join(FUNCTIONS), max_size=30))
def test_any_text_is_an_expression_or_a_plan_error(source: str) -> None:
    try:
        root = parse_expression(source)
    except PlanError:
        return
    assert parse_expression(text(root)) == root

from __future__ import annotations

import ast

import pytest

from fuseplan.errors import PlanError
from fuseplan.language.syntax import python_expression, span_of
from fuseplan.system.limits import OPERATOR_CHARACTERS


def test_a_node_knows_where_it_stands_among_wide_characters() -> None:
    text = "  é + f(ü, x)"
    call = python_expression(text, "it", "x")
    assert isinstance(call, ast.BinOp)
    begin, end = span_of(text, call.right)
    assert text[begin:end] == "f(ü, x)"
    begin, end = span_of(text, call)
    assert text[begin:end] == "é + f(ü, x)"


def test_line_ends_are_spaces() -> None:
    assert ast.unparse(python_expression("f(a,\n  b)\n\t", "it", "x")) == "f(a, b)"
    assert ast.unparse(python_expression("a\n+ b", "it", "x")) == "a + b"


@pytest.mark.parametrize(
    "text",
    ["", "x +", "(" * 200, "(" * 5000, "x\0y", "\ud800", "1 = 2", "x y", "-" * 5000 + "1", "'", "f(a=1"],
)
def test_what_is_no_expression_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(PlanError, match="this is not it") as caught:
        python_expression(text, "it", "x")
    begin, end = caught.value.span or (-1, -1)
    assert 0 <= begin <= end <= len(text)


def test_texts_that_nobody_writes_are_refused_unread() -> None:
    with pytest.raises(PlanError, match=f"at most {OPERATOR_CHARACTERS} characters"):
        python_expression("x" * (OPERATOR_CHARACTERS + 1), "it", "x")

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.backends.cpu import dialect as cpu_dialect
from fuseplan.backends.cpu.ir import Builder
from fuseplan.backends.cpu.ir_text import Module
from fuseplan.backends.triton import dialect as gpu_dialect
from fuseplan.backends.triton.text import Text
from fuseplan.errors import PlanError
from fuseplan.language.formula import parse_expression
from fuseplan.language.words import WORDS
from fuseplan.scalar import (
    CASTS,
    COMPARISONS,
    DERIVED,
    FUNCTIONS,
    INDEXED,
    NUMPY,
    REBUILD,
    Scalar,
    call,
    const,
    expm1,
    fold,
    leaf,
    leaves_of,
    maximum,
    minimum,
    neg,
    number,
    scalar,
    text,
    told,
    where,
)
from fuseplan.system.limits import EXPRESSION_NODES
from strategies import scalars

x, y = leaf("x"), leaf("y")
anything: Any = x  # for what the types already forbid
nothing: Any = None


def value(root: Scalar, **leaves: float) -> float:
    with np.errstate(all="ignore"):
        return float(fold(root, {name: np.float64(given) for name, given in leaves.items()}, NUMPY))


def test_operators_of_python_build_expressions() -> None:
    assert text(2 + x * y - x / 3) == "2 + x * y - x / 3"
    assert text((1 - x) ** 2 / 2**x) == "(1 - x)**2 / 2**x"
    assert text(-(x + 1) * +x) == "-(x + 1) * x"
    assert (
        text(where(x < 1, abs(x), where(x <= y, 1, 1 / x))) == "where(1 > x, abs(x), where(y >= x, 1, 1 / x))"
    )
    assert text(where(x > y, x, where(x >= 2, y, 0))) == "where(x > y, x, where(x >= 2, y, 0))"
    assert text(1 - (x - y)) == "1 - (x - y)"
    assert text(anything - np.float32(0.5)) == "x - 0.5"


@pytest.mark.parametrize(
    ("written", "printed"),
    [
        ("((x))", "x"),
        ("(x*y)*2", "x * y * 2"),
        ("x*(y*2)", "x * (y * 2)"),
        ("x-(y-1)", "x - (y - 1)"),
        ("x/(y/x)", "x / (y / x)"),
        ("-x**2", "-x**2"),
        ("(-x)**2", "(-x)**2"),
        ("-(2**x)", "-2**x"),
        ("(-2)**x", "(-2)**x"),
        ("2**-x", "2**-x"),
        ("(x**2)**y", "(x**2)**y"),
        ("x**2**y", "x**2**y"),
        ("x - -2", "x - -2"),
        ("-0.0", "-0"),
        ("inf", "inf"),
        ("-inf", "-inf"),
        ("1e16 + 1e15", "1e+16 + 1000000000000000"),
        ("minimum(x, 6.0)", "minimum(x, 6)"),
    ],
)
def test_text_has_the_fewest_parentheses(written: str, printed: str) -> None:
    assert text(parse_expression(written)) == printed


@given(scalars())
def test_text_goes_both_ways(root: Scalar) -> None:
    assert parse_expression(text(root)) == root


@given(scalars())
def test_what_is_told_by_numbers_stands_for_the_text(root: Scalar) -> None:
    whole, _, parts = told(root * root).partition(" with ")
    for part in reversed(re.split(r", (?=\$\d+ = )", parts)):
        name, _, meant = part.partition(" = ")
        whole = re.sub(rf"\{name}(?!\d)", f"({meant})", whole) if name else whole
    assert parse_expression(whole) == root * root


@given(scalars(), st.floats(-3, 3), st.floats(-3, 3))
def test_rebuilt_and_reread_expressions_mean_the_same(root: Scalar, first: float, second: float) -> None:
    leaves = {"x": first, "k": second}
    rebuilt = fold(root, {name: leaf(name) for name in leaves}, REBUILD)
    assert rebuilt == root
    np.testing.assert_equal(value(parse_expression(text(root)), **leaves), value(root, **leaves))


@given(scalars())
def test_equal_expressions_hash_alike_here_and_in_another_process(root: Scalar) -> None:
    again = pickle.loads(pickle.dumps(root))
    assert again == root
    assert hash(again) == hash(root)


def test_tables_have_every_function() -> None:
    assert REBUILD.keys() == FUNCTIONS.keys() | CASTS.keys() | INDEXED.keys() | {"const"}
    assert NUMPY.keys() == REBUILD.keys() | WORDS.keys()
    backends = cpu_dialect.table(Builder(Module(), "f", [])), gpu_dialect.table(Text())
    assert all(table.keys() >= NUMPY.keys() for table in backends)
    assert len(FUNCTIONS) <= 20
    assert not FUNCTIONS.keys() & DERIVED.keys()


def test_fold_computes_an_equal_part_once() -> None:
    calls: list[str] = []

    def counting(name: str) -> Any:
        return lambda *args: calls.append(name)

    table = {name: counting(name) for name in [*FUNCTIONS, "const"]}
    fold((x + 1) * expm1(x + 1), {"x": None}, table)
    assert sorted(calls) == ["add", "const", "expm1", "mul"]


EXACT: dict[str, Any] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "maximum": max,
    "minimum": min,
    "pow": math.pow,
    "exp": math.exp,
    "expm1": math.expm1,
    "log": math.log,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "erf": math.erf,
    "round": round,
    "where": lambda condition, a, b: a if condition else b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@given(a=st.floats(0.01, 9), b=st.floats(0.01, 9))
def test_numpys_meaning_is_the_c_librarys(name: str, a: float, b: float) -> None:
    args = [a, b][: FUNCTIONS[name]] if name != "where" else [a > b, a, b]
    assert NUMPY[name](*args) == pytest.approx(EXACT[name](*args), rel=1e-14)


def test_nan_goes_through_maximum_and_minimum() -> None:
    assert math.isnan(value(maximum(x, 0), x=math.nan))
    assert math.isnan(value(maximum(0, x), x=math.nan))
    assert math.isnan(value(minimum(x, 0), x=math.nan))


@pytest.mark.parametrize("name", DERIVED)
@pytest.mark.parametrize(
    "extreme", [-1e308, -800.0, -40.0, -0.0, 0.0, 1e-300, 40.0, 800.0, 1e308, math.inf, -math.inf]
)
def test_derived_functions_neither_overflow_nor_lose_small_results(name: str, extreme: float) -> None:
    exact: dict[str, Any] = {
        "relu": lambda z: max(z, 0.0),
        "sigmoid": lambda z: 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z)),
        "softplus": lambda z: z + math.log1p(math.exp(-z)) if z > 0 else math.log1p(math.exp(z)),
    }
    with np.errstate(over="raise", invalid="raise"):
        found = float(fold(DERIVED[name](x), {"x": np.float64(extreme)}, NUMPY))
    assert found == pytest.approx(exact[name](extreme), rel=1e-15)


def test_negative_zero_stays_what_it_is() -> None:
    assert const(-0.0) != const(0.0)
    assert math.copysign(1, value(1 / const(-0.0))) == -1
    assert neg(neg(const(0.0))) != const(-0.0)
    assert neg(2) == const(-2)


def test_leaves_are_found() -> None:
    assert leaves_of(where(x > 1, y, leaf("k") ** 2)) == {"x", "y", "k"}
    assert leaves_of(const(1)) == frozenset()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: const(math.nan), "got nan"),
        (lambda: anything + True, "got True"),
        (lambda: anything + "1", "got '1'"),
        (lambda: scalar(nothing), "got None"),
        (lambda: (x > 1) + 1, "a comparison in `add`"),
        (lambda: where(x > 1, x > 2, 0), "a comparison in `where`"),
        (lambda: where(anything, 1, 0), "got x; want where(x > 0, a, b)"),
        (lambda: where(anything == 1, 1, 0), "got False"),
        (lambda: max(x, 1), "not true or false"),
        (lambda: 1 < x < 2, "not true or false"),
        (lambda: abs(x > 1), "a comparison in `abs`"),
        (lambda: neg(x > 1), "a comparison in `neg`"),
    ],
)
def test_what_is_no_expression_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        wrong()
    assert says in str(caught.value)


def test_expressions_do_not_grow_without_bound() -> None:
    deep = x
    with pytest.raises(PlanError, match="too large"):  # noqa: PT012 - where in the loop is not the question
        for _ in range(1000):
            deep = deep + 1
    wide = x
    with pytest.raises(PlanError, match="too large"):  # noqa: PT012 - as above
        for _ in range(100):
            wide = wide * wide
    assert wide.size <= EXPRESSION_NODES
    assert deep.depth <= 200
    assert parse_expression(text(deep)) == deep


@given(st.floats(allow_nan=False))
def test_numbers_read_back(given_number: float) -> None:
    assert float(number(given_number)) == given_number


def test_only_comparisons_are_conditions() -> None:
    made = {
        name: call(name, *([x > 0] if name == "where" else []), *[x] * (count - (name == "where")))
        for name, count in FUNCTIONS.items()
    }
    assert {name for name, root in made.items() if root.is_condition} == set(COMPARISONS)

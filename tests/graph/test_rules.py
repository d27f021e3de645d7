"""Rules of users: found in either order and around other formulas, refused where they are wrong."""

from __future__ import annotations

import numpy as np
import pytest

import fuseplan
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.graph.cut import Site
from fuseplan.graph.find import find
from fuseplan.graph.session import Session
from fuseplan.op import Elementwise, operand, operator, parameter
from fuseplan.scalar import Scalar, sigmoid
from graphs import graph_of, random_inputs


@operator
class LearnedSwish(Elementwise):
    """factor * x * sigmoid(beta * x)"""

    beta = operand("channel")
    factor: float = parameter(default=1.0)

    def apply(self, x: Scalar, beta: Scalar, factor: Scalar) -> Scalar:
        return factor * x * sigmoid(beta * x)


@operator
class Gated(Elementwise):
    """x * sigmoid(gate * x)"""

    gate = operand("element")

    def apply(self, x: Scalar, gate: Scalar) -> Scalar:
        return x * sigmoid(gate * x)


@pytest.fixture(autouse=True)
def known(registries: None) -> None:
    fuseplan.register_operator(LearnedSwish)
    fuseplan.register_operator(Gated)


SWISH = "x * sigmoid(beta * x) -> learned_swish"
SCALED = "k * x * sigmoid(x * beta) -> learned_swish(k)"
GELU = "x / (1 + exp(-(k * x))) -> elementwise('x * sigmoid(k * x)', k=k)"
SPELLED = "a / (1 + exp(-(1.702 * a)))"
X, BETA = "input x: f32[2x6x4x4]", "constant beta: f32[6x1x1]"


def _checked(lines: str, *rules: str) -> tuple[Site, ...]:
    graph = graph_of(f"{X}\n{lines}\noutput y")
    cut = find(graph, threads=1, rules=[fuseplan.rule(each) for each in rules])
    inputs = random_inputs(graph)
    np.testing.assert_allclose(Session(cut)(inputs)["y"], graph.evaluate(inputs)["y"], rtol=1e-4, atol=1e-5)
    return cut.sites


@pytest.mark.parametrize(
    ("lines", "text", "plan"),
    [
        (f'{BETA}\ny = map("a * sigmoid(b * a)")(x, beta)', SWISH, "learned_swish"),
        (f'{BETA}\ng = map("sigmoid(a * b)")(x, beta)\ny = map("a * b")(g, x)', SWISH, "learned_swish"),
        (f'{BETA}\ny = map("sigmoid(b * a) * (0.5 * a)")(x, beta)', SCALED, "learned_swish(0.5)"),
        (
            f'input z: f32[2x6x4x4]\n{BETA}\nr = relu(x)\ns = map("a * sigmoid(a * b)")(r, beta)\n'
            't = tanh(s)\ny = map("a + b")(t, z)',
            SWISH, "relu -> learned_swish -> tanh -> add",
        ),
        (
            f'constant w: f32[6x6x1x1]\n{BETA}\nc = conv2d(6, kernel=1)(x, w)\n'
            'y = map("a * sigmoid(b * a)")(c, beta)',
            SWISH, "conv2d(6, kernel=1) -> learned_swish",
        ),
        (f'y = map("maximum({SPELLED}, 0) + 1")(x)', GELU,
         'elementwise("x * sigmoid(k * x)", k=1.702) -> elementwise("maximum(x, 0) + 1")'),
        (f'input z: f32[2x6x4x4]\nh = tanh(x)\nt = map("{SPELLED}")(h)\ny = map("a * b")(t, z)', GELU,
         'tanh -> elementwise("x * sigmoid(k * x)", k=1.702) -> mul'),
    ],
)  # fmt: skip
def test_plans_have_a_rule_s_operators(lines: str, text: str, plan: str) -> None:
    (site,) = _checked(lines, text)
    assert str(site.plan).partition(" -> ")[2] == plan
    assert site.rules == (fuseplan.rule(text).name,)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ('input beta: f32[2x6x4x4]\ny = map("a * sigmoid(b * a)")(x, beta)', SWISH),  # an element each
        (f'{BETA}\ny = map("a * sigmoid(b * a)")(x, beta)', "x * sigmoid(gate * x) -> gated"),
        (f'{BETA}\nr = relu(x)\ny = map("a * sigmoid(b * c)")(r, beta, x)', SWISH),  # of another value
        ('y = map("a * sigmoid(2 * a)")(x)', SWISH),  # a number, and no tensor
        ('y = map("a / (1 + exp(-(1.702 * a + 1)))")(x)', GELU),
    ],
)
def test_other_formulas_stay_as_they_are(lines: str, text: str) -> None:
    assert not any(site.rules for site in _checked(lines, text))


def test_the_first_rule_that_holds_is_taken() -> None:
    lines = f'y = map("{SPELLED}")(x)'
    fixed = "x / (1 + exp(-(1.702 * x))) -> elementwise('x * sigmoid(1.702 * x)')"
    for rules, name in (((fixed, GELU), fixed), ((GELU, fixed), GELU)):
        (site,) = _checked(lines, *rules)
        assert site.rules == (name.partition(" -> ")[2],)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "x * sigmoid(beta * x) -> learned_swish(2)",
            r"learned_swish\(2\) is wrong: for x=.*, beta=.*, its",
        ),
        ("x * beta + y -> learned_swish", r"x=.*, y=.*, beta=.*tolerance is 1e-06"),
        ("0.5 * x * (1 + erf(x * 0.7071067811865475)) -> gelu(tanh)", "is wrong"),
        ("maximum(x, 0) -> elementwise('sqrt(x) * sqrt(x)')", "operators give nan"),
        ("log(-abs(x) - 1) -> relu", "is finite for no random numbers"),
    ],
)
def test_wrong_rules_are_refused(text: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        fuseplan.rule(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x * sigmoid(x) -> learned_swish", "the formula of a rule names all operands"),
        ("x * sigmoid(x)", "this is no rule"),
        ("2 -> relu", "this is no rule"),
        ("x > 0 -> relu", "this is no rule"),
        ("x -> linear(3)", "a rule's operators are elementwise, without results"),
        ("x -> save(a)", "a rule's operators are elementwise, without results"),
        ("x -> learnt_swish", "learnt_swish"),
        ("sing(x) -> relu", "there is no function"),
        ("x * k -> elementwise('x * k', k=-abs(k))", "this is not"),
    ],
)
def test_texts_that_are_no_rules_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        fuseplan.rule(text)


def test_a_tolerance_allows_an_approximation() -> None:
    made = fuseplan.rule("0.5 * x * (1 + erf(x * 0.70710678)) -> gelu(tanh)", name="fast", tolerance=1e-3)
    assert str(made) == "0.5 * x * (1 + erf(x * 0.70710678)) -> gelu(tanh)"
    graph = graph_of(f'{X}\ny = map("0.5 * a * (1 + erf(a * 0.7071067811865475))")(x)\noutput y')
    (site,) = find(graph, rules=[made]).sites
    assert str(site.plan).endswith(" -> gelu(tanh)")
    assert site.rules == ("fast",)

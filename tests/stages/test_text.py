from __future__ import annotations

import json
import math

import pytest

from carets import above_carets
from fuseplan.errors import PlanError
from fuseplan.op import Op
from fuseplan.ops.activation import Clamp, Elu, Gelu, Relu, Tanh
from fuseplan.ops.affine import Add, BatchNorm, Prelu
from fuseplan.ops.conv import Conv1d, Conv2d, Conv3d
from fuseplan.ops.expression import Expression
from fuseplan.ops.matmul import Matmul
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text, parse_json, parse_operator, parse_plan


@pytest.mark.parametrize(
    ("op", "printed"),
    [
        (Relu(), "relu"),
        (Elu(), "elu"),
        (Elu(0.5), "elu(0.5)"),
        (Tanh(beta=2), "tanh(beta=2)"),
        (Clamp(0, math.inf), "clamp(0, max=inf)"),
        (Clamp(-math.inf, 1e-3), "clamp(-inf, max=0.001)"),
        (Gelu("tanh"), "gelu(tanh)"),
        (Add(alpha2=0.5), "add(alpha2=0.5)"),
        (BatchNorm("per_activation", inverse=True), "batch_norm(per_activation, inverse=True)"),
        (BatchNorm(epsilon=1e-3), "batch_norm(epsilon=0.001)"),
        (Prelu(shared=True), "prelu(shared=True)"),
        (Conv2d(64, kernel=1), "conv2d(64, kernel=1)"),
        (
            Conv2d(64, (3, 3), stride=(2, 2), padding=((1, 1), (1, 1))),
            "conv2d(64, kernel=3, stride=2, padding=1)",
        ),
        (Conv2d(64, (3, 5), padding=(1, 2)), "conv2d(64, kernel=(3, 5), padding=(1, 2))"),
        (Conv2d(64, 3, padding=((0, 1), 1)), "conv2d(64, kernel=3, padding=((0, 1), (1, 1)))"),
        (Conv2d(64, 3, padding="same", groups=4), "conv2d(64, kernel=3, padding=same, groups=4)"),
        (Conv2d(64, 3, padding="valid", dilation=2), "conv2d(64, kernel=3, dilation=2)"),
        (Conv1d(8, (3,), padding=((2, 0),)), "conv1d(8, kernel=3, padding=((2, 0),))"),
        (Conv3d(8, (1, 2, 3)), "conv3d(8, kernel=(1, 2, 3))"),
        (Conv2d(64, 3, precision="tf32"), "conv2d(64, kernel=3, precision=tf32)"),
        (Matmul(64), "matmul(64)"),
        (Matmul(64, True, precision="full"), "matmul(64, transposed=True)"),
        (Matmul(64, batched=True, precision="tf32"), "matmul(64, batched=True, precision=tf32)"),
        (Expression("x*sigmoid( k*x )", k=1.702), 'elementwise("x * sigmoid(k * x)", k=1.702)'),
        (Expression("x"), "elementwise(x)"),
    ],
)
def test_an_operator_prints_and_reads_back(op: Op, printed: str) -> None:
    assert operator_text(op) == printed
    assert parse_operator(printed) == op


def test_parameter_values_can_be_left_out() -> None:
    assert (
        operator_text(BatchNorm("per_activation", epsilon=1e-3), parameters=False)
        == "batch_norm(per_activation)"
    )
    assert operator_text(Clamp(0, 1), parameters=False) == "clamp"
    assert operator_text(Expression("k * x", k=2), parameters=False) == 'elementwise("k * x")'


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("f32[2x3]->relu->elu( alpha = 2 )", "f32[2x3] -> relu -> elu(2)"),
        ("f32[2x3] -> relu() -> elu(alpha=1)", "f32[2x3] -> relu -> elu"),
        ("f32[2x3] ->\n  relu ->\n\telu(\n  0.5)\n", "f32[2x3] -> relu -> elu(0.5)"),
        (
            "f32[2x3x8] -> conv1d(kernel=3, features=4, padding=[1])",
            "f32[2x3x8] -> conv1d(4, kernel=3, padding=1)",
        ),
        ("f32[2x3] -> elementwise('x+1')", 'f32[2x3] -> elementwise("x + 1")'),
        ("f32[2x3] -> elementwise(expression='1 - -x')", 'f32[2x3] -> elementwise("1 - -x")'),
        ("f32[2x3] -> elementwise('x*b*a', b=2, a=1)", 'f32[2x3] -> elementwise("x * b * a", a=1, b=2)'),
        ("f32[2x3] -> gelu('tanh') -> gelu(approximate=none)", "f32[2x3] -> gelu(tanh) -> gelu"),
    ],
)
def test_other_spellings_have_one_canonical_text(written: str, canonical: str) -> None:
    assert str(FusionPlan.parse(written)) == canonical


IMAGE = "f32[2x3x8x8] -> relu -> "


@pytest.mark.parametrize(
    ("text", "carets", "says"),
    [
        ("f32[2x3] -> rellu -> relu", "rellu", "Did you mean `relu`?"),
        ("f33[2x3] -> relu", "f33", "Did you mean `f32`?"),
        ("f32[2x0] -> relu", "2x0", "positive integer"),
        ("f32[2x3] -> relu ->", "", "an operator is missing"),
        ("f32[2x3] -> -> relu", "-", "an operator is missing"),
        ("-> relu", "-", "this is not a tensor"),
        ("f32[2x3] -> relu relu", "relu", "-> is missing in front of this"),
        ("f32[2x3] -> elu(", "(", "was never closed"),
        ("f32[2x3] -> elu(1 -> relu", "(", "was never closed"),
        ("f32[2x3] -> 3", "3", "this is not an operator"),
        ("f32[2x3] -> ops.relu()", "ops.relu()", "this is not an operator"),
        ("f32[2x3] -> relu(1)", "1", "relu has no fields"),
        ("f32[2x3] -> elu(1, 2)", "2", "elu has 1 field"),
        ("f32[2x3] -> clamp(0, 6)", "6", "want max=..."),
        ("f32[2x3] -> clamp(0)", "clamp", "clamp needs max"),
        ("f32[2x3] -> clamp", "clamp", "clamp needs min and max"),
        ("f32[2x3] -> clamp", "clamp", "want such as clamp(-0.5, max=0.75)"),
        ("f32[2x3] -> elu(1, alpha=2)", "alpha=2", "alpha is given twice"),
        ("f32[2x3] -> elu(alhpa=2)", "alhpa=2", "Did you mean `alpha`?"),
        ("f32[2x3] -> elu(**alpha)", "**alpha", "has no field"),
        ("f32[2x3] -> elu(alpha=nan)", "nan", "elu: alpha must be a number"),
        ("f32[2x3] -> elu(alpha=1+1)", "1+1", "this is not a value"),
        ("f32[2x3] -> elu(alpha=-one)", "-one", "this is not a value"),
        ("f32[2x3] -> elu(alpha=-True)", "-True", "this is not a value"),
        ("f32[2x3] -> elu(alpha=None)", "None", "this is not a value"),
        ("f32[2x3] -> elu(alpha=True)", "True", "elu: alpha must be a number"),
        (IMAGE + "conv2d(4, kernel=0) -> relu", "0", "kernel must be a positive integer"),
        (IMAGE + "conv2d(4, kernel=True)", "True", "kernel must be a positive integer"),
        (IMAGE + "conv2d(4, kernel=1.5)", "1.5", "kernel must be a positive integer"),
        (IMAGE + "conv2d(0, kernel=1)", "0", "features must be a positive integer"),
        (IMAGE + "conv2d(4, kernel=(3, 3, 3))", "(3, 3, 3)", "2 spatial axes"),
        (IMAGE + "conv2d(4, kernel=3, padding=-1)", "-1", "padding must be 0 to 2^31 - 1"),
        (IMAGE + "conv2d(4, kernel=3, padding=sane)", "sane", "Did you mean `same`?"),
        (IMAGE + "conv2d(4, kernel=3, groups=3)", "3", "features a multiple of 3"),
        (
            IMAGE + "conv2d(4, kernel=3, groups=2) -> relu",
            "conv2d(4, kernel=3, groups=2)",
            "multiple of 2 channels",
        ),
        (IMAGE + "conv2d(4, kernel=9)", "conv2d(4, kernel=9)", "larger than its padded input"),
        (IMAGE + "matmul(4, precision=tf16)", "tf16", "precision is not 'tf16'"),
        ("f16[2x8x8x3, bchs of bhsc] -> matmul(4, precision=tf32)", "matmul(4, precision=tf32)", "want f32"),
        (IMAGE + "conv1d(4, kernel=3)", "conv1d(4, kernel=3)", "taken by conv2d"),
        ("f32[2x3] -> elementwise('x + sigmid(x)') -> relu", "sigmid", "Did you mean `sigmoid`?"),
        ("f32[2x3] -> elementwise('x + k', j=1)", "k", "there is no 'k' here"),
        ("f32[2x3] -> elementwise('x + k', k=nan)", "nan", "k must be a number"),
        ("f32[2x3] -> elementwise('x', k=1)", "'x'", "without k"),
        ("f32[2x3] -> elementwise('1')", "'1'", "without x"),
        ("f32[2x3] -> elementwise('x > 1')", "'x > 1'", "where(x > 1, 1, 0)"),
        ("f32[2x3] -> elementwise('x * out', out=1)", "1", "can be named 'out'"),
        ("f32[2x3] -> elementwise('x * self', self=2)", "2", "can be named 'self'"),
        ("f32[2x3] -> relu(self=2)", "self=2", "relu has no field 'self'"),
        ("f32[2x3] -> elementwise(3)", "3", "expression must be a formula"),
    ],
)
def test_the_piece_to_blame_is_underlined(text: str, carets: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(text)
    assert says in str(caught.value)
    assert above_carets(caught.value) == carets
    assert caught.value.text == text


def test_an_error_names_its_operator() -> None:
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(IMAGE + "conv2d(4, kernel=9) -> bias")
    assert caught.value.operator == 1


def test_what_does_not_fit_is_found_by_the_plan_not_by_its_text() -> None:
    src, ops = parse_plan("f32[2x3] -> conv2d(4, kernel=3)")
    assert (str(src), ops) == ("f32[2x3]", [Conv2d(4, 3)])


PLAN = FusionPlan.parse(
    "f16[2x3x8x8, nhwc] -> conv2d(4, kernel=(3, 1), padding=((0, 1), (1, 0))) -> clamp(0, max=inf)"
)


def test_json_is_plain() -> None:
    assert json.loads(PLAN.to_json()) == {
        "src": {"shape": [2, 3, 8, 8], "dtype": "f16", "layout": "nhwc"},
        "operators": [
            {"name": "conv2d", "fields": {"features": 4, "kernel": [3, 1], "padding": [[0, 1], [1, 0]]}},
            {"name": "clamp", "fields": {"min": 0.0, "max": "inf"}},
        ],
    }
    assert FusionPlan.from_json(PLAN.to_json()) == PLAN


def test_json_truncated_anywhere_is_refused_with_its_place() -> None:
    whole = PLAN.to_json()
    for length in range(len(whole)):
        with pytest.raises(PlanError, match=r"this is not JSON.* at line 1, column") as caught:
            parse_json(whole[:length])
        begin, end = caught.value.span or (-1, -1)
        assert 0 <= begin <= end <= length
        assert f"column {begin + 1}" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"src"', '"source"', "has no member 'source'"),
        ('"operators": [', '"operators": [3, ', "operators[0] is an object"),
        ('"conv2d"', '"conv4d"', "operators[0]: there is no operator 'conv4d'"),
        ('"conv2d"', "null", "operators[0] needs 'name' in a plan's JSON\n\n  got null; want a text"),
        ('"clamp"', '"clap"', "operators[1]: there is no operator 'clap'"),
        ('"max": "inf"', '"maxi": "inf"', "operators[1]: clamp has no field 'maxi'"),
        (', "max": "inf"', "", "operators[1]: clamp needs max"),
        ('"max": "inf"', '"max": "x"', "operators[1]: clamp: max must be a number"),
        ('"max": "inf"', '"max": Infinity', 'write the word "inf"'),
        ('"max": "inf"', '"max": NaN', "NaN is no number"),
        ('"max": "inf"', '"min": 1', "'min' is given twice"),
        ('"features": 4', '"features": 4.5', "operators[0]: conv2d: features must be a positive integer"),
        ('"features": 4', '"features": true', "operators[0]: conv2d: features must be a positive integer"),
        ('"kernel": [3, 1]', '"kernel": {}', "operators[0]: conv2d: kernel must be a positive integer"),
        ('"kernel": [3, 1]', '"kernel": [99, 1]', "larger than its padded input"),
        ("[2, 3, 8, 8]", "[2, 0, 8, 8]", "src: an extent must be a positive integer"),
        ("[2, 3, 8, 8]", '"2x3x8x8"', "src needs 'shape'"),
        ('"nhwc"', '"nwc"', "src: no layout of 4 axes is named 'nwc'"),
        ('"layout"', '"order"', "src has no member 'order'"),
        ('"f16"', "[]", "src needs 'dtype'"),
        ("4", "9" * 5000, "this is not a plan's JSON"),
    ],
)
def test_wrong_json_is_refused_saying_where(before: str, after: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        FusionPlan.from_json(PLAN.to_json().replace(before, after, 1))
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"src": {}}', "[" * 100_000, "\ud800", '"\x00"'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        parse_json(text)


# ---- attributes that are operators


@pytest.mark.parametrize(
    "text",
    [
        "activation_backward(relu)",
        "activation_backward(leaky_relu(0.1))",
        "activation_backward(gelu(tanh))",
        'activation_backward(elementwise("x * sigmoid(k * x)", k=1.702))',
        "batch_norm_backward(clamp(-1, max=inf), mode=per_activation)",
        "batch_norm_backward(statistics=recomputed, epsilon=0.001)",
    ],
)
def test_an_operator_within_an_operator_goes_both_ways(text: str) -> None:
    assert operator_text(parse_operator(text)) == text
    plan = FusionPlan.parse(f"f32[2x3] -> {text}")
    again = FusionPlan.from_json(plan.to_json())
    assert (again, str(again)) == (plan, str(plan))


def test_only_what_is_fixed_in_it_is_written_without_parameters() -> None:
    op = parse_operator(
        "batch_norm_backward(elu(0.5), mode=per_activation, statistics=recomputed, epsilon=1)"
    )
    want = "batch_norm_backward(elu, mode=per_activation, statistics=recomputed)"
    assert operator_text(op, parameters=False) == want


@pytest.mark.parametrize(
    ("text", "blamed", "says"),
    [
        ("activation_backward", "activation_backward", "needs of"),
        ("activation_backward", "activation_backward", "want such as activation_backward(relu)"),
        ("activation_backward(rely)", "rely", "Did you mean `relu`"),
        ("activation_backward(softmax)", "softmax", "an elementwise operator without operands"),
        ("activation_backward(conv2d(4, kernel=1))", "conv2d(4, kernel=1)", "got conv2d, which takes weight"),
        ("activation_backward(leaky_relu(slope=1))", "slope=1", "has no field 'slope'"),
        ("activation_backward(leaky_relu(inf * 2))", "inf * 2", "this is not a value"),
        ("activation_backward(0.5)", "0.5", "this is not an operator"),
        ("activation_backward((relu, elu))", "(relu, elu)", "this is not an operator"),
        ('activation_backward("relu")', '"relu"', "this is not an operator"),
        ("relu(relu)", "relu", "has no fields"),
    ],
)
def test_carets_stand_under_what_is_wrong_within(text: str, blamed: str, says: str) -> None:
    plan = f"f32[2x3] -> {text}"
    with pytest.raises(PlanError) as error:
        FusionPlan.parse(plan)
    lines = str(error.value).splitlines()
    assert says in str(error.value)
    place = plan.rindex(blamed)
    assert "  " + " " * place + "^" * len(blamed) in lines


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ('"relu"', "operators[0].fields.of is an object in a plan's JSON"),
        ('{"name": "rely", "fields": {}}', "operators[0].fields.of: there is no operator 'rely'"),
        ('{"name": "relu", "fields": {"x": 1}}', "operators[0].fields.of: relu has no field 'x'"),
        ('{"name": "softmax", "fields": {}}', "operators[0]: activation_backward: of must be an activation"),
    ],
)
def test_json_within_json_says_where(of: str, says: str) -> None:
    operator = f'{{"name": "activation_backward", "fields": {{"of": {of}}}}}'
    with pytest.raises(PlanError) as error:
        FusionPlan.from_json(f'{{"src": {{"shape": [2, 3], "dtype": "f32"}}, "operators": [{operator}]}}')
    assert says in str(error.value)

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from carets import above_carets
from fuseplan.errors import ArgumentError, PlanError, Unsupported
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.activation import Elu, Relu
from fuseplan.ops.affine import Add, BatchNorm, Bias
from fuseplan.ops.conv import Conv2d
from fuseplan.ops.expression import Expression
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import text

RESNET = "f16[64x256x55x55, nhwc] -> conv2d(64, kernel=1) -> bias -> relu"
nothing: Any = None


def add(wrong: Any) -> None:
    FusionPlan("f32[2x3]").add(wrong)


def test_operators_are_added_one_by_one_or_given_at_once() -> None:
    plan = FusionPlan(TensorSpec((64, 256, 55, 55), "f16", "nhwc"))
    convolution = plan.add(Conv2d(64, kernel=1))
    bias = plan.add(Bias())
    assert plan.output == TensorSpec((64, 64, 55, 55), "f16", "nhwc")
    plan.add(Relu())
    assert str(plan) == RESNET
    assert plan == FusionPlan.parse(RESNET) == FusionPlan(plan.src, *plan.ops)
    assert eval(repr(plan)) == plan
    assert (convolution.index, bias.index, len(plan)) == (0, 1, 3)
    assert [step.op.name for step in plan] == ["conv2d", "bias", "relu"]
    assert plan[0] == convolution
    assert plan[-1] is plan.steps[2]
    assert bias.src == convolution.dst


@pytest.mark.parametrize("index", [3, -4, 10**30])
def test_there_is_no_step_outside_the_plan(index: int) -> None:
    with pytest.raises(IndexError, match="the plan has 3 operators"):
        FusionPlan.parse(RESNET)[index]


def test_an_empty_plan_gives_its_input() -> None:
    plan = FusionPlan("f32[2x3]")
    assert (plan.output, len(plan), plan.operands, plan.parameters) == (plan.src, 0, (), ())
    np.testing.assert_array_equal(plan.reference(np.eye(2, 3, dtype=np.float32), {}), np.eye(2, 3))


def test_keys_are_the_operands_own_names_numbered_from_the_second_on() -> None:
    plan = FusionPlan(
        "f32[2x3]", Bias(), Bias(), BatchNorm(), Bias(), BatchNorm(epsilon=1e-3), Expression("k * x", k=2)
    )
    assert [each.key for each in plan.operands] == [
        *("bias", "bias_2", "mean", "variance", "scale", "shift", "bias_3"),
        *("mean_2", "variance_2", "scale_2", "shift_2"),
    ]
    assert [(each.key, each.value) for each in plan.parameters] == [
        *(("epsilon", 1e-5), ("epsilon_2", 1e-3), ("k", 2.0)),
    ]
    assert [each.step for each in plan.operands[:3]] == [0, 1, 2]
    assert plan[3].keys == {"bias": "bias_3"}
    assert text(plan[3].formulas[0]) == "x + bias_3"


def test_an_operand_and_a_parameter_never_share_a_key() -> None:
    plan = FusionPlan("f32[2x3]", Expression("x + bias * bias_2", bias=1, bias_2=2), Bias(), Bias())
    assert [each.key for each in plan.parameters] == ["bias", "bias_2"]
    assert [each.key for each in plan.operands] == ["bias_3", "bias_4"]
    src = np.zeros((2, 3))
    given = {"bias_3": np.full(3, 10.0), "bias_4": np.full(3, 100.0)}
    assert plan.reference(src, given, {"bias_2": 5})[0, 0] == 115


def test_a_contraction_has_no_formula_of_one_element() -> None:
    with pytest.raises(TypeError, match="conv2d has no formula"):
        _ = FusionPlan.parse(RESNET)[0].formulas


def test_plans_are_compared_by_value() -> None:
    assert FusionPlan("f32[2x3]", Elu(2)) == FusionPlan.parse("f32[2x3] -> elu(alpha=2.0)")
    assert FusionPlan("f32[2x3]", Elu(2)) != FusionPlan("f32[2x3]", Elu(3))
    assert FusionPlan("f32[2x3]") != FusionPlan("f64[2x3]")
    assert FusionPlan("f32[2x3]") != "f32[2x3]"
    assert len({FusionPlan.parse(RESNET), FusionPlan.parse(RESNET)}) == 1
    assert pickle.loads(pickle.dumps(FusionPlan.parse(RESNET))) == FusionPlan.parse(RESNET)


def test_a_plan_that_is_a_key_does_not_change() -> None:
    plan = FusionPlan("f32[2x3]", Relu())
    assert not plan.is_frozen
    hash(plan)
    assert plan.is_frozen
    with pytest.raises(PlanError, match=r"frozen.*\n\n.*f32\[2x3\] -> relu"):
        plan.add(Relu())
    assert len(plan) == 1


def test_an_operator_that_cannot_be_is_refused_at_once_and_the_plan_stays() -> None:
    plan = FusionPlan("f32[2x3x8x8]", Relu())
    with pytest.raises(PlanError) as caught:
        plan.add(Conv2d(4, 3, groups=2))
    assert caught.value.operator == 1
    assert above_carets(caught.value) == "conv2d(4, kernel=3, groups=2)"
    assert "got 3 channels, groups=2; want a multiple of 2 channels" in str(caught.value)
    assert str(plan) == "f32[2x3x8x8] -> relu"
    plan.add(Relu())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: add(Relu), "Write Relu(...)"),
        (lambda: add("relu"), "got 'relu'\n  FusionPlan.parse reads a text, with the input's"),
        (lambda: add([Relu()]), "Operators are given one by one"),
        (lambda: FusionPlan("f32[2x3] -> relu"), "Use FusionPlan.parse(text)"),
        (lambda: add(None), "got None"),
        (lambda: FusionPlan(nothing), "begins with a TensorSpec or its text"),
        (lambda: FusionPlan.parse(nothing), "read from its text"),
        (lambda: FusionPlan.from_json(nothing), "not a plan's JSON"),
        (lambda: FusionPlan("f32[2x3]", direction="sideways"), "vertical or horizontal"),
        (lambda: FusionPlan("f32[2x0]"), "positive integer"),
        (lambda: FusionPlan("f32[1x1x4611686018427387904]"), "larger than memory"),
        (lambda: FusionPlan("f16[1x1x2147483647x2147483647]", Conv2d(2, 1)), "larger than memory"),
        (lambda: FusionPlan("f16[1x2147483647x1x1]", Conv2d(2**31 - 1, 2)), "larger than"),
        (
            lambda: FusionPlan("f16[1x2147483647x2x2]", Conv2d(2**30, 2, padding="same")),
            "its weight is larger",
        ),
    ],
)
def test_what_is_no_plan_is_refused(wrong: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        wrong()
    assert says in str(caught.value)


def test_horizontal_plans_are_refused_with_their_reason() -> None:
    with pytest.raises(Unsupported) as caught:
        FusionPlan("f32[2x3]", direction="horizontal")
    assert [refusal.code for refusal in caught.value.refusals] == ["horizontal"]
    assert "[horizontal]" in str(caught.value)


def test_the_reference_takes_the_plans_parameters_unless_told_otherwise() -> None:
    plan = FusionPlan("f32[1x2]", Elu(2), Add(alpha1=3))
    src, other = np.array([[-1.0, 1.0]]), np.array([[10.0, 20.0]])
    np.testing.assert_allclose(plan.reference(src, {"other": other}), [[6 * math.expm1(-1) + 10, 23]])
    told = plan.reference(src, {"other": other}, {"alpha": 0, "alpha2": 2})
    np.testing.assert_allclose(told, [[20, 43]])


def test_nothing_is_rounded_on_the_way() -> None:
    plan = FusionPlan("f16[1x1]", Expression("x + tiny", tiny=1e-9), Expression("(x - 1) * 1e9"))
    assert plan.reference(np.ones((1, 1), np.float16), {})[0, 0] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"operands": {}}, "operands other are missing"),
        ({"operands": {"other": np.ones((1, 3))}}, "other has shape (1, 3); want (1, 2)"),
        ({"operands": {"other": np.ones((1, 2)), "bias": 1}}, "no operand 'bias'"),
        ({"operands": {"othr": np.ones((1, 2))}}, "Did you mean `other`?"),
        ({"src": np.ones((2, 1))}, "src has shape (2, 1); want (1, 2)"),
        ({"parameters": {"alpha": 1}}, "no parameter 'alpha'"),
    ],
)
def test_the_reference_refuses_other_arrays_than_the_plans(arguments: dict[str, Any], says: str) -> None:
    plan = FusionPlan("f32[1x2]", Add())
    right: dict[str, Any] = {"src": np.ones((1, 2)), "operands": {"other": np.ones((1, 2))}}
    with pytest.raises(ArgumentError) as caught:
        plan.reference(**(right | arguments))
    assert says in str(caught.value)

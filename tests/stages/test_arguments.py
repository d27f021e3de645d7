from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fuseplan import Arguments, FusionPlan, unfuse
from fuseplan.errors import ArgumentError

TEXT = "f16[2x4x5x5, nhwc] -> conv2d(6, kernel=3) -> bias -> add -> leaky_relu(0.1) -> bias"


@pytest.fixture
def plan() -> FusionPlan:
    return FusionPlan.parse(TEXT)


def weight() -> np.ndarray:
    return np.zeros((6, 4, 3, 3), np.float16)


def residual() -> np.ndarray:
    return np.zeros((2, 3, 3, 6), np.float16).transpose(0, 3, 1, 2)


def test_values_are_set_by_step_and_by_key(plan: FusionPlan) -> None:
    bias, second = np.zeros(6, np.float32), np.ones(6, np.float32)
    arguments = Arguments(plan, bias=bias)
    assert arguments.set(plan[0], weight=weight()) is arguments
    arguments.set(plan[4], bias=second)
    arguments.set(plan[3], negative_slope=0.5)
    assert arguments.values["bias"] is bias
    assert arguments.values["bias_2"] is second
    assert arguments.values["negative_slope"] == 0.5
    assert set(arguments.values) == {"weight", "bias", "bias_2", "negative_slope"}


def test_a_plan_may_be_given_by_its_text() -> None:
    bias = np.zeros(3, np.float32)
    assert Arguments("f32[2x3] -> bias", bias=bias).plan == FusionPlan.parse("f32[2x3] -> bias")
    assert [len(each) for each in unfuse("f32[2x3] -> bias -> relu")] == [1, 1]
    wrong: Any = None
    for takes_a_plan in (Arguments, unfuse):
        with pytest.raises(ArgumentError, match="want a FusionPlan or its text, got a NoneType"):
            takes_a_plan(wrong)


def test_what_is_set_again_is_overwritten(plan: FusionPlan) -> None:
    arguments = Arguments(plan)
    arguments.set(plan[3], negative_slope=0.5).set(plan[3], negative_slope=0.25)
    assert arguments.values == {"negative_slope": 0.25}


def test_steps_of_an_equal_plan_are_taken(plan: FusionPlan) -> None:
    other = FusionPlan.parse(TEXT)
    assert Arguments(plan).set(other[3], negative_slope=2).values == {"negative_slope": 2}


def test_a_step_of_another_plan_is_refused(plan: FusionPlan) -> None:
    other = FusionPlan.parse("f16[2x4x5x5] -> conv2d(6, kernel=1)")
    with pytest.raises(ArgumentError, match=r"operator 0 \(conv2d\) is a step of another plan"):
        Arguments(plan).set(other[0], weight=weight())
    with pytest.raises(ArgumentError, match="is not a step; want"):
        Arguments(plan).set(0, weight=weight())  # type: ignore[arg-type]


def test_an_unknown_name_is_refused_with_the_nearest(plan: FusionPlan) -> None:
    with pytest.raises(ArgumentError, match=r"operator 0 \(conv2d\) has no operand, .*`wieght`.*`weight`"):
        Arguments(plan).set(plan[0], wieght=weight())
    with pytest.raises(ArgumentError, match=r"the plan has no operand, parameter or result `bais`.*`bias`"):
        Arguments(plan, bais=np.zeros(6, np.float32))


def test_nothing_is_set_where_one_value_is_refused(plan: FusionPlan) -> None:
    arguments = Arguments(plan)
    with pytest.raises(ArgumentError):
        arguments.set(bias=np.zeros(6, np.float32), bias_2=np.zeros(7, np.float32))
    assert arguments.values == {}


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("weight", np.zeros((6, 4, 3), np.float16), "operator 0 (conv2d) has the wrong shape"),
        ("weight", np.zeros((6, 4, 3, 3), np.float32), "got f32[6x4x3x3]; want f16[6x4x3x3]"),
        ("weight", np.zeros((6, 4, 3, 3), np.uint16), "got bf16[6x4x3x3]; want f16[6x4x3x3]"),
        ("bias", np.zeros((6, 1), np.float32), "got f32[6x1]; want f32[6]"),
        ("bias", np.zeros(7, np.float32), "operator 1 (bias) has the wrong shape"),
        ("bias", np.zeros(6), "got f64[6]; want f32[6] or f16[6]"),
        ("bias_2", np.zeros(0, np.float32), "operator 4 (bias) has the wrong shape"),
        ("bias", [0.0] * 6, "operand `bias` is a list"),
        ("bias", np.zeros(6, np.uint32), "operand `bias` has dtype uint32"),
        ("bias", None, "operand `bias` is a NoneType"),
        ("other", np.zeros((2, 6, 3, 3), np.float16), "want f16[2x6x3x3, nhwc]"),
        ("other", residual()[:, :, ::-1], "has the wrong layout"),
        ("other", residual().astype(np.float32), "has the wrong dtype"),
        ("bias", np.zeros(6), "Convert it, such as by .to(torch.float32)"),
        ("negative_slope", "0.5", "parameter `negative_slope` of operator 3 (leaky_relu) must be a number"),
        ("negative_slope", True, "got True"),
        ("negative_slope", np.zeros(1), "must be a number"),
        ("negative_slope", 1j, "must be a number"),
    ],
)
def test_a_wrong_value_is_refused_by_name(plan: FusionPlan, key: str, value: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        Arguments(plan, **{key: value})
    assert says in str(refused.value)


def test_the_message_points_at_the_operator(plan: FusionPlan) -> None:
    with pytest.raises(ArgumentError) as refused:
        Arguments(plan, bias_2=np.zeros(7, np.float32))
    lines = str(refused.value).splitlines()
    place = next(number for number, line in enumerate(lines) if "^" in line)
    carets = slice(lines[place].index("^"), lines[place].rindex("^") + 1)
    assert lines[place - 1][carets] == "bias"
    assert carets.start > 60, "the second bias, not the first"


def test_right_values_are_taken(plan: FusionPlan) -> None:
    Arguments(
        plan,
        weight=weight()[:, :, ::-1, ::-1],
        bias=np.zeros(12, np.float16)[::2],
        other=residual(),
        bias_2=torch.zeros(6),
        negative_slope=np.float32(0.5),
    )
    for number in (math.nan, math.inf, -math.inf, 0, 10**300):
        Arguments(plan, negative_slope=number)

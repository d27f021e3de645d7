"""Saved values: their names, what reads them again, and plans that cannot have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.kernels.match import unfuse
from fuseplan.measure.data import random_arrays
from fuseplan.ops.activation import Sigmoid
from fuseplan.ops.affine import Add, Mul
from fuseplan.ops.ranges import Save
from fuseplan.plans.plan import FusionPlan

TEXT = "f32[2x5x3x7, nhwc] -> add -> save(total) -> sigmoid -> mul(total) -> add(alpha2=-1, other=total)"


def test_text_and_json_are_read_back() -> None:
    plan = FusionPlan.parse(TEXT)
    made = [Add(), Save("total"), Sigmoid(), Mul(other="total"), Add(alpha2=-1, other="total")]
    assert FusionPlan(plan.src, *made) == plan
    assert str(plan) == TEXT
    assert FusionPlan.from_json(plan.to_json()) == plan
    assert [each.key for each in plan.operands] == ["other"]


def test_values_are_those_of_torch() -> None:
    plan = FusionPlan.parse(TEXT)
    rng = np.random.default_rng(4)
    x, other = rng.standard_normal((2, *plan.src.shape))
    out, results = plan.evaluate(x, {"other": other})
    total = torch.from_numpy(x + other)
    np.testing.assert_array_equal(results["total"], total)
    np.testing.assert_allclose(out, total.sigmoid() * total - total, rtol=1e-15, atol=1e-15)


def test_a_saved_value_lies_as_the_output_of_its_operator() -> None:
    (saved,) = FusionPlan.parse("f16[4x6x3x3, strides=100:1:30:8] -> relu -> save(y) -> tanh").results
    assert str(saved.spec) == "f16[4x6x3x3, nhwc]"


def test_keys_behind_a_saved_value_make_way() -> None:
    plan = FusionPlan.parse("f32[1x4] -> save(bias) -> bias")
    assert ([each.key for each in plan.results], [each.key for each in plan.operands]) == (
        ["bias"],
        ["bias_2"],
    )


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ("save(out)", "save: key cannot be 'out'"),
        ("save(2)", "save: key cannot be 2"),
        ('save("a b")', "save: key cannot be 'a b'"),
        ("bias -> save(bias)", "save: key cannot be bias: the plan has a tensor of that name"),
        ("save(y) -> save(y)", "save: key cannot be y: the plan has a tensor of that name"),
        ("add(other=y) -> save(y)", "add: other is no value that the plan saves before: 'y'"),
        ("save(total) -> mul(totl)", "Did you mean `total`?"),
        ("add(other=3)", "add: other must be the name of a saved value"),
        ("save(y) -> linear(3) -> mul(y)", "mul: other is a value of another shape"),
        ("activation_backward(of=save(y))", "activation_backward: of must be an activation"),
        ("scale -> save(b) -> bias(b)", "bias has no fields"),
    ],
)
def test_what_cannot_be_is_refused(chain: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        FusionPlan.parse(f"f32[2x4] -> {chain}")
    assert said in str(caught.value)


def test_a_statistic_is_no_saved_value() -> None:
    with pytest.raises(PlanError, match="no value that the plan saves before: 'saved_mean'"):
        FusionPlan.parse("f32[4x4] -> batch_norm_training -> add(other=saved_mean)")


def test_operators_alone_take_tensors() -> None:
    told = [str(each).partition(" -> ")[2] for each in unfuse(TEXT)]
    assert told == ["add", "save(total)", "sigmoid", "mul", "add(alpha2=-1)"]


def test_graph_has_the_values() -> None:
    graph = FusionPlan.parse(TEXT).to_dot()
    for line in (
        "operator_1 -> total",
        "total -> operator_3",
        "total -> operator_4",
        "total: f32[2x5x3x7, nhwc]",
    ):
        assert line in graph


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_values_are_given_where_the_caller_wants_them(target: str) -> None:
    plan = FusionPlan.parse("f32[3x70] -> add -> save(total) -> layer_norm(affine=False)")
    arrays, compiled = random_arrays(plan, 3), compile_plan(plan, target)
    src, other = arrays["src"], arrays["other"]
    total = np.full((3, 70), np.nan, np.float32)
    out = compiled(src, other=other, total=total)
    assert out.total is total
    np.testing.assert_array_equal(total, src + other)
    bound = compiled.bind(other=other, total=(held := np.zeros_like(total)))
    np.testing.assert_array_equal(bound(2 * src).out, compiled(2 * src, other=other).out)
    np.testing.assert_array_equal(held, 2 * src + other)
    with pytest.raises(ArgumentError, match="result `total` overlaps `src`"):
        compiled(src, other=other, total=src)
    with pytest.raises(ArgumentError, match="result `total` of operator 1 \\(save\\) has gaps"):
        compiled(src, other=other, total=np.zeros((70, 3), np.float32).T)

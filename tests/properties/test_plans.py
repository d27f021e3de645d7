"""What holds for every plan."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuseplan.errors import PlanError
from fuseplan.ops import BY_NAME
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.text import operator_text, parse_operator
from strategies import ANY_NUMBER, plans, random_operands, random_src


@given(plans(number=ANY_NUMBER, max_normalizations=2))
def test_text_goes_both_ways(plan: FusionPlan) -> None:
    again = FusionPlan.parse(str(plan))
    assert again == plan
    assert str(again) == str(plan)
    assert hash(again) == hash(plan)


@given(plans(number=ANY_NUMBER, max_normalizations=2))
def test_json_goes_both_ways(plan: FusionPlan) -> None:
    again = FusionPlan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


@given(plans(max_normalizations=2))
def test_plans_cross_process_boundaries(plan: FusionPlan) -> None:
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(plans(max_normalizations=2))
def test_spaces_make_no_difference(plan: FusionPlan) -> None:
    loose = str(plan).replace(" -> ", "\n  ->  ").replace("(", "( ").replace(",", " , ").replace("=", " = ")
    assert FusionPlan.parse(loose) == plan


@given(plans(max_normalizations=2))
def test_each_step_takes_the_result_of_the_one_before(plan: FusionPlan) -> None:
    tensors = [plan.src, *(step.dst for step in plan)]
    assert [step.src for step in plan] == tensors[:-1]
    assert plan.output == tensors[-1]
    keys = [key for step in plan for key in step.leaves.values()]
    given = (plan.operands, plan.parameters, plan.results)
    assert set(keys) >= {each.key for kind in given for each in kind}
    assert len(set(keys)) == len(keys)
    assert "x" not in keys


@given(plans(max_normalizations=2), st.integers(0, 2**32 - 1))
def test_the_reference_of_a_plan_is_its_operators_one_at_a_time(plan: FusionPlan, seed: int) -> None:
    rng = np.random.default_rng(seed)
    src, operands = random_src(plan, rng), random_operands(plan, rng)
    result = src
    results: dict[str, NDArray[np.float64]] = {}
    for step in plan:
        alone = FusionPlan(step.src, step.op)
        own = {name: operands[key] for name, key in step.keys.items() if key in operands}
        result, made = alone.evaluate(result, own)
        results |= {step.keys[name]: array for name, array in made.items()}
    got, others = plan.evaluate(src, operands)
    np.testing.assert_array_equal(got, result)
    assert list(others) == [each.key for each in plan.results]
    for key, array in others.items():
        np.testing.assert_array_equal(array, results[key])
    assert result.shape == plan.output.shape
    assert result.dtype == np.float64


@given(plans(max_ops=2), st.data())
def test_a_text_with_a_piece_cut_out_is_a_plan_or_a_plan_error(plan: FusionPlan, data: st.DataObject) -> None:
    text = str(plan)
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, len(text)))
    damaged = text[:begin] + data.draw(st.text(max_size=3)) + text[end:]
    try:
        FusionPlan.parse(damaged)
    except PlanError as error:
        shown = str(error)
    else:
        return
    assert "^" in shown


@given(st.text(alphabet="f32[2x]-> relucnv(),=1'\"\n\\", max_size=40))
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    try:
        plan = FusionPlan.parse(text)
    except PlanError:
        return
    assert FusionPlan.parse(str(plan)) == plan


def test_samples_go_both_ways() -> None:
    for kind in BY_NAME.values():
        for _, op in kind.samples():
            assert parse_operator(operator_text(op)) == op

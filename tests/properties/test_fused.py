"""Any legal plan: the fused kernel computes what its operators, one at a time, compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fuseplan.compile import CompiledPlan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import Unsupported
from fuseplan.kernels.match import unfuse
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import evaluated, random_arrays, reference
from fuseplan.measure.spaces import exact as widened
from fuseplan.messages.reasons import Reason
from fuseplan.ops.activation import Gelu, Relu
from fuseplan.ops.affine import Add, BatchNorm
from fuseplan.ops.conv import Conv1d, Conv2d, Conv3d
from fuseplan.ops.matmul import Matmul
from fuseplan.ops.pool import AvgPool2d, MaxPool2d
from fuseplan.ops.ranges import Save
from fuseplan.ops.training import ActivationBackward
from fuseplan.plans.plan import FusionPlan
from strategies import elementwise, normalizations, plans, tensors

# Largest error over the largest value, in units of the storage's epsilon; f32 and f64 sums of up to 243
# products and chains of five operators stay below 64.
UNITS = {"f64": 4096, "f32": 64, "f16": 4, "bf16": 4}
NUDGE = {"f64": 1e-12, "f32": 1e-5, "f16": 1e-2, "bf16": 5e-2}

Array = NDArray[Any]


def one_at_a_time(plan: FusionPlan, arrays: dict[str, Array]) -> Array:
    """Each operator as its own compiled plan."""
    x = arrays["src"]
    for step, single in zip(plan, unfuse(plan), strict=True):
        pairs = zip(single.operands, step.operands, strict=True)
        x = compile_plan(single, "cpu", cache=False)(x, **{own.key: arrays[held.key] for own, held in pairs})
    return x


def intermediates(
    plan: FusionPlan, arrays: dict[str, Array], factor: float = 1.0
) -> Iterator[NDArray[np.float64]]:
    """What each operator gives in float64; what it is given is multiplied by `factor` first."""
    x = widened(arrays["src"])
    for step, single in zip(plan, unfuse(plan), strict=True):
        pairs = zip(single.operands, step.operands, strict=True)
        with np.errstate(all="ignore"):
            x = single.reference(x * factor, {own.key: widened(arrays[held.key]) for own, held in pairs})
        yield x


def well_conditioned(plan: FusionPlan, arrays: dict[str, Array], want: NDArray[np.float64]) -> Array:
    """Where small changes between the operators change the result little: elsewhere right ones differ."""
    nudge = NUDGE[plan.src.dtype]
    bound = UNITS[plan.src.dtype] * DTYPES[plan.src.dtype].epsilon * np.abs(want).max()
    steady: NDArray[np.bool_] = np.ones(want.shape, np.bool_)
    for factor in (1 - nudge, 1 + nudge):
        *_, moved = intermediates(plan, arrays, factor)
        with np.errstate(invalid="ignore"):
            steady &= np.abs(moved - want) <= 16 * bound
    return steady


def is_moderate(plan: FusionPlan, arrays: dict[str, Array]) -> bool:
    """No intermediate result nears the end of the dtype's range: rounding is the only difference."""
    largest = {"f64": 1e100, "f32": 1e15, "f16": 1e3, "bf16": 1e15}[plan.src.dtype]
    for x in intermediates(plan, arrays):
        if not np.isfinite(x).all() or np.abs(x).max() > largest:
            return False
    return bool(np.abs(x).max() > 0)


def compiled_or_refused(plan: FusionPlan) -> CompiledPlan | None:
    """The compiled plan; None where it is the one kind of plan drawn here that no kernel computes."""
    laid = any(isinstance(step.op, Add | BatchNorm | ActivationBackward) for step in plan)
    may_refuse = plan.src.layout is None and laid
    if not may_refuse:
        return compile_plan(plan, "cpu", cache=False)
    try:
        return compile_plan(plan, "cpu", cache=False)
    except Unsupported as refused:
        if any(each.reason is Reason.STRIDED_PROLOGUE for each in refused.refusals):
            return None
        raise


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(plan=plans(tensors(), max_ops=5, max_contractions=1), seed=st.integers(0, 2**16))
def test_fused_equals_reference_and_one_at_a_time(plan: FusionPlan, seed: int) -> None:
    assume(len(plan) > 0)
    arrays = random_arrays(plan, seed=seed)
    assume(is_moderate(plan, arrays))
    want = reference(plan, arrays)
    compiled = compiled_or_refused(plan)
    if compiled is None:
        return
    got = widened(compiled(**arrays))
    steady = well_conditioned(plan, arrays, want)
    bound = UNITS[plan.src.dtype] * DTYPES[plan.src.dtype].epsilon * np.abs(want).max()
    assert np.abs(got - want)[steady].max(initial=0) <= bound
    apart = widened(one_at_a_time(plan, arrays))
    steady &= np.isfinite(apart)  # an intermediate result may be rounded onto a pole
    assert np.abs(got - apart)[steady].max(initial=0) <= 3 * len(plan) * bound


@st.composite
def training_plans(draw: st.DrawFn) -> FusionPlan:
    """Elementwise operators on both sides of one with statistics, in f64, its numbers well-conditioned."""
    plan = draw(plans(tensors(dtypes=["f64"]), max_ops=2, max_contractions=0))
    plan = FusionPlan(plan.src, *plan.ops)
    plan.add(draw(normalizations(plan.output, st.floats(0.25, 2))))
    for _ in range(draw(st.integers(0, 2))):
        plan.add(draw(elementwise()))
    return plan


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=training_plans(), seed=st.integers(0, 2**16))
def test_fused_training_equals_reference(plan: FusionPlan, seed: int) -> None:
    arrays = random_arrays(plan, seed)
    with np.errstate(all="ignore"):
        want, results = evaluated(plan, arrays)
    assume(np.isfinite(want).all() and np.abs(want).max() < 1e100)
    for target in ("cpu", "reference"):
        given = {key: array.copy(order="K") if key in results else array for key, array in arrays.items()}
        outcome = compile_plan(plan, target, cache=False)(**given)
        out, *others = outcome if results else (outcome,)
        for got, exact in zip((out, *others), (want, *results.values()), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-9 * max(1.0, np.abs(exact).max()))


class AllSeenError(Exception):
    """No more examples are needed."""


def test_the_operators_are_all_drawn() -> None:
    """The strategy above covers the language: each elementwise and contraction class."""
    wanted = {Conv1d, Conv2d, Conv3d, MaxPool2d, AvgPool2d, Matmul, BatchNorm, Add, Relu, Gelu}

    @settings(max_examples=1000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(plan=plans(tensors(), max_ops=5, max_contractions=1))
    def draw(plan: FusionPlan) -> None:
        wanted.difference_update(type(step.op) for step in plan)
        if not wanted:
            raise AllSeenError

    with pytest.raises(AllSeenError):
        draw()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(
    plan=st.one_of(plans(tensors(dtypes=["f64"]), max_ops=4, max_contractions=1), training_plans()),
    place=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_any_value_may_be_saved_and_read_again(plan: FusionPlan, place: int, seed: int) -> None:
    """The value is that of the plan up to it, and the plan's output stays; a contraction refuses in front."""
    place = min(place, len(plan))
    plan = FusionPlan(plan.src, *plan.ops[:place], Save("kept"), *plan.ops[place:])
    if plan.output.shape == plan[place].dst.shape:
        plan.add(Add(other="kept"))
    arrays = random_arrays(plan, seed)
    with np.errstate(all="ignore"):
        want, results = evaluated(plan, arrays)
        first = FusionPlan(plan.src, *plan.ops[:place]).evaluate(
            arrays["src"],
            {
                key: arrays[key]
                for step in plan.steps[:place]
                for key in step.leaves.values()
                if key in arrays
            },
        )[0]
    np.testing.assert_array_equal(results["kept"], first)
    assume(all(np.isfinite(each).all() and np.abs(each).max() < 1e100 for each in (want, first)))
    for target in ("cpu", "reference"):
        given = {key: array.copy(order="K") if key in results else array for key, array in arrays.items()}
        try:
            compiled = compile_plan(plan, target, cache=False)
        except Unsupported as refused:
            reasons = {each.reason for each in refused.refusals}
            if not reasons & {Reason.SAVED_PROLOGUE, Reason.STRIDED_PROLOGUE}:
                raise
            is_behind = all(step.op.kind != "contraction" for step in plan.steps[place:])
            if is_behind and Reason.STRIDED_PROLOGUE not in reasons:
                raise
            continue
        outcome = compiled(**given)
        for got, exact in zip(outcome, (want, *results.values()), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-9 * max(1.0, np.abs(exact).max()))

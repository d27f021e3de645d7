"""Chains that change the dtype: a kernel computes what its operators mean, where rounding decides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from device.guarded import UNDERFLOW
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.language.dtypes import DTYPES, FACTORS, dtype_of
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.data import random_arrays
from fuseplan.measure.spaces import exact
from fuseplan.op import Op
from fuseplan.ops.affine import Add, Bias
from fuseplan.ops.conversion import BLOCK, PER_SCALE, QUANTIZED, Cast, Dequantize, Quantize
from fuseplan.plans.plan import FusionPlan
from strategies import activations, tensors

Array = NDArray[np.float64]
NUDGE = 2.0**-18  # more than the roundings of a chain in float


@st.composite
def conversions(draw: st.DrawFn, src: TensorSpec) -> Op:
    """An operator that takes src: one that changes the dtype, or arithmetic on floating-point numbers."""
    per = draw(st.sampled_from(list(PER_SCALE)))
    block = draw(st.integers(1, 5)) if per == "block" else BLOCK
    if src.dtype in (*QUANTIZED, "i32") and draw(st.booleans()):
        points = src.dtype == "i8" and draw(st.booleans())
        return Dequantize(draw(st.sampled_from(FACTORS)), per, block, points)
    if not dtype_of(src.dtype).is_float:
        return Cast(draw(st.sampled_from(FACTORS)))
    dtype = draw(st.sampled_from(QUANTIZED))
    points = dtype == "i8" and draw(st.booleans())
    arithmetic = st.one_of(activations(st.floats(0.5, 2)), st.just(Bias()), st.just(Add()))
    return draw(
        st.one_of(
            st.builds(Cast, st.sampled_from(list(DTYPES))),
            st.just(Quantize(dtype, per, block, points)),
            arithmetic,
        )
    )


@st.composite
def chains(draw: st.DrawFn) -> FusionPlan:
    """Plans of two to five operators, from any dtype."""
    plan = FusionPlan(draw(tensors(dtypes=list(DTYPES), rows=draw(st.booleans()))))
    for _ in range(draw(st.integers(2, 5))):
        try:
            plan.add(draw(conversions(plan.output)))
        except PlanError:  # rows, where the plan has named axis 1 the channels
            assume(False)
    return plan


def moved(plan: FusionPlan, arrays: dict[str, Any], factor: float) -> Array:
    """The output in float64, with src and all operands a little larger or smaller."""
    dtypes = {"src": plan.src.dtype} | {each.key: each.dtype for each in plan.operands}
    wide = {key: exact(array, dtypes[key]) for key, array in arrays.items()}
    wide = {key: each * factor if dtype_of(dtypes[key]).is_float else each for key, each in wide.items()}
    with np.errstate(all="ignore"):
        return plan.reference(wide.pop("src"), wide)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
@given(plan=chains(), seed=st.integers(0, 2**16))
def test_a_chain_is_its_reference_where_rounding_decides_nothing(plan: FusionPlan, seed: int) -> None:
    arrays = random_arrays(plan, seed)
    want = moved(plan, arrays, 1.0)
    assume(np.isfinite(want).all() and np.abs(want).max() > 0)
    got = exact(compile_plan(plan, "cpu", cache=False)(**arrays), plan.output.dtype)
    around = [moved(plan, arrays, 1 + NUDGE), moved(plan, arrays, 1 - NUDGE)]
    row, size = dtype_of(plan.output.dtype), np.abs(want)
    # One step of the output's dtype where the number before it lies near an edge; else the same element.
    apart = np.maximum(*(np.abs(each - want) for each in around))
    rounding = row.epsilon * size + UNDERFLOW.get(plan.output.dtype, 0.0) if row.is_float else 0.0
    steady = apart <= 64 * NUDGE * size.max() + rounding
    assert (np.abs(got - want)[steady] <= (apart + rounding + 64 * NUDGE * size.max())[steady]).all()
    assert steady.any() or want.size < 64

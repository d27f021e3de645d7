"""Compares what a kernel made with the float64 reference."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.compile import CompiledPlan
from fuseplan.language.dtypes import DTYPES
from fuseplan.measure.data import evaluated, reference
from fuseplan.measure.spaces import exact as wide


def assert_close(compiled: CompiledPlan, arrays: dict[str, NDArray[Any]], slack: float = 8.0) -> None:
    """Within `slack` roundings of the compute type, and one of the storage, of the largest of each tensor."""
    plan = compiled.plan
    outcome, (out, results) = compiled(**arrays), evaluated(plan, arrays)
    made = outcome if results else (outcome,)
    epsilon = DTYPES[plan.compute_dtype].epsilon * slack
    dtypes = (plan.output.dtype, *(each.spec.dtype for each in plan.results))
    for got, want, dtype in zip(made, (out, *results.values()), dtypes, strict=True):
        row = DTYPES[dtype]
        rounding = row.epsilon if row.is_float and dtype != plan.compute_dtype else 0.0
        bound = (epsilon + rounding / 8) * np.abs(want).max()
        np.testing.assert_allclose(wide(got, dtype), want, rtol=rounding, atol=bound)


def assert_same_exceptions(compiled: CompiledPlan, arrays: dict[str, NDArray[Any]]) -> None:
    """NaN, infinity and minus infinity stand where they stand in the reference."""
    with np.errstate(all="ignore"):
        got, want = wide(compiled(**arrays), compiled.plan.output.dtype), reference(compiled.plan, arrays)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(got), test(want))

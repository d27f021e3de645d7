"""Compares what a kernel made with the float64 reference."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.compile import CompiledPlan
from fuseplan.dtypes import DTYPES
from fuseplan.measure.data import evaluated, reference


def wide(array: NDArray[Any]) -> NDArray[np.float64]:
    """Any result in float64; bf16 comes as its bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def assert_close(compiled: CompiledPlan, arrays: dict[str, NDArray[Any]], slack: float = 8.0) -> None:
    """Within `slack` roundings of the compute type, and one of the storage, of the largest of each tensor."""
    plan = compiled.plan
    outcome, (out, results) = compiled(**arrays), evaluated(plan, arrays)
    made = outcome if results else (outcome,)
    epsilon = DTYPES[plan.src.compute_dtype].epsilon * slack
    rounding = DTYPES[plan.src.dtype].epsilon if plan.src.itemsize == 2 else 0.0
    for got, want in zip(map(wide, made), (out, *results.values()), strict=True):
        bound = (epsilon + rounding / 8) * np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=rounding, atol=bound)


def assert_same_exceptions(compiled: CompiledPlan, arrays: dict[str, NDArray[Any]]) -> None:
    """NaN, infinity and minus infinity stand where they stand in the reference."""
    with np.errstate(all="ignore"):
        got, want = wide(compiled(**arrays)), reference(compiled.plan, arrays)
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(got), test(want))

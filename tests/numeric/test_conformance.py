"""MIOpen's own cases of fusion on the CPU, each with as many images as continuous integration has time for.

`pytest tests/numeric/test_conformance.py --whole` runs every case in full; so does a GPU (`tests/device`).
"""

from typing import Any

import numpy as np
import pytest

from closeness import wide
from conformance import ACTIVATIONS, CASES, MIOPEN, MOST, RMS, plans, sized
from fuseplan.arrays import empty
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import random_arrays, reference
from fuseplan.plan import FusionPlan

ENTRIES = 377  # combinations and shapes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "plan" not in metafunc.fixturenames:
        return
    made: dict[str, Any] = {}
    for each in sized():
        if metafunc.config.getoption("whole") or each.images:
            plan = each.plan if metafunc.config.getoption("whole") else each.small
            made[str(plan)] = pytest.param(plan, id=str(plan))
        else:
            skip = pytest.mark.skip(reason=f"{each.why}: --whole runs it, or a GPU")
            made[str(each.plan)] = pytest.param(each.plan, id=str(each.plan), marks=skip)
    metafunc.parametrize("plan", made.values())


def test_bounds_are_tighter_than_miopens() -> None:
    assert RMS.keys() == MOST.keys() == MIOPEN.keys()
    assert all(RMS[dtype] < MIOPEN[dtype] / 6 for dtype in MIOPEN)


def test_every_case_is_there() -> None:
    assert len(CASES) == ENTRIES
    combinations = {"CA", "CBA", "CN", "CNA", "CBNA", "CSBA", "NA", "NA-train", "NA-backward"}
    assert {case["combo"] for case in CASES} == combinations
    assert {name for case in CASES for name in case["activations"]} == set(ACTIVATIONS)


def test_every_case_runs_somewhere_in_continuous_integration_or_says_why_not() -> None:
    assert all(bool(each.images) != bool(each.why) for each in sized())


@pytest.mark.parametrize("case", [case for case in CASES if "spatial" in case], ids=str)
def test_output_has_the_size_miopen_expects(case: dict[str, Any]) -> None:
    for plan in plans(case):
        assert plan.output.shape == (case["shape"][0], case["features"], *case["spatial"])


def test_fused_result_is_within_the_bounds(plan: FusionPlan) -> None:
    arrays = random_arrays(plan, seed=7)
    out = empty(plan.output)
    out[...] = 0x7FC0 if plan.output.dtype == "bf16" else np.nan
    got, want = wide(compile_plan(plan, "cpu", cache=False)(out=out, **arrays)), reference(plan, arrays)
    assert np.isfinite(got).all()
    assert got.any() == want.any()
    assert want.any() or want.size == 1, "nothing was tested"
    largest, off = np.abs(want).max(), np.abs(got - want)
    assert np.sqrt(np.mean(off**2)) <= RMS[plan.src.dtype] * largest
    assert off.max() <= MOST[plan.src.dtype] * largest

"""MIOpen's own cases of fusion on the CPU, each with as many images as continuous integration has time for.

`pytest tests/numeric/test_conformance.py --whole` runs every case in full; so does a GPU (`tests/device`).
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import ACTIVATIONS, CASES, MIOPEN, MOST, RMS, Sized, most, sized
from fuseplan.compile import compile as compile_plan
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arrays import empty

ENTRIES = 377  # combinations and shapes
STEP = 11  # a prime, such that all plans are come by: neighbours are the layouts and dtypes of a shape
GEOMETRY = ("kernel", "stride", "padding", "dilation", "groups", "statistics")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Plans for the fused results: `--whole` runs all, and plans that have no images here; so does a GPU."""
    if "plan" in metafunc.fixturenames:
        is_whole = metafunc.config.getoption("whole")
        chosen = sized() if is_whole else list(covering())
        metafunc.parametrize("plan", [each.plan if is_whole else each.small for each in chosen], ids=str)


def covering() -> Iterator[Sized]:
    """Plans with each pair of combination, layout, dtype and activation, and each geometry: 91 of 1,852."""
    seen, listed = set[Any](), [each for each in sized() if each.images]
    for place in range(len(listed)):
        each = listed[place * STEP % len(listed)]
        own = enumerate((each.case["combo"], each.layout, each.dtype, each.activation))
        new = {*combinations(own, 2), str([each.case.get(name) for name in GEOMETRY])}
        if new - seen:
            seen |= new
            yield each


def test_bounds_are_tighter_than_miopens() -> None:
    assert RMS.keys() == MOST.keys() == MIOPEN.keys()
    assert all(RMS[dtype] < MIOPEN[dtype] / 6 for dtype in MIOPEN)


def test_the_guide_tells_the_bounds_and_how_many_plans_there_are() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "accuracy.md").read_text(encoding="utf-8")
    for dtype in MIOPEN:
        assert f"| {dtype} | {MIOPEN[dtype]:.1e} | {RMS[dtype]:.1e} | {MOST[dtype]:.1e} |" in page
    assert f"has {ENTRIES} combinations and shapes" in page
    assert f"{len(sized())} plans" in page


def test_every_case_is_there() -> None:
    assert len(CASES) == ENTRIES
    combinations = {"CA", "CBA", "CN", "CNA", "CBNA", "CSBA", "NA", "NA-train", "NA-backward"}
    assert {case["combo"] for case in CASES} == combinations
    assert {name for case in CASES for name in case["activations"]} == set(ACTIVATIONS)


def test_every_case_runs_somewhere_in_continuous_integration_or_says_why_not() -> None:
    assert all(bool(each.images) != bool(each.why) for each in sized())


def test_outputs_have_the_sizes_miopen_expects() -> None:
    for each in (each for each in sized() if "spatial" in each.case):
        case = each.case
        assert each.plan.output.shape == (case["shape"][0], case["features"], *case["spatial"]), each.plan


def test_fused_result_is_within_the_bounds(plan: FusionPlan) -> None:
    arrays = random_arrays(plan, seed=7)
    want, results = evaluated(plan, arrays)
    given = {key: np.full(value.shape, np.nan, np.float32) for key, value in results.items()} | arrays
    out = empty(plan.output)
    out[...] = 0x7FC0 if plan.output.dtype == "bf16" else np.nan
    made = compile_plan(plan, "cpu", cache=False)(out=out, **given)
    assert_within(plan, made.out if results else made, want, plan.src.dtype)
    for key, value in results.items():
        assert_within(plan, getattr(made, key), value, "f32", least=1.0)


def assert_within(
    plan: FusionPlan,
    array: np.ndarray[Any, Any],
    want: np.ndarray[Any, Any],
    dtype: str,
    least: float = 0.0,
) -> None:
    """Both errors over the largest value; over `least`, if that is more: a mean of many numbers is near 0."""
    got = wide(array)
    assert np.isfinite(got).all()
    assert got.any() == want.any()
    assert want.any() or want.size == 1, "nothing was tested"
    largest, off = max(np.abs(want).max(), least), np.abs(got - want)
    assert np.sqrt(np.mean(off**2)) <= RMS[dtype] * largest
    assert off.max() <= most(plan, dtype, largest)

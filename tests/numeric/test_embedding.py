"""Embedding: rows of a table by their indices, with operators and statistics behind them in one kernel."""

from __future__ import annotations

import numpy as np
import pytest

import fuseplan
from closeness import assert_close
from fuseplan.backends.triton.template import GpuTemplate
from fuseplan.backends.triton.templates.pointwise import GpuPointwise
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted

PLANS = (
    ("i64[3x5] -> embedding(7, features=5)", GpuPointwise),
    ("i64[9] -> embedding(40, features=70) -> gelu", GpuPointwise),
    ("i32[2x3x7] -> embedding(11, features=16, dtype=bf16) -> save(rows) -> relu", GpuPointwise),
    ("i64[2x9] -> embedding(40, features=1, from_end=True) -> relu", GpuPointwise),
    ("i64[4x9] -> embedding(40, features=100) -> add -> layer_norm", GpuReduction),
    ("i32[2x9] -> embedding(40, features=768, dtype=f16) -> rms_norm", GpuReduction),
    ("i64[2x9] -> embedding(40, features=20, dtype=f64) -> layer_norm", GpuReduction),
    ("i64[2x9, strides=1:2] -> embedding(40, features=20) -> softmax(1)", GpuReduction),
    ("i64[3x9] -> embedding(40, features=33) -> bias -> sum(1)", GpuReduction),
)
IDS = [text for text, _ in PLANS]
TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)


@pytest.mark.parametrize("target", ["cpu", "reference"])
@pytest.mark.parametrize("text", [*IDS, "i64[*x12] -> embedding(40, features=48) -> layer_norm"])
def test_rows_are_float64s(text: str, target: str) -> None:
    compiled = fuseplan.compile(text, target)
    plan = FusionPlan.parse(text)
    if plan.is_open:
        plan = plan.with_extents(3)
        arrays = random_arrays(plan)
        want, _ = evaluated(plan, arrays)
        np.testing.assert_allclose(compiled(**arrays), want, rtol=1e-5, atol=1e-5)
        return
    assert_close(compiled, random_arrays(plan))


@pytest.mark.parametrize(("text", "template"), PLANS, ids=IDS)
def test_gpus_read_the_same_rows(text: str, template: type[GpuTemplate]) -> None:
    assert_interpreted(text, template)


def test_rows_of_an_open_axis_on_gpus() -> None:
    assert_interpreted("i64[*x5] -> embedding(9, features=20) -> bias", GpuPointwise, extent=3)
    assert_interpreted("i64[*x5] -> embedding(9, features=20) -> layer_norm", GpuReduction, extent=3)


@pytest.mark.parametrize(("index", "fields"), [(5, ""), (-1, ""), (2**40, ""), (-6, ", from_end=True")])
def test_an_index_without_a_row_is_named(index: int, fields: str) -> None:
    compiled = fuseplan.compile(f"i64[2x3] -> embedding(5, features=4{fields})", "cpu")
    bound = compiled.bind(weight=TABLE)
    numbers = np.array([[0, 1, 4], [3, 2, 0]])
    np.testing.assert_array_equal(compiled(numbers, weight=TABLE), TABLE[numbers])
    np.testing.assert_array_equal(bound(numbers), TABLE[numbers])
    out = np.empty((2, 3, 4), np.float32)
    launch = bound.launcher(numbers, out)
    launch()
    numbers[1, 2] = index
    for call in (lambda: bound(numbers), launch):
        with pytest.raises(ArgumentError, match=rf"got {index} at \(1, 2\); want an index from"):
            call()


def test_indices_from_the_end() -> None:
    compiled = fuseplan.compile("i32[4] -> embedding(5, features=4, from_end=True)", "cpu")
    numbers = np.array([-1, 0, -5, 4], np.int32)
    np.testing.assert_array_equal(compiled(numbers, weight=TABLE), TABLE[numbers])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f32[2x3] -> embedding(5, features=4)", "embedding reads indices"),
        ("i64[1x1x1x2x3] -> embedding(5, features=4)", "1 to 4 axes of indices"),
        ("i64[2x3] -> cast(f32)", "i64 has indices"),
        ("f32[2x3] -> cast(i64)", "i64 has indices"),
    ],
)
def test_what_is_no_lookup(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        FusionPlan.parse(text)

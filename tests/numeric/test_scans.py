"""Sums along an axis: torch's numbers, both backends' kernels in every form, beside float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed, refusal_of
from fuseplan.backends.cpu.templates.scan import Scan
from fuseplan.backends.triton.templates.scan import GpuScan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import PlanError
from fuseplan.execution.select import select
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.kernels.target import KINDS, parse_target
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.messages.reasons import Reason
from fuseplan.ops.activation import LeakyRelu, Relu, Tanh
from fuseplan.ops.affine import Add, Bias, Mul, Scale
from fuseplan.ops.scan import Cumsum
from fuseplan.plans.plan import FusionPlan
from interpreted import assert_interpreted
from numeric.test_reductions import SPECIAL, TENSORS
from strategies import tensors

AROUND = (Bias(), Scale(), Add(), Mul(), Relu(), LeakyRelu(), Tanh())  # what small changes change little
WAYS = ((False, False), (True, False), (False, True), (True, True))
LONG = (  # whole vectors and a rest, tiles that go on, lines side by side, more axes than one on either side
    "f32[3x1031] -> cumsum",
    "f16[5x2100] -> bias -> cumsum(reverse=True) -> gelu",
    "f32[2x301x70] -> cumsum(1, exclusive=True)",
    "f32[2x30x270] -> relu -> cumsum(1) -> add",
    "f64[67x33] -> cumsum(0) -> scale",
    "bf16[2x40x9x11, nhwc] -> relu -> cumsum(1) -> bias",
    "f32[2x40x9x11, nhwc] -> cumsum(2, reverse=True) -> add",
    "f32[1x1x1x4099] -> cumsum(exclusive=True, reverse=True)",
    "f32[3x5x7x9, strides=1:3:200:15] -> add -> cumsum(1) -> save(kept) -> relu",
    "f32[70x1] -> cumsum",
)


@pytest.mark.parametrize(("exclusive", "reverse"), WAYS)
@pytest.mark.parametrize("tensor", TENSORS[1:])
def test_the_operator_is_torchs(tensor: str, exclusive: bool, reverse: bool) -> None:
    src = FusionPlan.parse(f"f64[{tensor}] -> relu").src
    x = np.random.default_rng(1).standard_normal(src.shape)
    for axis in range(-src.rank, src.rank):
        if axis == -1 and src.has_channel_names and src.rank > 2:
            continue  # an axis of rows
        plan = FusionPlan(src, Cumsum(axis, exclusive, reverse))
        turned = torch.from_numpy(x).flip(axis) if reverse else torch.from_numpy(x)
        want = turned.cumsum(axis) - (turned if exclusive else 0)
        want = want.flip(axis) if reverse else want
        np.testing.assert_allclose(plan.reference(x, {}), want.numpy(), rtol=1e-12, atol=1e-12)
        assert plan.output.shape == src.shape
        assert FusionPlan.parse(str(plan)).output == plan.output


@st.composite
def scanning(draw: st.DrawFn) -> FusionPlan:
    """A scan along any axis of a small tensor, with elementwise operators on either side."""
    plan = FusionPlan(draw(st.booleans().flatmap(lambda rows: tensors(rows=rows))))
    around, rank = st.lists(st.sampled_from(AROUND), max_size=2), plan.src.rank
    for op in draw(around):
        plan.add(op)
    axis = draw(st.integers(-rank, rank - 1))
    axis += rank * (axis == -1 and plan.src.has_channel_names)  # -1 is an axis of rows
    plan.add(Cumsum(axis, draw(st.booleans()), draw(st.booleans())))
    for op in draw(around):
        plan.add(op)
    return plan


@settings(max_examples=60)
@given(scanning(), st.sampled_from([16, 32, 64]))
def test_cpu_kernels_beside_float64(plan: FusionPlan, width: int) -> None:
    assert_close(forced(plan, Scan, narrowed(width)), random_arrays(plan, 3), slack=64)


@settings(max_examples=25)
@given(scanning())
def test_gpu_kernels_beside_float64(plan: FusionPlan) -> None:
    assert_interpreted(plan, GpuScan, slack=64)


@pytest.mark.parametrize("text", LONG)
@pytest.mark.parametrize("width", [16, 32, 64])
def test_long_lines(text: str, width: int) -> None:
    plan = FusionPlan.parse(text)
    assert_close(forced(plan, Scan, narrowed(width)), random_arrays(plan, 5), slack=64)


@pytest.mark.parametrize(
    ("text", "threads", "vectors"),
    [
        ("f32[23x512x256] -> cumsum(1)", 2, 16),
        ("f32[1x512x256] -> cumsum(1)", 2, 8),
        ("f32[23x512x256] -> cumsum(1) -> gelu", 2, 4),
    ],
)
def test_lines_side_by_side_are_many_unless_threads_or_functions_want_fewer(
    text: str, threads: int, vectors: int
) -> None:
    kernel, target = lower(match(FusionPlan.parse(text))), replace(KINDS["cpu:avx512"], threads=threads)
    best = select(kernel, target).template
    assert isinstance(best, Scan)
    assert best.vectors == vectors


@pytest.mark.parametrize("text", LONG)
def test_long_lines_on_gpus(text: str) -> None:
    kernel, target = lower(match(FusionPlan.parse(text))), parse_target("triton:sm_90")
    for candidate in GpuScan.candidates(kernel, target, "default"):
        assert_interpreted(text, candidate, slack=64)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_a_sum_is_the_same_in_any_number_of_threads(threads: int) -> None:
    plan = FusionPlan.parse("f32[700x301] -> cumsum")
    (x,) = random_arrays(plan, 7).values()
    made = [np.array(compile_plan(plan, "cpu", threads=count)(x)) for count in (1, threads, threads)]
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[1], made[2])


@pytest.mark.parametrize("text", ["f32[4x37] -> cumsum", "f32[4x37] -> cumsum(0, reverse=True)"])
def test_exceptions_stand_where_they_do_in_the_reference(text: str) -> None:
    plan = FusionPlan.parse(text)
    for special in SPECIAL:
        (x,) = random_arrays(plan, 7).values()
        x[1, 9] = x[2, 30] = special
        x[3, 5], x[3, 20] = special, -special
        assert_same_exceptions(forced(plan, Scan, narrowed(32)), {"src": x})


@pytest.mark.parametrize(
    "text",
    [
        "f32[*x33] -> cumsum",
        "f16[*x*x7] -> relu -> cumsum(exclusive=True) -> add",
        "f32[*x5x33] -> cumsum(1) -> gelu",
        "f32[*x6x5x4, nhwc] -> bias -> cumsum(-2, reverse=True)",
    ],
)
@pytest.mark.parametrize("extent", [1, 5, 300])
def test_open_axes(text: str, extent: int) -> None:
    plan = FusionPlan.parse(text)
    several = len(plan.src.open_axes) > 1
    numbered = plan.with_extents(*([extent, 2] if several else [extent]))
    arrays: dict[str, Any] = random_arrays(numbered, 3)
    compiled = compile_plan(plan, "cpu")
    assert compiled.choice.template.name == "scan"
    (want, _), rounding = evaluated(numbered, arrays), 1e-3 if plan.src.dtype == "f16" else 1e-5
    np.testing.assert_allclose(compiled(**arrays), want, rtol=rounding, atol=rounding * np.abs(want).max())
    if not several:
        assert_interpreted(plan, GpuScan, slack=64, extent=extent)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f32[3x5] -> cumsum(2)", "axis of 2 is no axis of src"),
        ("f32[3x5] -> cumsum(-3)", "axis of -3 is no axis of src"),
        ("f32[3x5] -> cumsum(c)", "axis must be a number"),
        ("f32[3x5] -> cumsum(exclusive=1)", "must be True or False"),
        ("i8[3x5] -> cumsum", "computes with floating-point numbers"),
    ],
)
def test_fields_are_checked(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        FusionPlan.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f32[3x5] -> relu", Reason.NO_SCAN),
        ("f32[3x8] -> softmax", Reason.NO_SCAN),
        ("f32[3x8] -> relu -> save(kept) -> cumsum", Reason.SAVED_PROLOGUE),
    ],
)
def test_templates_refuse(text: str, reason: Reason) -> None:
    for kind, target in ((Scan, narrowed(32)), (GpuScan, parse_target("triton:sm_90"))):
        refusal = refusal_of(text, kind, target)
        assert refusal is not None
        assert refusal.reason is reason

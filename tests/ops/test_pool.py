"""Pools against torch in float64: every attribute, one to three axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseplan.errors import PlanError
from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.pool import AVG_POOLS, MAX_POOLS, POOLS, AvgPool, AvgPool2d, MaxPool2d, Pool
from fuseplan.ops.windows import Windowed
from fuseplan.plans.plan import FusionPlan

SAMPLES = [FusionPlan(tensor, op) for kind in POOLS for tensor, op in kind.samples()]
RNG = np.random.default_rng(3)


def theirs(op: Pool, src: Any) -> Any:
    """torch's pool; a src with other low padding than high is padded beforehand."""
    window = Windowed.window(op, TensorSpec(src.shape))
    tensor = torch.from_numpy(src)
    options: dict[str, Any] = {"stride": window.stride, "ceil_mode": op.ceil_mode}
    lows, highs = zip(*window.padding, strict=True)
    if lows == highs:
        options["padding"] = lows
    else:
        sides = [side for pair in reversed(window.padding) for side in pair]
        tensor = F.pad(tensor, sides, value=0.0 if isinstance(op, AvgPool) else -np.inf)
    if isinstance(op, AvgPool):
        options["count_include_pad"] = op.count_include_pad
    else:
        options["dilation"] = window.dilation
    return getattr(F, op.name)(tensor, window.kernel, **options).numpy()


def is_torchs(op: Pool) -> bool:
    """Whether torch has the pool: no mean that leaves out padding of two sizes."""
    lows, highs = zip(*Windowed.window(op, TensorSpec((1, 1, *(9,) * op.axes))).padding, strict=True)
    return lows == highs or not isinstance(op, AvgPool) or op.count_include_pad


@pytest.mark.parametrize("plan", [plan for plan in SAMPLES if is_torchs(plan[0].op)], ids=str)  # type: ignore[arg-type]
def test_samples_are_torchs(plan: FusionPlan) -> None:
    src, op = RNG.standard_normal(plan.src.shape), plan[0].op
    assert isinstance(op, Pool)
    made = plan.reference(src, {})
    assert made.shape == plan.output.shape
    np.testing.assert_allclose(made, theirs(op, src), rtol=1e-12, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(
    axes=st.integers(1, 3),
    extent=st.integers(3, 12),
    kernel=st.integers(1, 4),
    stride=st.none() | st.integers(1, 5),
    dilation=st.integers(1, 2),
    ceil_mode=st.booleans(),
    counted=st.none() | st.booleans(),
    data=st.data(),
)
def test_any_pool_is_torchs(
    axes: int,
    extent: int,
    kernel: int,
    stride: int | None,
    dilation: int,
    ceil_mode: bool,
    counted: bool | None,
    data: st.DataObject,
) -> None:
    padding = data.draw(st.integers(0, kernel // 2))
    options: dict[str, Any] = {"stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    op: Pool = MAX_POOLS[axes - 1](kernel, **options, dilation=dilation)
    if counted is not None:
        op = AVG_POOLS[axes - 1](kernel, **options, count_include_pad=counted)
    src = np.random.default_rng(extent).standard_normal((1, 2, *(extent,) * axes))
    refused_by_torch = axes == 3 and counted is not None and extent < kernel
    if refused_by_torch or min(op.window(TensorSpec(src.shape)).dst) < 1:
        return
    made = FusionPlan(TensorSpec(src.shape, "f64"), op).reference(src, {})
    np.testing.assert_allclose(made, theirs(op, src), rtol=1e-12, atol=1e-13)


def test_means_leave_out_padding_of_two_sizes() -> None:
    plan = FusionPlan.parse("f64[1x1x1x4] -> avg_pool2d((1, 3), stride=1, padding=((0, 0), (0, 2)), "
                            "count_include_pad=False)")  # fmt: skip
    made = plan.reference(np.array([[[[1.0, 2.0, 6.0, 3.0]]]]), {})
    np.testing.assert_allclose(made.reshape(-1), [3.0, 11 / 3, 4.5, 3.0], rtol=1e-15)


def test_nothing_but_padding_is_minus_infinity_and_no_mean() -> None:
    src = np.ones((1, 1, 1))
    largest = FusionPlan.parse("f64[1x1x1] -> max_pool1d(2, stride=1, padding=1, dilation=2)")
    mean = FusionPlan.parse("f64[1x1x1] -> avg_pool1d(2, padding=1, dilation=2, count_include_pad=False)")
    assert largest.reference(src, {}).reshape(-1).tolist() == [-np.inf]
    assert np.isnan(mean.reference(src, {})).all()


def test_a_stride_of_the_kernel_is_none() -> None:
    assert MaxPool2d(2, stride=2) == MaxPool2d(2)
    assert str(FusionPlan("f32[1x2x4x4]", AvgPool2d((2, 3), stride=(2, 3)))).endswith("avg_pool2d((2, 3))")
    assert AvgPool2d(3, stride=1).steps == (1, 1)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        ("f32[1x2x4] -> max_pool2d(2)", "max_pool1d"),
        ("f32[4x2] -> avg_pool2d(2)", "amax or mean"),
        ("f32[1x2x4x4] -> max_pool2d(5)", "larger than its padded input"),
        ("f32[1x2x4x4] -> max_pool2d((2, 2, 2))", "2 spatial axes"),
        ("f32[1x2x4x4] -> avg_pool2d(2, ceil_mode=1)", "True or False"),
        ("i8[1x2x4x4] -> max_pool2d(2)", "floating-point"),
    ],
)
def test_errors(plan: str, word: str) -> None:
    with pytest.raises(PlanError) as told:
        FusionPlan.parse(plan)
    assert word in str(told.value)

"""Plans with statistics on each target of the host, against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

import fuseplan
from fuseplan.measure.data import evaluated
from fuseplan.measure.spaces import exact as wide
from fuseplan.plans.plan import FusionPlan
from training import CHAINS, STRIDES, TENSORS, assert_trained, training_arrays

TARGETS = ("cpu", "reference")


@pytest.mark.part(4)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("tensor", TENSORS)
def test_every_chain_in_every_layout(tensor: str, chain: str, target: str) -> None:
    plan = FusionPlan.parse(f"f32[{tensor}] -> {chain}")
    assert_trained(fuseplan.compile(plan, target), training_arrays(plan))


@pytest.mark.part(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["f64", "f16", "bf16"])
def test_every_dtype(dtype: str, chain: str, target: str) -> None:
    for tensor in ("4x9x6x5", "3x16x5x4, nhwc"):
        plan = FusionPlan.parse(f"{dtype}[{tensor}] -> {chain}")
        assert_trained(fuseplan.compile(plan, target), training_arrays(plan))


@pytest.mark.part(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("strides", STRIDES)
def test_a_src_with_gaps(strides: str, chain: str, target: str) -> None:
    plan = FusionPlan.parse(f"f32[2x3x5x7, strides={strides}] -> {chain}")
    assert_trained(fuseplan.compile(plan, target), training_arrays(plan))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "chain",
    ["batch_norm_training(running=True)", "batch_norm_training(per_activation)",
     "batch_norm_backward(relu, statistics=recomputed)"],
)  # fmt: skip
@pytest.mark.parametrize("tensor", ["32x4x8x8", "32x4x8x8, nhwc"])
def test_a_large_mean_costs_no_digits(tensor: str, chain: str, target: str) -> None:
    """The difference of the mean square and the squared mean would have none left at 1000."""
    plan = FusionPlan.parse(f"f32[{tensor}] -> {chain}")
    arrays = training_arrays(plan, mean=1000.0)
    assert_trained(fuseplan.compile(plan, target), arrays)
    if "training" in chain:
        _, want = evaluated(plan, arrays)
        got = fuseplan.compile(plan, target)(**arrays)
        # Numbers near 1000 lie 6e-5 apart: what a deviation of 1 is to them.
        np.testing.assert_allclose(got.saved_inverse_variance, want["saved_inverse_variance"], rtol=5e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_numbers_from_run_to_run(target: str) -> None:
    plan = FusionPlan.parse("f32[16x8x31x17] -> batch_norm_backward(relu, statistics=recomputed)")
    compiled, arrays = fuseplan.compile(plan, target), training_arrays(plan)
    first = compiled(**arrays)
    for _ in range(5):
        for one, other in zip(first, compiled(**arrays), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0, 1.5])
def test_running_statistics_are_updated_by_any_momentum(momentum: float, target: str) -> None:
    plan = FusionPlan.parse("f16[5x3x4x4, nhwc] -> batch_norm_training(running=True)")
    compiled, arrays = fuseplan.compile(plan, target), training_arrays(plan)
    old = {key: arrays[key].copy() for key in ("running_mean", "running_variance")}
    compiled(**arrays, momentum=momentum)
    x = wide(arrays["src"])
    new = {"running_mean": x.mean((0, 2, 3)), "running_variance": x.var((0, 2, 3), ddof=1)}
    for key, before in old.items():
        want = before + np.float32(momentum) * (new[key] - before)
        np.testing.assert_allclose(arrays[key], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("chain", ["batch_norm_training(running=True)", "batch_norm_backward(relu)"])
def test_nan_stays_in_its_channel(chain: str, target: str) -> None:
    plan = FusionPlan.parse(f"f32[4x5x3x3] -> {chain}")
    arrays = training_arrays(plan)
    arrays["src"][1, 2, 0, 1] = np.nan
    outcome = fuseplan.compile(plan, target)(**arrays)
    for got in outcome:
        axes = (0, 2, 3) if got.ndim == 4 else ()
        where = np.isnan(got).any(axis=axes)
        np.testing.assert_array_equal(where, np.arange(5) == 2)

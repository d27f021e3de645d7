"""What fusing is compared with: the operators one at a time, and eager torch, results of training too."""

import numpy as np
import pytest
import torch

import fuseplan
from fuseplan.measure.clock import HostClock
from fuseplan.measure.ground import Ground
from fuseplan.measure.layers import CannotRunError
from fuseplan.measure.torch_eager import eager
from fuseplan.plans.plan import FusionPlan
from fuseplan.tuning.verdict import OneAtATime


@pytest.mark.parametrize(
    "text",
    [
        "f32[2x4x5x6] -> conv2d(3, kernel=3) -> bias -> relu",
        "f32[3x4x5x6] -> relu -> batch_norm_training(running=True) -> leaky_relu(0.1)",
        "f32[3x4x5x6] -> scale -> batch_norm_backward(relu, statistics=recomputed) -> scale",
    ],
)
def test_one_at_a_time_gives_what_the_plan_does(text: str) -> None:
    plan = FusionPlan.parse(text)
    ground = Ground(plan, 0, None, HostClock())
    before = {key: np.array(tensor) for key, tensor in ground.tensors.items()}
    unfused = OneAtATime(plan, ground.tensors, target="reference")
    assert ground.deviation(unfused()) < 1e-6
    assert len(unfused.decided) == len(plan)
    for key, tensor in before.items():
        assert np.array_equal(tensor, ground.tensors[key]) == (
            key not in ("running_mean", "running_variance")
        )


@pytest.mark.parametrize(
    "text",
    [
        "f32[4x8x5x6, nhwc] -> batch_norm_training -> relu",
        "f32[4x8x5] -> batch_norm_training",
        "f32[4x8x5x6] -> batch_norm_backward(relu)",
        "f32[4x8x5x6] -> batch_norm_backward",
    ],
)
def test_eager_torch_gives_all_results_of_training(text: str) -> None:
    plan = FusionPlan.parse(text)
    ground = Ground(plan, 0, None, HostClock())
    with torch.inference_mode():
        got = tuple(tensor.numpy() for tensor in eager(plan, ground.tensors)())
    assert ground.deviations(got).keys() == {"out", *(each.key for each in plan.results)}
    assert ground.deviation(got) < 1e-5


def test_eager_torch_says_what_it_is_not_taught() -> None:
    plan = FusionPlan.parse("f32[4x8x5x6] -> batch_norm_training(per_activation)")
    with pytest.raises(CannotRunError, match="per channel"):
        eager(plan, Ground(plan, 0, None, HostClock()).tensors)


def test_unfused_runs_begin_with_the_same_running_statistics() -> None:
    plan = "f32[8x4x5x6] -> batch_norm_training(running=True) -> relu"
    verdict = fuseplan.compile(plan, threads=1).verdict()
    assert verdict.others.keys() == {"one at a time", "torch"}, verdict.refused


def test_a_ground_keeps_what_is_updated() -> None:
    plan = FusionPlan.parse("f32[4x8x5x6] -> batch_norm_training(running=True)")
    ground = Ground(plan, 0, None, HostClock())
    old = np.array(ground.tensors["running_mean"])
    ground.tensors["running_mean"][...] = 0
    first, second = ground.results(), ground.results()
    assert np.array_equal(first["running_mean"], old)
    assert first["running_mean"] is not second["running_mean"]
    assert np.isnan(first["saved_mean"]).all()
    assert first.keys() == {each.key for each in plan.results}
    unwritten = (ground.out(), *(first[each.key] for each in plan.results))
    assert not ground.deviation(unwritten) <= 1

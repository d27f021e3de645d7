"""Calls of plans that give several tensors, on a GPU that this machine pretends to have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from forced import forced
from fuseplan.backends.triton.templates.normalization import GpuNormalization
from fuseplan.compile import CompiledPlan
from fuseplan.errors import ArgumentError
from fuseplan.measure.data import evaluated
from fuseplan.plans.plan import FusionPlan
from posing import CUDA_0, PosingDriver, posing
from training import training_arrays

PLAN = "f32[6x4x5x3, nhwc] -> batch_norm_training(running=True, momentum=0.3) -> relu"
SAVED, RUNNING = ["saved_mean", "saved_inverse_variance"], ["running_mean", "running_variance"]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def gpu() -> Iterator[PosingDriver]:
    with posing() as driver:
        yield driver


@pytest.fixture(scope="module")
def compiled(gpu: PosingDriver) -> CompiledPlan:
    return forced(PLAN, GpuNormalization, CUDA_0)


@pytest.fixture
def tensors() -> Tensors:
    arrays = training_arrays(FusionPlan.parse(PLAN))
    return {key: torch.from_numpy(array.copy(order="K")) for key, array in arrays.items()}


def assert_right(plan: FusionPlan, old: Tensors, got: object) -> None:
    want, results = evaluated(plan, {key: tensor.numpy() for key, tensor in old.items()})
    assert isinstance(got, tuple)
    for tensor, value in zip(got, [want, *results.values()], strict=True):
        np.testing.assert_allclose(tensor.numpy(), value, rtol=1e-5, atol=1e-5)


def copied(tensors: Tensors) -> Tensors:
    return {key: tensor.clone() for key, tensor in tensors.items()}


def test_made_given_and_bound(gpu: PosingDriver, compiled: CompiledPlan, tensors: Tensors) -> None:
    old = copied(tensors)
    first = compiled(**tensors)
    assert first._fields == ("out", *SAVED, *RUNNING)
    assert_right(compiled.plan, old, first)
    assert first.running_mean is tensors["running_mean"]
    mine = {key: torch.full((4,), float("nan")) for key in SAVED}
    src = old.pop("src")
    bound = compiled.bind(**old, **mine)
    assert bound.missing == ()
    before = copied(old)
    out = torch.full_like(src, float("nan"))
    for call in range(3):
        got = bound(src, out)
        assert got.out is out
        assert all(getattr(got, key) is (old | mine)[key] for key in (*SAVED, *RUNNING))
        assert_right(compiled.plan, {"src": src, **before}, got)
        before |= {key: old[key].clone() for key in RUNNING}
        src = src * (1.5 + call)
    addresses = {launch.arguments for launch in gpu.launches[-2:]}
    assert len({tuple(arguments[1:]) for arguments in addresses}) == 1, "all but src is as it was"


def test_what_is_refused_on_a_device(compiled: CompiledPlan, tensors: Tensors) -> None:
    room = torch.zeros(9)
    cases = [
        ({"saved_mean": torch.zeros(4, dtype=torch.float64)}, "has the wrong dtype"),
        ({"saved_mean": torch.zeros(4, device="meta")}, "is on meta"),
        ({"saved_mean": room[1:5]}, "begins at an address that is not a multiple of 16"),
        ({"saved_mean": tensors["running_mean"]}, "overlaps result `saved_mean`"),
        ({"saved_mean": tensors["src"].permute(0, 2, 3, 1).reshape(-1)[:4]}, "overlaps `src`"),
        ({"saved_mean": torch.zeros(4, requires_grad=True)}, "requires a gradient"),
        ({"running_mean": np.zeros(4, np.float32)}, "memory"),
    ]
    for wrong, says in cases:
        with pytest.raises(ArgumentError, match=says):
            compiled(**{**tensors, **wrong})


def test_a_src_over_a_bound_result_is_seen_every_time(compiled: CompiledPlan, tensors: Tensors) -> None:
    room = torch.zeros(364)
    src, own = room[:360].view(6, 5, 3, 4).permute(0, 3, 1, 2), room[360:]
    operands = {key: tensor for key, tensor in tensors.items() if key != "src"}
    bound = compiled.bind(**operands, saved_mean=own)
    for _ in range(2):
        bound(src)
    with pytest.raises(ArgumentError, match="result `saved_mean` overlaps `src`"):
        bound(room[4:].view(6, 5, 3, 4).permute(0, 3, 1, 2))

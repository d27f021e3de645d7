"""Calls that nothing of torch's watches skip torch's dispatcher; all others are operators of torch's."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseplan.torch as fused
from fuseplan.torch import operator


@pytest.mark.parametrize(
    ("context", "direct"),
    [
        (nullcontext, 0),  # gradients are recorded
        (torch.no_grad, 1),
        (torch.inference_mode, 1),
        (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), 0),
        (torch.autograd.forward_ad.dual_level, 0),
    ],
)
def test_a_call_is_direct_where_nobody_watches(
    context: Callable[[], AbstractContextManager[object]], direct: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    plain = operator._computed

    def computed(operators: str, *others: Any) -> list[torch.Tensor]:
        calls.append(operators)
        return plain(operators, *others)

    monkeypatch.setattr(operator, "_computed", computed)
    src, other = torch.randn(3, 4), torch.randn(3, 4)
    with torch.set_grad_enabled(context is nullcontext), context():
        made = fused.run("relu -> add", src, other=other)
    assert len(calls) == direct
    torch.testing.assert_close(made, src.relu() + other)


def test_fake_and_mapped_tensors_are_seen() -> None:
    with FakeTensorMode(), torch.no_grad():
        assert fused.run("relu", torch.empty(3, 4)).shape == (3, 4)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Batching rule"):
        torch.func.vmap(lambda row: fused.run("relu", row))(torch.randn(2, 3, 4))


def test_fused_modules_are_torchs_under_its_transforms() -> None:
    """Plans have no rule for a mapped tensor, and no tangent."""
    plain, src = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 1, 4)
    made = fused.fuse(plain, src[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(made)(src), plain(src))

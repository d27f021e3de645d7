"""Norms of PyTorch's graphs as plans."""

from __future__ import annotations

import torch
from torch import nn

import fuseplan.torch as fused


class Grouped(nn.Module):  # type: ignore[misc]
    """Norms of an image's channels, with and without numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)
        self.plain = nn.GroupNorm(3, 6, affine=False)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        normalized = nn.functional.silu(self.group(src + 1))
        return self.plain(self.instance(normalized).relu())


def test_norms_of_channels_are_plans() -> None:
    torch.manual_seed(0)
    module, src = Grouped().eval(), torch.randn(2, 6, 5, 4)
    whole = fused.fuse(module, src)
    with torch.no_grad():
        torch.testing.assert_close(whole(src), module(src), rtol=1e-5, atol=1e-5)
    plans = [str(site.plan).partition(" -> ")[2] for site in whole.fusion.cut.sites]
    assert len(plans) == 3
    assert [plan.partition("_norm")[0].rpartition(" ")[2] for plan in plans] == ["group", "instance", "group"]

"""Norms and statistics of PyTorch's graphs as plans."""

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


class Reduced(nn.Module):  # type: ignore[misc]
    """Statistics over some axes and over all, of images and of rows."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = src.relu().sum((2, 3))
        return rows.amax(1, keepdim=True), rows.amin(-1), (src * 2).sum((1,)), src.exp().amax((2, 3))


def test_sums_and_largest_elements_are_plans() -> None:
    torch.manual_seed(0)
    module, src = Reduced(), torch.randn(2, 6, 5, 4, requires_grad=True)
    whole = fused.fuse(module, src)
    plans = " ".join(str(site.plan) for site in whole.fusion.cut.sites)
    assert [plans.count(word) for word in ("sum(", "amax(", "amin(")] == [2, 2, 1]
    found = []
    for each in (module, whole):
        made = each(src)
        (gradient,) = torch.autograd.grad(sum(one.square().sum() for one in made), src)
        found.append([*made, gradient])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)

"""Operators that compute what an earlier one did: one of them, where nothing can tell."""

from __future__ import annotations

import torch
from torch import nn

import fuseplan.torch as fused


class Spelled(nn.Module):  # type: ignore[misc]
    """Cohere's norm, which takes the mean from its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        mean = src.mean(-1, keepdim=True)
        variance = (src - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((src - mean) * torch.rsqrt(variance + 1e-5))


class Alike(nn.Module):  # type: ignore[misc]
    """Operators that differ in chance, in the sign of a zero, and in whose memory they write."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chances = torch.rand_like(src), torch.rand_like(src)
        zeros = 1 / (src.abs() * 0.0), 1 / (src.abs() * -0.0)
        views = src.exp().transpose(0, 1), src.exp().transpose(0, 1)
        return *chances, *zeros, *views


def test_a_norm_that_centres_twice_is_one_plan() -> None:
    torch.manual_seed(0)
    module, src = Spelled().eval(), torch.randn(4, 16)
    whole = fused.fuse(module, src)
    with torch.no_grad():
        torch.testing.assert_close(whole(src), module(src))
    assert [str(site.plan) for site in whole.fusion.cut.sites] == [
        "f32[4x16] -> layer_norm(affine=False) -> scale"
    ]
    assert [row.state for row in whole.report.operators].count("folded") == 1


def test_what_callers_can_tell_apart_stays_apart() -> None:
    src = torch.randn(3, 5)
    one, other, above, below, *views = fused.fuse(Alike(), src)(src)
    assert not torch.equal(one, other)
    assert (above > 0).all()
    assert (below < 0).all()
    views[0].zero_()
    torch.testing.assert_close(views[1], src.exp().T)


class Biased(nn.Module):  # type: ignore[misc]
    """A bias by places, as windows of attention have it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(5, 16))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.linear(src) + self.table[torch.arange(7) % 5]


def test_operators_of_the_modules_own_tensors_are_folded() -> None:
    module, src = Biased().eval(), torch.randn(7, 16)
    whole = fused.fuse(module, src)
    states = {row.kind: row.state for row in whole.report.operators}
    assert {states[f"aten.{name}"] for name in ("arange.default", "remainder.Scalar", "index.Tensor")} == {
        "folded"
    }
    assert (whole.report.launches.before, whole.report.launches.libraries) == (5, {})
    with torch.no_grad():
        module.table.add_(1)
        torch.testing.assert_close(whole(src), module(src))


class Greatest(nn.Module):  # type: ignore[misc]
    """Greatest and least elements, of some with their places, and of whole numbers."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = src.min(-1)
        numbers = (src * 10).long()
        return src.max(-1)[0], src.min(1, keepdim=True).values, values * places, numbers.max(-1)[0]


def test_greatest_elements_are_plans_where_nothing_reads_their_places() -> None:
    torch.manual_seed(0)
    module, src = Greatest().eval(), torch.randn(3, 5, 16)
    src[0, 1, 3] = torch.nan
    whole = fused.fuse(module, src)
    plans = [str(site.plan) for site in whole.fusion.cut.sites]
    assert [each.rpartition("-> ")[2] for each in plans if "am" in each] == [
        "amax(2)",
        "amin(1, keepdim=True)",
    ]
    with torch.no_grad():
        for made, wanted in zip(whole(src), module(src), strict=True):
            torch.testing.assert_close(made, wanted, equal_nan=True)

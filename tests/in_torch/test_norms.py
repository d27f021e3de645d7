"""Norms and statistics of PyTorch's graphs as plans."""

from __future__ import annotations

import pytest
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


class Rooted(nn.Module):  # type: ignore[misc]
    """A product and Llama's norm: computed in f32, and rounded before the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(width, width, bias=False), nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.linear(src)
        wide = made.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(src.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_f32_of_fewer_bits_reads_and_writes_these(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module, src = Rooted(64).eval().to(dtype), torch.randn(2, 5, 64).to(dtype)
    whole = fused.fuse(module, src)
    with torch.no_grad():
        exact = module.double()(src.double())
        module.to(dtype)
        far, own = ((each(src).double() - exact).norm() / exact.norm() for each in (whole, module))
    assert far <= own
    word = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    assert [str(site.plan) for site in whole.fusion.cut.sites] == [
        f"{word}[2x5x64] -> linear(64)",
        f"{word}[2x5x64] -> rms_norm(affine=False, epsilon=1e-06) -> scale",
    ]
    assert not whole.fusion.cut.left


class Narrow(nn.Module):  # type: ignore[misc]
    """The norm of an f32 residual with a weight of fewer bits, as of a T5 in bf16, and a sum with one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.rand(width))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        wide = src * torch.rsqrt(src.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(self.weight.dtype) + self.bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_operands_may_have_fewer_bits_than_the_src(dtype: torch.dtype, is_compiled: bool) -> None:
    torch.manual_seed(0)
    module, src = Narrow(64).to(dtype), torch.randn(2, 5, 64)
    torch._dynamo.reset()
    whole = torch.compile(module, backend="fuseplan") if is_compiled else fused.fuse(module, src)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(whole(src), module(src), rtol=2**-6, atol=2**-6)
            module.weight.mul_(2)  # seen by the next call


class Converted(nn.Module):  # type: ignore[misc]
    """Conversions in front of operators, behind them, and alone."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = torch.softmax(src, -1, dtype=torch.float32).type_as(src)
        return scores, (src * 2).float(), src.float().exp().half(), src.double()


def test_conversions_are_parts_of_plans_and_no_plans_of_their_own() -> None:
    torch.manual_seed(0)
    module, src = Converted(), torch.randn(3, 5, 16).bfloat16()
    whole = fused.fuse(module, src)
    plans = [str(site.plan).partition(" -> ")[2] for site in whole.fusion.cut.sites]
    assert plans == ["softmax", 'elementwise("x * 2") -> cast(f32)', 'elementwise("exp(x)") -> cast(f16)']
    (alone,) = whole.fusion.cut.left.values()
    assert alone.why.code == "no-plan"
    with torch.no_grad():
        for made, want in zip(whole(src), module(src), strict=True):
            torch.testing.assert_close(made, want, rtol=2**-7, atol=0)

"""Parts of tensors in torch's models: views, which attention reads where they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fuseplan.torch


class Packed(nn.Module):  # type: ignore[misc]
    """Attention whose queries, keys and values are one product."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.project, self.way = nn.Linear(32, 96), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.project(x)
        if self.way == "split":
            parts = made.split(32, -1)
        elif self.way == "chunk":
            parts = made.chunk(3, dim=2)
        elif self.way == "unbind":
            parts = made.view(2, 9, 3, 32).unbind(-2)
        elif self.way == "select":
            parts = [made.view(2, 9, 3, 32)[:, :, place] for place in (-3, 1, -1)]
        else:
            parts = made[..., :32], made[..., 32:64], made[..., 64:]
        q, k, v = (each.view(2, 9, 4, 8).transpose(1, 2) for each in parts)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("way", ["split", "chunk", "slice", "unbind", "select"])
def test_attention_reads_ranges(way: str) -> None:
    module, x = Packed(way), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    fused = fuseplan.torch.fuse(module, x)
    for _ in range(2):
        torch.testing.assert_close(fused(x), module(x), rtol=1e-4, atol=1e-5)
    plans = [str(site.plan) for site in fused.fusion.cut.sites]
    attention = "f32[2x4x9x8, strides=864:8:96:1 of bhsc] -> attention(is_causal=True)"
    assert plans == ["f32[2x9x32] -> linear(96) -> bias", attention]
    report = fused.report
    assert not report.copies
    views = {row.kind: row.state for row in report.operators}
    parts = ("split", "slice", "select", "getitem")
    assert {state for kind, state in views.items() if any(part in kind for part in parts)} == {"view"}
    x.requires_grad_()
    got, want = (torch.autograd.grad(each(x).square().sum(), x)[0] for each in (fused, module))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_parts_that_other_operators_read() -> None:
    class Gate(nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = x.sigmoid().split([3, 5, 2], 1)
            return torch.relu(a).sum() + torch.exp(b[:, 1:][:, ::2]).sum() * torch.tanh(c).sum()

    x = torch.randn(4, 10, 6, generator=torch.Generator().manual_seed(0))
    fused = fuseplan.torch.fuse(Gate(), x)
    torch.testing.assert_close(fused(x), Gate()(x), rtol=1e-4, atol=1e-4)

"""Attention written out whose scores are given several masks, one after another: plans read their sum."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch

HEADS = (2, 4, 5, 8)
Tensors = tuple[torch.Tensor, ...]


def after_another(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return q @ k.mT / 4 + bias + mask


def scaled(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Falcon's."""
    return mask + (q @ k.mT + bias) * 0.25


def joined(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """BLOOM's: heads of all images are one axis, and the bias has one row for all queries."""
    row = bias[:, :1].repeat(2, 1, 1)
    scores = row.baddbmm(q.reshape(8, 5, 8), k.reshape(8, 5, 8).mT, beta=1, alpha=0.25)
    return scores.view(2, 4, 5, 5) + mask


def of_numbers(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """DeBERTa's: divided by the root of a number, and filled where nothing is hidden."""
    root = torch.sqrt(torch.tensor(16, dtype=torch.float))
    scores = q.reshape(8, 5, 8).bmm(k.reshape(8, 5, 8).mT / root) + bias.repeat(2, 1, 1)
    return scores.view(-1, 4, 5, 5).masked_fill(torch.ones(2, 1, 5, 5) == 0, torch.finfo(q.dtype).min)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, scores: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.scores = scores

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: torch.Tensor
    ) -> torch.Tensor:
        return self.scores(q, k, *masks).softmax(-1) @ v


def given(dtype: torch.dtype = torch.float32) -> Tensors:
    torch.manual_seed(0)
    q, k, v = (torch.randn(HEADS, dtype=dtype) for _ in range(3))
    mask = torch.where(torch.rand(2, 1, 5, 5) < 0.6, 0.0, torch.finfo(dtype).min).to(dtype)
    mask[0, :, 1] = torch.finfo(dtype).min  # a query that sees no key
    return q, k, v, torch.randn(4, 5, 5, dtype=dtype), mask


@pytest.mark.parametrize("scores", [after_another, scaled, joined, of_numbers])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_attention_with_several_masks_is_one_plan(
    scores: Callable[..., torch.Tensor], is_compiled: bool
) -> None:
    module, tensors = Attention(scores).eval(), given()
    torch._dynamo.reset()
    with torch.no_grad():
        if is_compiled:
            made = torch.compile(module, backend="fuseplan")(*tensors)
        else:
            fused = fuseplan.torch.fuse(module, *tensors)
            made = fused(*tensors)
            plans = [str(site.plan) for site in fused.report.sites]
            assert sum("attention(scale=0.25, bias_axes=bhst" in each for each in plans) == 1
        torch.testing.assert_close(made, module(*tensors), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("images", [1, 2])
def test_masks_of_windows(images: int) -> None:
    """Swin's: all heads have a bias, and each window of an image has a mask."""

    def windows(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / 4 + bias).view(images, 2, 4, 5, 5)
        return (scores + mask[None]).view(-1, 4, 5, 5)

    tensors = given()
    tensors = *(each.repeat(images, 1, 1, 1) for each in tensors[:3]), *tensors[3:]
    module = Attention(windows).eval()
    fused = fuseplan.torch.fuse(module, *tensors)
    (site,) = fused.report.sites
    assert "attention(scale=0.25, bias_axes=bhst" in site.plan
    with torch.no_grad():
        torch.testing.assert_close(fused(*tensors), module(*tensors), rtol=1e-5, atol=1e-6)


def test_scores_that_are_doubled_stay() -> None:
    module = Attention(lambda q, k, bias, _: (scores := q @ k.mT + bias) + scores).eval()
    tensors = given()
    fused = fuseplan.torch.fuse(module, *tensors)
    with torch.no_grad():
        torch.testing.assert_close(fused(*tensors), module(*tensors), rtol=1e-5, atol=1e-6)


def test_stacks_of_matrices_are_left_for_their_own_reason() -> None:
    """Not for their shape: no reshape of the input would make a plan of them."""

    class Stacks(nn.Module):  # type: ignore[misc]
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Tensors:
            return q @ k.mT, q[0].bmm(k[0].mT)

    report = str(fuseplan.torch.fuse(Stacks(), *given()[:2]).report)
    assert "2 x weight-not-constant" in report


def test_with_open_extents() -> None:
    module, tensors = Attention(after_another).eval(), given()
    batch = torch.export.Dim("batch")
    opened = {0: batch}
    shapes = {"q": opened, "k": opened, "v": opened, "masks": (None, opened)}
    fused = fuseplan.torch.fuse(module, *tensors, dynamic_shapes=shapes)
    assert any("attention" in str(site.plan) for site in fused.report.sites)
    bias, more = tensors[3], [torch.cat([each, each[:1]]) for each in (*tensors[:3], tensors[4])]
    with torch.no_grad():
        torch.testing.assert_close(fused(*more[:3], bias, more[3]), module(*more[:3], bias, more[3]))


def test_sums_in_f16_stay() -> None:
    """The lowest number and a bias are minus infinity there: a query that sees no key would be NaN."""
    module, (q, k, v, bias, mask) = Attention(after_another).eval(), given(torch.float16)
    tensors = torch.full_like(q, 4.5), torch.full_like(k, 4.5), v, torch.full_like(bias, -40), mask
    fused = fuseplan.torch.fuse(module, *tensors)
    with torch.no_grad():
        made = fused(*tensors)
        torch.testing.assert_close(made, module(*tensors), rtol=1e-2, atol=1e-3)
    assert made.isfinite().all()

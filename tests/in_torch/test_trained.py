"""Attention in steps of training: plans in the forward and in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from fuseplan.torch import trained

OPERATORS = "[bhsd] -> attention(is_causal=True, return_lse=True)"
PLACES = 24
HOW: dict[str, dict[str, Any]] = {
    "attention(return_lse=True)": {},
    "attention(is_causal=True, return_lse=True)": {"is_causal": True},
    "attention(key_heads=2, return_lse=True)": {"enable_gqa": True},
    "attention(scale=0.3, return_lse=True)": {"scale": 0.3},
    "attention(mask_axes=bt, return_lse=True)": {"attn_mask": torch.arange(PLACES) % 5 < 3},
    "attention(bias_axes=hst, return_lse=True)": {"attn_mask": torch.randn(4, PLACES, PLACES)},
}


def expanded(heads: torch.Tensor) -> torch.Tensor:
    """Each of two heads twice, as models of transformers have them."""
    return heads[:, :, None, :, :].expand(2, 2, 2, PLACES, 16).reshape(2, 4, PLACES, 16)


def unsqueezed(heads: torch.Tensor) -> torch.Tensor:
    return heads.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2)


def in_turn(heads: torch.Tensor) -> torch.Tensor:
    """The two heads, and the two once more."""
    return heads[:, None].expand(2, 2, 2, PLACES, 16).reshape(2, 4, PLACES, 16)


def part(heads: torch.Tensor) -> torch.Tensor:
    """The same, of a value that is one of several."""
    return torch.stack([heads, heads.sin()], 2).split(1, 2)[0].expand(2, 2, 2, PLACES, 16).flatten(1, 2)


def picked(heads: torch.Tensor) -> torch.Tensor:
    """Heads in another order, each of which is repeated."""
    return heads[:, [1, 0], None].expand(2, 2, 2, PLACES, 16).reshape(2, 4, PLACES, 16)


class Block(nn.Module):  # type: ignore[misc]
    """Projections, attention as a test wants it, and a projection."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.repeat = how.pop("repeat", None)
        self.heads = 2 if how.get("enable_gqa") or self.repeat else 4
        self.first, self.last = nn.Linear(64, 16 * (4 + 2 * self.heads)), nn.Linear(64, 8)
        mask = how.pop("attn_mask", None)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.expand(2, 1, 1, PLACES).clone()
        self.register_buffer("mask", mask)
        self.how = how

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        made = self.first(src).view(2, PLACES, -1, 16).transpose(1, 2)
        query, key, value = made.split([4, self.heads, self.heads], 1)
        if self.repeat:
            key, value = self.repeat(key), self.repeat(value)
        attended = scaled_dot_product_attention(query, key, value, self.mask, **self.how)
        return self.last(attended.transpose(1, 2).flatten(2))


def gradients(module: nn.Module, block: nn.Module, src: torch.Tensor) -> list[torch.Tensor]:
    return [*torch.autograd.grad(module(src).square().sum(), [src, *block.parameters()])]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the plans of calls, all of which are taken."""
    taken: list[str] = []

    def fast(plan: Any, device: torch.device) -> bool:
        taken.append(str(plan).partition("-> ")[2])
        return True

    monkeypatch.setattr(trained, "is_fast", fast)
    return taken


@pytest.mark.parametrize("text", HOW)
def test_gradients_are_those_of_torch(plans: list[str], text: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    block, src = Block(**HOW[text]), torch.randn(2, PLACES, 64, requires_grad=True)
    compiled = torch.compile(block, backend="fuseplan", dynamic=False)
    for _ in range(2):
        for made, want in zip(gradients(compiled, block, src), gradients(block, block, src), strict=True):
            torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    assert plans == [text]


@pytest.mark.parametrize("repeat", [expanded, unsqueezed, in_turn, part, picked])
def test_heads_that_are_repeated_are_read_where_they_are(plans: list[str], repeat: Any) -> None:
    """A view that repeats each head for its queries is left out; another one stays."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    block, src = Block(repeat=repeat, is_causal=True), torch.randn(2, PLACES, 64, requires_grad=True)
    compiled = torch.compile(block, backend="fuseplan", dynamic=False)
    for made, want in zip(gradients(compiled, block, src), gradients(block, block, src), strict=True):
        torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    heads = "key_heads=2, " if repeat in (expanded, unsqueezed) else ""
    assert plans == [f"attention(is_causal=True, {heads}return_lse=True)"]


@pytest.mark.parametrize(
    "how",
    [
        {"dropout_p": 0.1},
        {"attn_mask": nn.Parameter(torch.randn(4, PLACES, PLACES))},
        {"attn_mask": torch.randn(2, 1, PLACES, 1)},
        {"scale": 0.0},
    ],
)
def test_other_calls_stay_torchs(plans: list[str], how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    block, src = Block(**how), torch.randn(2, PLACES, 64, requires_grad=True)
    if isinstance(how.get("attn_mask"), nn.Parameter):
        del block.mask
        block.mask = how["attn_mask"]
    gradients(torch.compile(block, backend="fuseplan", dynamic=False), block, src)
    assert plans == []


def test_torchs_kernels_are_left_where_they_may_be_faster() -> None:
    torch._dynamo.reset()
    block, src = Block(), torch.randn(2, PLACES, 64, requires_grad=True)
    compiled = torch.compile(block, backend="fuseplan", dynamic=False)
    with torch.profiler.profile() as profile:
        gradients(compiled, block, src)
    assert "fuseplan::trained_attention" not in {each.key for each in profile.key_averages()}


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", True), ("f32", False)])
def test_plans_are_taken_where_hoppers_kernel_is_one_of_several(
    monkeypatch: pytest.MonkeyPatch, dtype: str, expected: bool
) -> None:
    """The plain kernel by keys is estimated faster for heads too few for all processors."""
    monkeypatch.setattr(trained, "target_of", lambda device: (parse_target("triton:sm_90"), None))
    text = "[8x8x512x64, bshd of bhsd] -> attention(key_heads=2, scale=0.125, mask_axes=bst, return_lse=True)"
    plan = FusionPlan.parse(f"{dtype}{text}")
    assert trained.is_fast(plan, torch.device("cuda")) == expected


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_operators_are_torchs(is_turned: bool) -> None:
    query = torch.randn(2, 9, 3, 16).transpose(1, 2) if is_turned else torch.randn(2, 3, 9, 16)
    tensors = [each.requires_grad_() for each in (query, torch.randn(2, 3, 9, 16), torch.randn(2, 3, 9, 16))]
    arguments = (*tensors, [], OPERATORS)
    torch.library.opcheck(torch.ops.fuseplan.trained_attention.default, arguments)
    out, lse = torch.ops.fuseplan.trained_attention(*arguments)
    given = (
        torch.randn_like(out),
        *(each.detach() for each in tensors),
        [],
        out.detach(),
        lse.detach(),
        OPERATORS,
    )
    torch.library.opcheck(torch.ops.fuseplan.attention_gradients.default, given)

"""Modules of a transformer's block beside torch's layers, whose state they load."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.torch import losses, operator

BOUND = 2e-5  # of the largest value: sums in another order


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = BOUND) -> None:
    assert got.shape == want.shape
    assert (got.double() - want.double()).abs().max() <= bound * want.double().abs().max() + 1e-12


def same_gradients(got: torch.Tensor, want: torch.Tensor, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Of one random gradient of both results."""
    gradient = torch.randn_like(want)
    made = torch.autograd.grad(got, mine, gradient.to(got.dtype))
    for each, other in zip(made, torch.autograd.grad(want, theirs, gradient), strict=True):
        close(each, other)


NORMS: tuple[tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]], ...] = (
    (fused.AddLayerNorm, nn.LayerNorm, {}),
    (fused.AddLayerNorm, nn.LayerNorm, {"bias": False, "eps": 0.5}),
    (fused.AddLayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
    (fused.AddRMSNorm, nn.RMSNorm, {}),
    (fused.AddRMSNorm, nn.RMSNorm, {"elementwise_affine": False, "eps": 0.1}),
)


@pytest.mark.parametrize(("made", "kind", "options"), NORMS)
def test_a_norm_of_a_sum_gives_both(
    made: Callable[..., Any], kind: Callable[..., Any], options: dict[str, Any]
) -> None:
    theirs, mine = kind(33, **options), made(33, **options)
    for each in theirs.parameters():
        nn.init.normal_(each)
    mine.load_state_dict(theirs.state_dict())
    src, residual = (torch.randn(3, 7, 33, requires_grad=True) for _ in range(2))
    normalized, total = mine(src, residual)
    close(total, src + residual, 0)
    want = theirs(src + residual)
    close(normalized, want)
    leaves = [src, residual]
    same_gradients(
        normalized + 2 * total,
        want + 2 * (src + residual),
        [*leaves, *mine.parameters()],
        [*leaves, *theirs.parameters()],
    )


def test_a_norm_of_a_sum_is_over_the_last_axis() -> None:
    with pytest.raises(PlanError, match="the last axis alone"):
        fused.AddLayerNorm((3, 4))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu(tanh)", "relu", "sigmoid"])
def test_a_gated_mlp(bias: bool, activation: str) -> None:
    function = {
        "silu": nn.functional.silu,
        "gelu": nn.functional.gelu,
        "gelu(tanh)": lambda x: nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
    }[activation]
    mlp = fused.GatedMLP(24, 50, bias, activation=activation)
    assert [name for name, _ in mlp.named_children()] == ["gate_proj", "up_proj", "down_proj"]
    src = torch.randn(3, 5, 24, requires_grad=True)
    want = mlp.down_proj(function(mlp.gate_proj(src)) * mlp.up_proj(src))
    close(mlp(src), want)
    close(mlp(src, src), want + src)
    leaves = [src, *mlp.parameters()]
    same_gradients(mlp(src, src), want + src, leaves, leaves)


def test_a_gated_mlp_sees_new_weights_and_autocast() -> None:
    mlp, src = fused.GatedMLP(24, 50), torch.randn(5, 24)
    with torch.no_grad():
        before = mlp(src)
        mlp.up_proj.weight *= 2
        close(mlp(src), 2 * before)
        with torch.autocast("cpu", torch.bfloat16):
            made = mlp(src)
        assert made.dtype == torch.bfloat16
        close(made, 2 * before, 0.03)


def test_a_gated_mlp_names_what_is_no_activation() -> None:
    with pytest.raises(PlanError, match="softmax"):
        fused.GatedMLP(24, 50, activation="softmax")(torch.randn(5, 24))


def _padding() -> torch.Tensor:
    mask = torch.zeros(2, 10, dtype=torch.bool)
    mask[0, 7:] = True
    return mask


def _hidden() -> torch.Tensor:
    mask = torch.rand(10, 10) > 0.6
    mask.fill_diagonal_(False)  # else a query may see no key, where torch gives NaN
    return mask


MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "all": dict,
    "padding": lambda: {"key_padding_mask": _padding()},
    "bool": lambda: {"attn_mask": _hidden()},
    "bias": lambda: {"attn_mask": torch.randn(10, 10)},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masks", MASKS)
def test_self_attention(masks: str, bias: bool) -> None:
    theirs = nn.MultiheadAttention(32, 4, bias=bias, batch_first=True)
    mine = fused.SelfAttention(32, 4, bias)
    mine.load_state_dict(theirs.state_dict())
    src, options = torch.randn(2, 10, 32, requires_grad=True), MASKS[masks]()
    want = theirs(src, src, src, need_weights=False, **options)[0]
    close(mine(src, **options), want)
    close(mine(src, residual=src, **options), want + src)
    same_gradients(mine(src, **options), want, [src, *mine.parameters()], [src, *theirs.parameters()])


def test_self_attention_joins_its_masks() -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    mine = copy.deepcopy(fused.SelfAttention(32, 4))
    mine.load_state_dict(theirs.state_dict())
    src, padding = torch.randn(2, 10, 32), _padding()
    hidden = torch.ones(10, 10).triu(1).bool()
    with torch.no_grad():
        both = theirs(src, src, src, need_weights=False, key_padding_mask=padding, attn_mask=hidden)[0]
        close(mine(src, key_padding_mask=padding, attn_mask=hidden), both)
        close(mine(src, key_padding_mask=padding, is_causal=True), both)
        added = torch.zeros(10, 10).masked_fill(hidden, -30.0)
        close(mine(src, key_padding_mask=padding, attn_mask=added), both)


def test_self_attention_of_places_that_see_nothing_is_zero() -> None:
    mine, src = fused.SelfAttention(32, 4), torch.randn(2, 10, 32)
    padding = torch.ones(2, 10, dtype=torch.bool)
    with torch.no_grad():
        made = mine(src, key_padding_mask=padding)
    close(made, mine.out_proj.bias.expand(2, 10, 32))


def test_self_attention_refuses_other_shapes() -> None:
    mine = fused.SelfAttention(32, 4)
    src = torch.randn(2, 10, 32)
    with pytest.raises(ArgumentError, match=r"\(batch, places, features\)"):
        mine(src[0])
    with pytest.raises(ArgumentError, match=r"attn_mask.*want torch.bool or torch.float32.*10, 10"):
        mine(src, attn_mask=torch.zeros(8, 10, 10))
    with pytest.raises(ArgumentError, match=r"key_padding_mask: got torch.float32"):
        mine(src, key_padding_mask=torch.zeros(2, 10))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, BOUND), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_cross_entropy(
    reduction: str, dtype: torch.dtype, bound: float, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "BLOCK", 1000)  # 9 rows in a block
    options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": reduction}
    head = fused.LinearCrossEntropy(33, 101, bias, dtype=dtype, **options)
    head.load_state_dict(nn.Linear(33, 101, bias).state_dict())
    src, target = torch.randn(4, 8, 33, dtype=dtype, requires_grad=True), torch.randint(0, 101, (4, 8))
    target[1, 2:5] = -100
    leaves = [each.detach().double().requires_grad_() for each in (src, *head.parameters())]
    logits = nn.functional.linear(*leaves).view(-1, 101)
    want = nn.functional.cross_entropy(logits, target.view(-1), **options)
    want = want.view(target.shape) if reduction == "none" else want
    got, gradient = head(src, target), torch.randn(want.shape)
    assert got.dtype == torch.float32
    close(got, want, bound)
    made = torch.autograd.grad(got, [src, *head.parameters()], gradient)
    for each, exact in zip(made, torch.autograd.grad(want, leaves, gradient.double()), strict=True):
        assert each.dtype == dtype
        close(each, exact, bound)


def test_linear_and_cross_entropy_holds_a_block_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "BLOCK", 64 * 1000)
    head, seen = fused.LinearCrossEntropy(16, 1000, bias=False), list[int]()
    launched = operator.launched

    def counted(*given: Any) -> list[torch.Tensor]:
        made = launched(*given)
        seen.extend(each.numel() for each in made)
        return made

    monkeypatch.setattr(losses, "launched", counted)
    src = torch.randn(300, 16, requires_grad=True)
    loss = head(src, torch.randint(0, 1000, (300,)))
    assert seen == [300, 300], "the losses and the logarithms alone: one kernel makes them"
    loss.backward()
    assert src.grad is not None
    assert max(seen) == 64 * 1000


def test_linear_and_cross_entropy_with_a_part_of_its_gradients() -> None:
    head, src = fused.LinearCrossEntropy(16, 50), torch.randn(6, 16)
    head(src, torch.randint(0, 50, (6,))).backward()
    assert head.weight.grad is not None
    head.requires_grad_(False)
    leaf = src.requires_grad_()
    head(leaf, torch.randint(0, 50, (6,))).backward()
    assert leaf.grad is not None


def test_linear_and_cross_entropy_refuses_other_targets() -> None:
    head, src = fused.LinearCrossEntropy(16, 50), torch.randn(6, 16)
    with pytest.raises(ArgumentError, match=r"got torch.int64\[5\], want torch.int64\[6\]"):
        head(src, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ArgumentError, match=r"got torch\.float32"):
        head(src, torch.zeros(6))
    with pytest.raises(ArgumentError, match="no reduction is named 'avg'; there are mean, sum, none"):
        fused.LinearCrossEntropy(16, 50, reduction="avg")


MODULES: tuple[tuple[Callable[[], Any], tuple[torch.Tensor, ...]], ...] = (
    (lambda: fused.AddLayerNorm(32, bias=False), (torch.ones(2, 7, 32), torch.ones(2, 7, 32))),
    (lambda: fused.AddRMSNorm(32), (torch.ones(2, 7, 32), torch.ones(2, 7, 32))),
    (lambda: fused.GatedMLP(32, 48), (torch.ones(2, 7, 32),)),
    (lambda: fused.SelfAttention(32, 4), (torch.ones(2, 7, 32),)),
    (lambda: fused.LinearCrossEntropy(32, 50), (torch.ones(2, 7, 32), torch.ones(2, 7, dtype=torch.int64))),
)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own, in dynamo
@pytest.mark.parametrize(("make", "given"), MODULES)
def test_torch_compile_takes_a_module_whole(make: Callable[[], Any], given: tuple[torch.Tensor, ...]) -> None:
    module = make()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    gradients = []
    for each in (module, compiled):
        made = each(*given)
        total = made[0] + made[1] if isinstance(made, tuple) else made
        total.sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
        module.zero_grad()
    for one, other in zip(*gradients, strict=True):
        close(one, other)
    torch.save(module.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    make().load_state_dict(torch.load(buffer))


def test_a_target_of_64_bits_is_not_cut_to_32() -> None:
    head = fused.LinearCrossEntropy(8, 5, reduction="none")
    loss = head(torch.randn(3, 8), torch.tensor([0, 2**32, 2**32 - 100]))
    assert loss.isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_norm_that_is_told_no_epsilon_has_torchs(dtype: torch.dtype) -> None:
    """That of f32 for 16 bits: with bf16's own, 0.0078, rows of small elements were half as large."""
    norm, x = nn.RMSNorm(16, dtype=dtype), 0.05 * torch.randn(4, 16, dtype=dtype)
    with torch.no_grad():
        for made in (fused.Fused(norm), fused.fuse(norm, x), torch.compile(norm, backend="fuseplan")):
            torch.testing.assert_close(made(x), norm(x))

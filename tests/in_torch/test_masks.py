"""Masks of attention that no input decides: left out, a flag, or kept as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import fuseplan.torch
from fuseplan.torch.dynamo import compile_graph
from fuseplan.torch.intact import SDPA, arguments_of

Q, K = 5, 5
HEADS = (2, 2, Q, 8)
LEAST = torch.finfo(torch.float32).min


def places(queries: int = Q, keys: int = K) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(queries)[:, None], torch.arange(keys)[None]


def nothing(_: torch.Tensor) -> torch.Tensor:
    return (places()[1] >= 0).expand(2, 1, Q, K)


def zeros(_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(Q, K)


def causal(_: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return (keys <= queries)[None, None].expand(2, 1, Q, K)


def added(_: torch.Tensor) -> torch.Tensor:
    return torch.full((Q, K), LEAST).triu(1)


def by_where(_: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return torch.where(keys <= queries, 0.0, -torch.inf)


def but_for_one(_: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return (keys <= queries) | ((queries == 1) & (keys == 2))


def window(_: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return (keys <= queries) & (keys > queries - 3)


def slope(_: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return torch.where(keys <= queries, -0.5 * (queries - keys), -torch.inf)


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    queries, keys = places()
    return (keys <= queries) & (x[0, 0, 0, 0] < 9)


class Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = nn.functional.scaled_dot_product_attention(
            x, x + 1, x * 2, attn_mask=self.mask(x), scale=0.3
        )
        return made


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (nothing, "scale=0.3)"),
        (zeros, "scale=0.3)"),
        (causal, "is_causal=True, scale=0.3)"),
        (added, "is_causal=True, scale=0.3)"),
        (by_where, "is_causal=True, scale=0.3)"),
        (but_for_one, "mask"),
        (window, "mask"),
        (slope, "mask"),
        (of_an_input, "mask"),
    ],
)
def test_a_mask_of_constants_is_read(mask: Callable[[torch.Tensor], torch.Tensor], written: str) -> None:
    torch.manual_seed(3)
    module, x = Attention(mask), torch.randn(HEADS)
    fused = fuseplan.torch.fuse(module, x)
    plans = [str(site.plan) for site in fused.fusion.cut.sites if "attention" in str(site.plan)]
    assert len(plans) == 1
    assert written in plans[0].replace("bias", "mask")
    torch.testing.assert_close(fused(x), module(x), rtol=1e-5, atol=1e-6)
    assert ("arange" in str(fused.report.operators)) == (written == "mask")


def test_masks_of_other_lengths_stay() -> None:
    """Torch's flag counts from the first key, and such a mask may count from the last."""

    class Cross(nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            queries, keys = places(3, K)
            attend = nn.functional.scaled_dot_product_attention
            made: torch.Tensor = attend(x[:, :, :3], x, x, attn_mask=keys <= queries + 2)
            return made

    x = torch.randn(HEADS)
    fused = fuseplan.torch.fuse(Cross(), x)
    torch.testing.assert_close(fused(x), Cross()(x), rtol=1e-5, atol=1e-6)
    assert "is_causal" not in str([site.plan for site in fused.fusion.cut.sites])


class Filled(nn.Module):  # type: ignore[misc]
    """Attention written out, whose scores are filled where a mask says so."""

    def __init__(self, fill: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.fill(q @ k.transpose(-2, -1) / 4, mask).softmax(-1) @ v


FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "masked_fill": lambda scores, mask: scores.masked_fill(mask == 0, -torch.inf),
    "masked_fill of bool": lambda scores, mask: scores.masked_fill(~mask.bool(), -torch.inf),
    "where": lambda scores, mask: torch.where(mask.bool(), scores, -torch.inf),
    "where, turned": lambda scores, mask: torch.where(mask == 0, -torch.inf, scores),
}


@pytest.mark.part(2)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("shape", "axes"), [((2, 1, 1, Q), "bt"), ((2, 1, Q, Q), "bst"), ((Q, Q), "st")])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_scores_that_are_filled_with_minus_infinity(
    fill: str, shape: tuple[int, ...], axes: str, is_compiled: bool
) -> None:
    """NaN of a hidden key stays hidden; that of a query without a key is torch's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(HEADS) for _ in range(3))
    mask = torch.rand(shape).gt(0.4).int()
    mask.view(-1, Q)[0] = 0
    mask[..., -1] = 0
    k[:, :, -1] = torch.nan
    module = Filled(FILLS[fill]).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        if is_compiled:
            made = torch.compile(module, backend="fuseplan")(q, k, v, mask)
        else:
            fused = fuseplan.torch.fuse(module, q, k, v, mask)
            made = fused(q, k, v, mask)
            (site,) = fused.report.sites
            assert str(site.plan).endswith(f"attention(scale=0.25, mask_axes={axes}, nan_unseen=True)")
        torch.testing.assert_close(made, module(q, k, v, mask), equal_nan=True)


LOWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "the lowest number": lambda scores, mask: scores.masked_fill(mask == 0, LEAST),
    "-1e9": lambda scores, mask: scores.masked_fill(mask == 0, -1e9),
    "where": lambda scores, mask: torch.where(mask.bool(), scores, LEAST),
    "where, turned": lambda scores, mask: torch.where(mask == 0, -1e9, scores),
}


@pytest.mark.parametrize("fill", LOWS)
def test_scores_that_are_filled_with_low_numbers(fill: str) -> None:
    """A query without a key has the mean of the values then, as far apart as its scores are."""
    torch.manual_seed(0)
    module = Filled(LOWS[fill]).eval()
    q, k, v = (torch.randn(HEADS) * 100 for _ in range(3))
    mask = torch.rand(2, 1, Q, Q).gt(0.4).int()
    mask[0, 0, 1] = 0
    with torch.no_grad():
        fused = fuseplan.torch.fuse(module, q, k, v, mask)
        (site,) = fused.report.sites
        assert "attention(scale=0.25, bias_axes=bst" in str(site.plan)
        torch.testing.assert_close(fused(q, k, v, mask), module(q, k, v, mask))
        torch.testing.assert_close(fused(q, k, v, mask)[0, :, 1], v[0].mean(1))


OTHER_FILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a number that scores may have": lambda scores, mask: scores.masked_fill(mask == 0, -1e4),
    "scores that are as low": lambda scores, mask: (scores + mask * LEAST).masked_fill(mask == 0, -1e9),
}


@pytest.mark.parametrize("fill", OTHER_FILLS)
def test_other_fills_stay(fill: str) -> None:
    module = Filled(OTHER_FILLS[fill]).eval()
    q, k, v = (torch.randn(HEADS) for _ in range(3))
    mask = torch.ones(Q, Q)
    mask[1] = 0
    fused = fuseplan.torch.fuse(module, q, k, v, mask)
    assert not any("attention" in str(site.plan) for site in fused.report.sites)
    torch.testing.assert_close(fused(q, k, v, mask), module(q, k, v, mask))


def written(_: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask[1, 2] = False
    return mask


def written_through_a_view(_: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask[1:].t()[2].fill_(False)
    return mask


def joined_in_place(_: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask &= places()[0] > 0
    return mask


def drawn(_: torch.Tensor) -> torch.Tensor:
    return torch.rand(Q, K) < 2


@pytest.mark.parametrize(
    ("mask", "stays", "is_causal"),
    [
        *((each, False, False) for each in (nothing, zeros)),
        *((each, False, True) for each in (causal, added, by_where)),
        *((each, True, False) for each in (but_for_one, window, slope, of_an_input)),
        *((each, True, False) for each in (written, written_through_a_view, joined_in_place, drawn)),
    ],
)
def test_a_mask_of_a_training_step(
    mask: Callable[[torch.Tensor], torch.Tensor],
    stays: bool,
    is_causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[fx.GraphModule] = []
    monkeypatch.setattr("fuseplan.torch.dynamo.join_losses", lambda given, _: found.append(given))
    torch.manual_seed(3)
    module, x = Attention(mask), torch.randn(HEADS, requires_grad=True)
    torch._dynamo.reset()
    made = torch.compile(module, backend=compile_graph)(x)
    (node,) = found[0].graph.find_nodes(op="call_function", target=SDPA)
    told = arguments_of(node)
    assert told is not None
    assert (told["attn_mask"] is not None, told["is_causal"]) == (stays, is_causal)
    want = module(x)
    torch.testing.assert_close(made, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    for each in zip(*(torch.autograd.grad(out.square().sum(), x) for out in (made, want)), strict=True):
        torch.testing.assert_close(*each, rtol=1e-4, atol=1e-5, equal_nan=True)

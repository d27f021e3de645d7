"""FlexAttention: functions of scores and masks as formulas of attention, and those that stay torch's."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import fuseplan.torch
from fuseplan.torch.exporting import exported
from fuseplan.torch.flexible import FLEX, READ

KEYS = 150  # two blocks of a mask
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
Function = Callable[..., Any]


def alibi(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return score - 2.0 ** (-2 * (h + 1.0)) * (s - t)


def capped(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return 20 * torch.tanh(score / 20)


def same(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return torch.where(
        (s == t) | ~(s > 20), score.clamp(-1, 1).relu(), score.sigmoid() * torch.exp(-abs(s - t))
    )


def captured(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return score - SLOPES[h] * (s - t)


def odd(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return torch.where((s & 1) == (t & 1), score, score - 1)


def halves(score: Any, b: Any, h: Any, s: Any, t: Any) -> Any:
    return score + (s - t) // 2


def causal(b: Any, h: Any, s: Any, t: Any) -> Any:
    return s >= t


def sliding(b: Any, h: Any, s: Any, t: Any) -> Any:
    return (s >= t) & (s - t <= 19)


def near(b: Any, h: Any, s: Any, t: Any) -> Any:
    return abs(s - t) < 30


def prefix(b: Any, h: Any, s: Any, t: Any) -> Any:
    return (s >= t) | (t < 7)


def none(b: Any, h: Any, s: Any, t: Any) -> Any:
    return (t < 100) & (s > 3)


def blocks(function: Function) -> BlockMask:
    return create_block_mask(function, None, None, KEYS, KEYS, device="cpu")


class Model(nn.Module):  # type: ignore[misc]
    """Attention with grouped heads, behind one product, by several pairs of functions."""

    def __init__(self, *pairs: tuple[Function | None, BlockMask | Function | None]) -> None:
        super().__init__()
        self.pairs, self.qkv = pairs, nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> list[Any]:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 8, 8).permute(0, 2, 1, 3).split((4, 2, 2), 1)
        made = []
        for score, mask in self.pairs:
            if callable(mask):
                mask = create_block_mask(mask, None, None, t, t, device="cpu")  # noqa: PLW2901 - in the call
            made.append(flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True))
        return made


def drawn() -> torch.Tensor:
    return torch.randn(2, KEYS, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch's own: it is not compiled
        yield


READ_AS = {  # what the plan has
    "attention(key_heads=2)": (None, None),
    'attention(key_heads=2, score="x - 2 ** ((index(h) + 1) *': (alibi, None),
    "where(index(s) >= index(t), where(index(t) >= index(s)": (same, None),
    "is_causal=True, key_heads=2, score": (capped, blocks(causal)),
    "is_causal=True, key_heads=2, window=20)": (None, blocks(sliding)),
    "attention(key_heads=2, window=30)": (None, blocks(near)),
    "> 0, x, -inf)": (None, blocks(prefix)),
    "tanh(x / 20) * 20, -inf)": (capped, blocks(none)),
    "is_causal=True, key_heads=2, window=20, score": (alibi, sliding),
}
ODD_BLOCKS = BlockMask.from_kv_blocks(
    torch.ones(1, 1, 2, dtype=torch.int32),
    torch.zeros(1, 1, 2, 2, dtype=torch.int32),
    BLOCK_SIZE=128,
    seq_lengths=(KEYS, KEYS),
)
LEFT = {  # what is told
    "a score_mod or mask_mod that reads tensors": (captured, None),
    "aten.__and__.Scalar in a function": (odd, None),
    "aten.floor_divide.default in a function": (halves, None),
    "a block mask that hides other keys": (None, ODD_BLOCKS),
}


def test_functions_are_formulas_of_attention() -> None:
    model, x = Model(*READ_AS.values()).eval(), drawn()
    fused = fuseplan.torch.fuse(model, x)
    plans = [str(site.plan) for site in fused.report.sites]
    for fields in READ_AS:
        assert sum(fields in plan for plan in plans) == 1, fields
    assert not fused.report.left
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


def test_others_stay_torchs_with_the_reason() -> None:
    model, x = Model(*LEFT.values()).eval(), drawn()
    fused = fuseplan.torch.fuse(model, x)
    assert not any("attention" in str(site.plan) for site in fused.report.sites)
    assert "flex_attention_3" in str(fused.report)
    nodes = exported(model, (x,), {}).graph.graph.find_nodes(op="call_function", target=FLEX)
    for node, says in zip(nodes, LEFT, strict=True):
        assert says in node.meta["left"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


def test_a_backend_reads_them() -> None:
    model, x = Model((alibi, None)).eval(), drawn()
    with torch.no_grad():
        compiled = torch.compile(model, backend="fuseplan")
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [("x * index(h)", True, 0), ("", False, 5), ("where(index(t) > 3, -inf, x)", True, 2)]
)
def test_the_operator_is_one_of_torchs(dtype: torch.dtype, fields: tuple[str, bool, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 9, 6, generator=generator).to(dtype).transpose(2, 3) for _ in range(3))
    torch.library.opcheck(READ, (q, k[:, :2], v[:, :2, :, :3], *fields, 0.5))

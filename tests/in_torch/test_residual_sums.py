"""The sums of a pre-norm model's blocks, which a norm and the next sum read: products compute them."""

import torch
from torch import nn

import fuseplan.torch as fused

LAYERS, WIDE, HEADS = 3, 32, 2


class Block(nn.Module):  # type: ignore[misc]
    """A block as GPT-2 has it: attention and a feed-forward part, each between a norm and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDE), nn.LayerNorm(WIDE)
        self.packed, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        images, rows, _ = src.shape
        parts = self.packed(self.first(src)).view(images, rows, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        made = nn.functional.scaled_dot_product_attention(*parts.unbind(), is_causal=True)
        src = src + self.out(made.transpose(1, 2).reshape(images, rows, WIDE))
        return src + self.down(nn.functional.gelu(self.up(self.second(src))))


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDE), nn.Embedding(16, WIDE)
        self.blocks, self.last = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDE)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        return self.last(self.blocks(self.words(words) + self.places(places)))


def test_every_sum_in_front_of_a_norm_is_in_another_kernel() -> None:
    """Two sums a block, and that of words and places in front: a norm and a sum read each but the last."""
    torch.manual_seed(0)
    model, src = Model().eval(), torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        made = fused.fuse(model, src)
        torch.testing.assert_close(made(src), model(src))
    words = [[op.name for op in site.plan.ops] for site in made.fusion.cut.sites]
    summing = [each for each in words if {"add", "add_along"} & {*each}]
    assert sorted(each[0] for each in summing) == ["embedding", *["linear"] * 2 * LAYERS]
    assert all(len(each) > 1 for each in summing)
    assert [each for each in words if "layer_norm" in each] == [["layer_norm"]] * (2 * LAYERS + 1)
    assert not made.report.left

"""Parts of tensors that a graph replaces: what torch gives, without copies of memory around them."""

import pytest
import torch
from torch import nn

import fuseplan.torch as fused


class Rows(nn.Module):  # type: ignore[misc]
    """Rows that each take from those before them, as linear attentions solve a triangle; and other parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.relu(self.linear(src))
        first = x.clone()
        for row in range(1, 6):
            new = first[:, row, :row] + first[:, row - 1, :1]
            first[:, row, :row] = new
        wide = x[:, :1].expand(-1, 16, -1).clone()
        wide[:, 2:9:3] = first[:, 2:9:3]
        wide.diagonal(dim1=1, dim2=2).copy_(x[:, 0])
        return first, wide + x, first[:, 3] * 2


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_are_replaced_as_torch_does(rows: int) -> None:
    torch.manual_seed(0)
    module, src = Rows().eval(), torch.randn(rows, 16, 16)
    with torch.no_grad():
        whole = fused.fuse(module, src)
        for _ in range(2):
            for got, want in zip(whole(src), module(src), strict=True):
                torch.testing.assert_close(got, want)
                assert got.stride() == want.stride()
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in whole(src)[:2])


def test_a_tensor_that_is_read_later_stays() -> None:
    class Both(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = torch.relu(src * 2)
            one = torch.select_scatter(x, x[1], 0, 0)
            other = torch.select_scatter(one, x[2], 0, 1)
            last = torch.slice_scatter(other, one[:1], 0, 2, 3)
            return one, other, last.sum(0) + x[0]

    src = torch.randn(4, 8)
    with torch.no_grad():
        whole, want = fused.fuse(Both(), src), Both()(src)
        for _ in range(2):
            for got, right in zip(whole(src), want, strict=True):
                torch.testing.assert_close(got, right)


def test_a_chain_writes_into_one_tensor() -> None:
    class Chain(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            x = torch.relu(src * 2)
            for row in range(3):
                x = torch.select_scatter(x, src[row + 1], 0, row)
            return x

    src = torch.randn(4, 8)
    with torch.no_grad():
        whole = fused.fuse(Chain(), src)
        torch.testing.assert_close(whole(src), Chain()(src))
    assert len(whole.fusion._planned._lives.renewed) == 2

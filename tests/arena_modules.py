"""Modules whose values lie in arenas, and an operator that no plan computes."""

from collections.abc import Callable

import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.torch.arenas import Arenas

F = nn.functional
SHAPE = (2, 6, 8, 8)
waits: Callable[[], object] = int  # what the operator between plans does


@torch.library.custom_op("fuseplan_tests::between", mutates_args=())  # type: ignore[untyped-decorator]
def between(src: torch.Tensor) -> torch.Tensor:
    """An operator that no plan computes."""
    waits()
    return src.flip(0)


@between.register_fake  # type: ignore[untyped-decorator]
def _(src: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(src)


class Long(nn.Module):  # type: ignore[misc]
    """Values that live long and shortly, views of them, an operator of torch's, a result that is read too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.more = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.last, self.head = nn.Conv2d(8, 8, 1), nn.Linear(64, 8)
        self.norm.running_mean.normal_()

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = out = self.norm(self.first(src)).relu()
        for each in self.more:
            out = F.relu(each(out))
        turned = between(out)
        out = self.last(turned) + begin
        rows = self.head(out.flatten(2))
        return rows.transpose(1, 2), F.gelu(rows), out.cumprod(1) + turned


class Joining(nn.Module):  # type: ignore[misc]
    """Joins of results that nothing else reads, or something does; of torch's, of a join; one that leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(6, 8, 1)
        self.parts = nn.ModuleList([nn.Conv2d(8, 4 * (1 + place), 1) for place in range(4)])
        self.next, self.head = nn.Conv2d(20, 8, 3, padding=1), nn.Conv2d(52, 8, 1)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stem = F.relu(self.stem(src))
        one, two, three, four = (F.relu(each(stem)) for each in self.parts)
        own = torch.cat([one, four], -3)
        more = torch.cat([self.next(own).relu(), two, three, F.max_pool2d(stem, 3, 1, 1)], 1)
        last = torch.cat([more, more[:, :8].relu(), between(stem)], 1)
        return self.head(last), two + 1, torch.cat([F.relu(self.next(own)), stem], 1)


def close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Compares results."""
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def made() -> tuple[nn.Module, nn.Module, Arenas]:
    """A module, the same fused, and its arenas."""
    module = Long().eval()
    whole = fused.fuse(module, torch.randn(SHAPE))
    assert isinstance(whole.fusion._planned, Arenas)
    return module, whole, whole.fusion._planned

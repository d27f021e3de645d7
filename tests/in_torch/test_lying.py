"""Values that lie otherwise than a plan has them, and values that torch has no name for."""

import torch
from torch import nn

import fuseplan.torch as fused

F = nn.functional


class Lying(nn.Module):  # type: ignore[misc]
    """A product of rows behind a value that lies as the input does, which has another reader."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        src = src.clamp(-1, 2)
        return src, self.linear(src)


def test_a_value_lies_as_each_call_has_it() -> None:
    module, last = Lying(), torch.channels_last
    src, other = torch.randn(2, 2, 3, 8, 6)
    for example, given in ((src.to(memory_format=last), other), (src, other.to(memory_format=last))):
        made = fused.fuse(module, example)
        for each in (example, given):
            with torch.no_grad():
                torch.testing.assert_close(made(each), module(each))


class Split(nn.Module):  # type: ignore[misc]
    """A product whose value in front of its bias would be a plan's: torch has no name for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(16, 16)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.linear(self.conv(src).abs())
        return made.unsqueeze(0).expand(2, 1, 6, 16).reshape(2, 6, 16), F.log_softmax(made, 0)


def test_plans_read_values_that_torch_has() -> None:
    module, src = Split(), torch.randn(1, 4, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused.fuse(module, src)(src), module(src))


def test_elements_may_share_memory() -> None:
    module, dense = nn.Sequential(nn.Softmax(0), nn.GELU()), torch.randn(3, 5, 8)
    shared = torch.randn(100).as_strided((3, 5, 8), (10, 4, 1))
    for example, given in ((shared, dense), (dense, shared)):
        made = fused.fuse(module, example)
        for each in (example, given, example[:1].expand(3, 5, 8)):
            with torch.no_grad():
                torch.testing.assert_close(made(each), module(each))

"""Modules with a torch.autograd.Function: its gradient is not the derivative of what it computes."""

from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch


class Round(torch.autograd.Function):  # type: ignore[misc]
    """Rounds, and hands gradients on as if it had not."""

    @staticmethod
    def forward(ctx: Any, src: torch.Tensor) -> torch.Tensor:
        return src.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Rounded(nn.Module):  # type: ignore[misc]
    """A linear layer, rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.relu(Round.apply(self.linear(src)))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_calls_that_need_such_a_gradient_run_as_torch_does(is_recorded: bool) -> None:
    module, src = Rounded(), torch.randn(4, 8)
    with torch.set_grad_enabled(is_recorded):  # without, the export sees no gradient
        made = fuseplan.torch.fuse(module, src)
    want = torch.autograd.grad(module(src).sum(), module.linear.weight)[0]
    assert want.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(made(src), module(src))  # fused, and without a warning
    with pytest.warns(UserWarning, match=r"gradients of its own, by torch.autograd.Function \(Round\)"):
        out = made(src)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), module.linear.weight)[0], want)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of torch's tracer
def test_under_torch_compile_the_gradient_is_the_functions() -> None:
    module, src = Rounded(), torch.randn(4, 8)
    want = torch.autograd.grad(module(src).sum(), module.linear.weight)[0]
    compiled = torch.compile(module, backend="fuseplan")
    torch.testing.assert_close(torch.autograd.grad(compiled(src).sum(), module.linear.weight)[0], want)

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


TRACED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch


@TRACED
@pytest.mark.parametrize("is_recorded", [True, False])
def test_calls_that_need_such_a_gradient_run_as_torch_does(is_recorded: bool) -> None:
    module, src = Rounded(), torch.randn(4, 8)
    with torch.set_grad_enabled(is_recorded):  # without, the export sees no gradient
        made = fuseplan.torch.fuse(module, src)
    want = torch.autograd.grad(module(src).sum(), module.linear.weight)[0]
    assert want.abs().sum() > 0
    with torch.no_grad():
        torch.testing.assert_close(made(src), module(src))  # fused, and without a warning
    for called in (made, made, torch.compile(made, backend="eager")):
        found = torch.autograd.grad(called(src).sum(), module.linear.weight)[0]
        torch.testing.assert_close(found, want)


@TRACED
def test_under_torch_compile_the_gradient_is_the_functions() -> None:
    module, src = Rounded(), torch.randn(4, 8)
    want = torch.autograd.grad(module(src).sum(), module.linear.weight)[0]
    compiled = torch.compile(module, backend="fuseplan")
    torch.testing.assert_close(torch.autograd.grad(compiled(src).sum(), module.linear.weight)[0], want)


class Split(nn.Module):  # type: ignore[misc]
    """A result that has a gradient, and one that has none."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.relu(self.first(self.dropout(src)))
        return torch.tanh(self.last(made)), made.detach() * 2


def _runs(module: nn.Module, src: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    """How often plans computed a call, and its results."""
    calls: list[int] = []
    planned = module.fusion._planned

    def counted(*given: Any) -> Any:
        calls.append(1)
        return planned(*given)

    monkeypatch.setattr(module.fusion, "_planned", counted)
    made = module(src)
    monkeypatch.undo()
    return len(calls), made


def test_calls_that_record_gradients_have_plans_until_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass computes the module again: training steps with plans would take longer than torch's."""
    module, src = Split(), torch.randn(4, 8, requires_grad=True)
    whole = fuseplan.torch.fuse(module, src)
    counts = []
    for _ in range(3):
        count, made = _runs(whole, src, monkeypatch)
        torch.testing.assert_close(made, module(src))
        assert [each.requires_grad for each in made] == [True, False]
        counts.append(count)
    assert counts == [0, 1, 1]
    tensors = (src, *module.parameters())
    (want, *_), (got, *_) = (torch.autograd.grad(each[0].sum(), tensors, create_graph=True)
                             for each in (module(src), made))  # fmt: skip
    torch.testing.assert_close(got, want)
    twice = [torch.autograd.grad(each.square().sum(), module.last.weight)[0] for each in (got, want)]
    torch.testing.assert_close(*twice)
    assert _runs(whole, src, monkeypatch)[0] == 0
    with torch.no_grad():
        assert _runs(whole, src, monkeypatch)[0] == 1


def test_random_numbers_are_not_drawn_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    module, src = Split(0.5), torch.randn(4, 8, requires_grad=True)
    whole = fuseplan.torch.fuse(module, src)
    for _ in range(3):
        count, (made, _) = _runs(whole, src, monkeypatch)
        assert count == 0
        grads = torch.autograd.grad(made.sum(), (src, whole.first.weight))
        dropped = (grads[0] == 0).all(0) & (src != 0).all(0)
        assert (grads[0] == 0).sum() >= dropped.sum()

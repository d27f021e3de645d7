"""Modules that write into tensors and into parts of them, exported: values, gradients, memory and order."""

import copy

import torch
from torch import nn

import fuseplan.torch as fused


class Written(nn.Module):  # type: ignore[misc]
    """A layer of what an in-place operator writes into a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        inner = src.clone()
        inner[:, :1] += 1
        return self.linear(inner)


def test_gradients_through_a_part_that_is_written_in_place() -> None:
    module, src = Written(), torch.randn(3, 4, 6, requires_grad=True)
    whole, wanted = fused.fuse(module, src), copy.deepcopy(module).double()
    found = []
    for call, value in ((whole, src), (wanted, src.detach().double().requires_grad_())):
        made = call(value)
        sources = [value, call.linear.weight, call.linear.bias]
        found.append([made, *torch.autograd.grad((made**2).sum(), sources)])
    for made, right in zip(*found, strict=True):
        torch.testing.assert_close(made.double(), right, rtol=1e-5, atol=1e-5)


class Copied(nn.Module):  # type: ignore[misc]
    """Copies into new memory: of an expanded value, in another order, in another dtype, and of a number."""

    def forward(self, src: torch.Tensor) -> tuple[torch.Tensor, ...]:
        same = torch.empty_like(src).copy_(src)
        wide = src.new_empty(5, 4, 3).copy_(src.mT)
        other = src.new_empty(4, 3, dtype=torch.float64).copy_(src[0].mT)
        return same, wide, other, src.new_empty(()).copy_(src[0, 0, 0])


def test_copies_are_memory_of_their_own_that_lies_as_it_did() -> None:
    module, src = Copied(), torch.randn(1, 3, 4, requires_grad=True)
    whole = fused.fuse(module, src)
    found = []
    for call in (module, whole):
        made = call(src)
        assert all(each.untyped_storage()._cdata != src.untyped_storage()._cdata for each in made)
        (grad,) = torch.autograd.grad(sum((each**2).sum() for each in made), src)
        found.append([*made, grad])
    for own, right in zip(*found, strict=True):
        assert own.stride() == right.stride()
        torch.testing.assert_close(own, right)

"""Tensors that are no parameters: attributes of modules, and weights that other code computes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fuseplan.torch as fused


def _same(made: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(made, want, atol=1e-5, rtol=1e-4)


class Shifted(nn.Module):  # type: ignore[misc]
    """A layer with a tensor as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 5), torch.randn(5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(src)) + self.shift


def test_a_tensor_in_an_attribute_is_read_by_each_call() -> None:
    module, src = nn.Sequential(Shifted(), nn.ReLU()).eval(), torch.randn(4, 6)
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert made.report.sites
        twin = copy.deepcopy(made)
        for change in (torch.randn_like, lambda old: old.mul_(2), lambda old: old):
            module[0].shift = change(module[0].shift)
            _same(made(src), module(src))
        twin[0].shift = module[0].shift + 1
        _same(twin(src), torch.relu(torch.relu(module[0].layer(src)) + twin[0].shift))
        module[0].shift = torch.randn(1)
        with pytest.warns(UserWarning, match="other tensors"):
            outcome = made(src)
        _same(outcome, module(src))


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_a_weight_that_a_hook_computes_is_read_by_each_call() -> None:
    """The hook of the fused module itself runs outside of the graph, and writes the attribute `weight`."""
    module, src = nn.utils.weight_norm(nn.Linear(6, 5)).eval(), torch.randn(4, 6)
    with torch.no_grad():
        made = fused.fuse(module, src)
        for _ in range(3):
            module.weight_g.mul_(1.5)
            _same(made(src), module(src))


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_parametrized_module_is_fused(normed: Callable[[nn.Module], nn.Module]) -> None:
    """Torch's own copy of such a module is an error."""
    module, src = normed(nn.Linear(6, 5)).eval(), torch.randn(4, 6)
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert list(made.state_dict()) == list(module.state_dict())
        _same(made(src), module(src))
        for each in module.parameters():
            each.mul_(1.5)
        _same(made(src), module(src))
        _same(copy.deepcopy(made)(src), module(src))

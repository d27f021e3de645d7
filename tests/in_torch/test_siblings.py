"""Products of a backward pass that become one: where fewer bytes are moved, with the gradients of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fuseplan.torch import siblings

aten = torch.ops.aten
ROWS, CHANNELS = 96, 16


class Layers(nn.Module):  # type: ignore[misc]
    """Linear layers of one input, whose results a function makes one."""

    def __init__(self, made: Callable[..., torch.Tensor], *features: int, bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(CHANNELS, each, bias) for each in features)
        self.last, self.made = nn.Linear(sum(features), 4), made

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        src = src.sin()
        return self.last(self.made(src, *(each(src) for each in self.layers)))


def joined(_: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """Each result is read by an elementwise operator."""
    return torch.cat([each.tanh() for each in parts], -1)


def times_the_input(src: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
    """The input's gradient has another term, which comes first."""
    return joined(src, *parts) * src.mean(-1, keepdim=True)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The products of each backward pass, before and behind."""
    found: list[tuple[int, int]] = []
    join = siblings.join_siblings

    def kept(graph: fx.GraphModule) -> None:
        before = len(graph.graph.find_nodes(op="call_function", target=aten.mm.default))
        join(graph)
        graph.graph.lint()
        behind = len(graph.graph.find_nodes(op="call_function", target=aten.mm.default))
        found.append((before, behind))

    monkeypatch.setattr("fuseplan.torch.dynamo.join_siblings", kept)
    return found


def check(module: nn.Module, src: torch.Tensor, **how: Any) -> None:
    """Its gradients are those in float64."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="fuseplan", options={"rest": "inductor"}, dynamic=False)
    wanted = list(module.parameters())
    made = torch.autograd.grad(compiled(src).square().sum(), [src, *wanted])
    exact = module.double()(src.double()).square().sum()
    for one, other in zip(made, torch.autograd.grad(exact, [src, *module.parameters()]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize("shape", [(ROWS, CHANNELS), (4, ROWS // 4, CHANNELS)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_an_input_are_one_product(
    shape: tuple[int, ...], bias: bool, counts: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    check(Layers(joined, 8, 4, 12, bias=bias), torch.randn(shape, requires_grad=True))
    assert counts == [(2 * 3 + 2, 2 + 2)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("made", "rows", "features"),
    [
        (times_the_input, ROWS, (8, 4, 12)),  # another term
        (joined, 8, (8, 4, 12)),  # the copies of weights are longer
        (joined, ROWS, (8,)),  # one product
    ],
)
def test_other_sums_stay(
    made: Callable[..., torch.Tensor], rows: int, features: tuple[int, ...], counts: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    check(Layers(made, *features), torch.randn(rows, CHANNELS, requires_grad=True))
    ((before, behind),) = counts
    assert before == behind

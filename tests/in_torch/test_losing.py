"""Plans that would make a CPU's calls slower are left to torch, one by one or all of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from fuseplan.graph.why import Why
from fuseplan.torch import passes
from fuseplan.torch.cutting import Fusion
from fuseplan.torch.passes import Passes

pytestmark = pytest.mark.usefixtures("estimated")


class Cell(nn.Module):  # type: ignore[misc]
    """Steps of a recurrence: small products, and arithmetic of their parts."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.inner = steps, nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            gate, value = self.inner(x).chunk(2, -1)
            x = torch.sigmoid(gate) * x + torch.tanh(value)
        return x


class Deep(nn.Module):  # type: ignore[misc]
    """Convolutions whose plans save much."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture
def fusions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fusion]]:
    """The passes of graphs, as reports are told them."""
    told: list[Fusion] = []
    tell: Callable[..., None] = passes.report_of
    monkeypatch.setattr(passes, "report_of", lambda made, device: (told.append(made), tell(made, device))[1])
    monkeypatch.setattr(passes, "trace", lambda report: report())
    yield told
    torch._dynamo.reset()


def stepped(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a step, which are compared with torch's."""
    torch._dynamo.reset()
    run = torch.compile(module, backend="fuseplan")
    made, want = (
        torch.autograd.grad(each(x).square().sum(), [*module.parameters()]) for each in (run, module)
    )
    for one, other in zip(made, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return [*made]


def reasons(fusions: list[Fusion]) -> set[Why]:
    return {reason.why for made in fusions for reason in made.cut.left.values()}


def test_a_training_step_of_small_operators_is_torchs(fusions: list[Fusion]) -> None:
    stepped(Cell(4), torch.randn(4, 8))
    assert [each.cut.sites for each in fusions] == [(), ()]
    assert Why.HOST in reasons(fusions)


def test_plans_that_save_more_than_the_compiler_takes_stay(fusions: list[Fusion]) -> None:
    stepped(Deep(), torch.randn(2, 8, 24, 24))
    assert len(fusions) == 2
    assert all(each.cut.sites for each in fusions)


def test_a_small_graph_without_gradients_is_torchs(fusions: list[Fusion]) -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        made = torch.compile(module, backend="fuseplan")(x)
        torch.testing.assert_close(made, module(x))
    assert [each.cut.sites for each in fusions] == [()]
    assert reasons(fusions) == {Why.HOST}


def test_a_backward_pass_that_is_compiled_late_keeps_its_plans(fusions: list[Fusion]) -> None:
    """As of open extents, and by versions of torch that cannot be told: nothing is known of the whole."""
    late = Passes(None, is_printed=False)
    assert late.decided(2) is None
    module, x = Cell(1), torch.randn(4, 8)
    torch._dynamo.mark_dynamic(x, 0)
    made = torch.compile(module, backend="fuseplan")(x).sum()
    made.backward()
    assert module.inner.weight.grad is not None
    assert Why.HOST not in {reason.why for each in fusions[:1] for reason in each.cut.left.values()}

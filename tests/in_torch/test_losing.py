"""Plans that would make a CPU's calls slower are left to torch, one by one or all of a graph."""

from __future__ import annotations

import unittest.mock
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fuseplan.graph.why import Why
from fuseplan.reports.report import Report
from fuseplan.torch import cutting, fuse, gaps, passes
from fuseplan.torch.cutting import Fusion
from fuseplan.torch.passes import Passes
from fuseplan.torch.reporting import report_of

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

    def noted(made: Fusion, device: torch.device) -> Report:
        told.append(made)
        return report_of(made, device)

    monkeypatch.setattr(passes, "report_of", noted)
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
    stepped(Deep(), torch.randn(4, 8, 48, 48))
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


def test_a_fused_module_whose_plans_lose_together_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "saved_by", lambda *_: -1e-6)
    module, x = Cell(2), torch.randn(4, 8)
    with torch.no_grad():
        made = fuse(module, x)
        torch.testing.assert_close(made(x), module(x))
    assert made.fusion.cut.sites == ()
    assert Why.HOST in {reason.why for reason in made.fusion.cut.left.values()}


def test_values_that_are_laid_out_for_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between torch's Fourier transforms, which have channels first, and convolutions on channels last."""
    found: list[float] = []
    count = gaps.saved_by

    def noted(*given: object) -> float:
        found.append(count(*given))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(cutting, "saved_by", noted)
    module = nn.Conv2d(16, 16, 3, padding=1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(module(torch.fft.fft2(x).real) + x).real

    x = torch.randn(2, 16, 24, 24)
    for rate in (5e9, 1e3):
        torch._dynamo.reset()
        monkeypatch.setattr("fuseplan.torch.gaps.LAID_A_SECOND", rate)
        with torch.no_grad():
            made = torch.compile(run, backend="fuseplan")(x)
            torch.testing.assert_close(made, run(x), rtol=1e-3, atol=1e-2)
    assert found[1] < found[0] - 1


class Gates(nn.Module):  # type: ignore[misc]
    """Functions of parts of a value, which lie with gaps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = x.sin().chunk(3, -1)
        return torch.tanh(torch.sigmoid(first) * second + third) + third


def test_values_with_gaps_are_copied_into_memory_that_stays() -> None:
    module, x = Gates(), torch.randn(5, 24)
    with torch.no_grad():
        made = fuse(module, x)
        for _ in range(3):
            made(x)
        assert made.fusion.cut.sites
        with unittest.mock.patch.object(torch, "empty_strided", wraps=torch.empty_strided) as new:
            torch.testing.assert_close(made(2 * x), module(2 * x))
    assert not new.called

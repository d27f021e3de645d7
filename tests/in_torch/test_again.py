"""Operands of plans that come again, or are others in each call: packed once, or in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.execution.run import BoundPlan
from fuseplan.torch import kernels, operator, sites
from fuseplan.torch.sites import Site


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_operands_are_packed_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[object] = []
    bind = kernels.Kernel._bind

    def counted(kernel: kernels.Kernel, given: list[torch.Tensor | None]) -> BoundPlan:
        bound.append(given)
        return bind(kernel, given)

    monkeypatch.setattr(kernels.Kernel, "_bind", counted)
    src, bias = torch.randn(3, 19), torch.randn(9)

    def call(weight: torch.Tensor) -> None:
        _close(fused.run("linear(9) -> bias", src, weight=weight, bias=bias), src @ weight.t() + bias)

    with torch.no_grad():
        for _ in range(4):
            call(torch.randn(9, 19))
        assert len(bound) == 1  # of none
        weight = torch.randn(9, 19)
        for _ in range(3):
            call(weight)
        assert len(bound) == 2
        for count in (2, 2, 3):
            if count == 2:
                weight.mul_(-1.5)
            call(weight)
            assert len(bound) == count


def test_few_calls_in_a_row_of_new_operands_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    src, looks = torch.randn(3, 21), list[object]()
    marks, kernel = kernels.Kernel._marks, kernels.kernel_on("linear(9)", src)

    def counted(kernel: kernels.Kernel, given: list[torch.Tensor]) -> kernels.Marks | None:
        looks.append(given)
        return marks(kernel, given)

    def call(weight: torch.Tensor) -> None:
        _close(fused.run("linear(9)", src, weight=weight), src @ weight.t())

    monkeypatch.setattr(kernels.Kernel, "_marks", counted)
    with torch.no_grad():
        for _ in range(kernels.LOOKS * 4):
            call(torch.randn(9, 21))
        assert len(looks) == kernels.LOOKS + 3
        weight = torch.randn(9, 21)
        for _ in range(kernels.LOOKS * 2):
            call(weight)
            weight.mul_(1)  # as a step of training does
        assert not kernel._packed
        for _ in range(kernels.LOOKS * 2):
            call(weight)
        assert len(kernel._packed) == 1
        looks.clear()
        call(weight.mul_(-1.5))
        assert looks


PRODUCT = "linear(10) -> bias -> relu"


def _product(src: torch.Tensor, given: list[torch.Tensor]) -> torch.Tensor:
    return (src @ given[0].t() + given[1]).relu()


def test_a_site_packs_new_operands_without_further_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    site, src = Site(), torch.randn(5, 23)
    given = [torch.randn(10, 23), torch.randn(10)]
    with torch.no_grad():
        _close(site(PRODUCT, src, given)[0], _product(src, given))
        monkeypatch.delattr(BoundPlan, "_checked")
        monkeypatch.delattr(Site, "_anew")
        changes: tuple[Callable[[], object], ...] = (
            lambda: given[0].mul_(-1.5),  # as a step of training does
            lambda: given.__setitem__(0, torch.randn(10, 23)),
            lambda: given.__setitem__(0, torch.randn(231)[1:].view(10, 23)),
            lambda: given.__setitem__(1, torch.randn(11)[1:]),
        )
        for change in changes * kernels.LOOKS:
            change()
            src = torch.randn(5, 23)
            _close(site(PRODUCT, src, given)[0], _product(src, given))
        assert site._last is None
        for _ in range(2 * kernels.LOOKS):
            _close(site(PRODUCT, src, given)[0], _product(src, given))
        assert site._last is not None
        given[0].neg_()
        _close(site(PRODUCT, src, given)[0], _product(src, given))
        assert site._last is None


def test_a_site_checks_operands_that_look_otherwise() -> None:
    site, src, bias = Site(), torch.randn(5, 23), torch.randn(10)
    negated = torch._neg_view(torch.randn(10, 23))
    weights = (torch.randn(10, 23), torch.randn(23, 10).t(), negated, torch.randn(10, 46)[:, ::2])
    with torch.no_grad():
        for weight in (*weights, nn.Parameter(torch.randn(10, 23)), *weights):
            for _ in range(2):
                _close(site(PRODUCT, src, [weight, bias])[0], _product(src, [weight, bias]))
        with torch.inference_mode():
            given = [weights[0].clone(), bias.clone()]
            for _ in range(3):
                _close(site(PRODUCT, src, given)[0], _product(src, given))
                given[0].mul_(2)


class Steps(nn.Module):  # type: ignore[misc]
    """A convolution, a norm and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm(16)
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        rows = self.conv(src).relu().flatten(2).mean(-1)
        made: torch.Tensor = self.last(self.first(self.norm(rows)).relu())
        return made


@pytest.mark.parametrize("frozen", [False, True])
def test_steps_are_those_of_torch_and_take_no_detour(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Steps()
    own.first.requires_grad_(not frozen)
    ours = copy.deepcopy(own)
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="fuseplan")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.003, momentum=0.9) for each in (own, ours)]
    for step in range(6):
        if step == 3:
            for module in (operator, sites):  # each call knows its kernel
                monkeypatch.delattr(module, "kernel_on")
            monkeypatch.delattr(BoundPlan, "_checked")
        src = torch.randn(4, 3, 8, 8)
        for model, optimizer in zip((own, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(src).square().sum().backward()
            optimizer.step()
        for one, other in zip(own.parameters(), ours.parameters(), strict=True):
            _close(other, one)

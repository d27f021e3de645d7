"""Whole calls of fused modules beside torch's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.graph import choose, trial
from fuseplan.measure import quiet
from fuseplan.stores import sites
from fuseplan.torch import fusing
from fuseplan.torch.operator import launched
from fuseplan.torch.turns import timed


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resting: None) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})


@pytest.mark.parametrize("is_slower", [True, False])
def test_a_call_that_takes_longer_with_plans_has_none(
    is_slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored measurement counts in the next start, whatever `choose` says."""
    module, src = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval(), torch.randn(3, 8)
    monkeypatch.setattr(trial, "_lost", lambda *_: None)

    def of(key: Any, calls: Any, device: torch.device) -> sites.Measured:
        for each in calls.values():
            torch.testing.assert_close(each(), module(src))
        plans, peer = calls
        seconds = {plans: 2e-6, peer: 1e-6} if is_slower else {plans: 1e-6, peer: 2e-6}
        code = "slower" if is_slower else ""
        return sites.Measured(key, plans, peer, None, 0.0, "2026", None, seconds, code, code and "told so")

    monkeypatch.setattr(fusing, "timed", of)
    made = [fused.fuse(module, src, choose="measured")]
    monkeypatch.setattr(fusing, "timed", None)
    monkeypatch.setattr(choose, "measured", None)
    made += [fused.fuse(module, src, choose=mode) for mode in ("measured", "predicted")]
    for each in made:
        assert bool(each.fusion.cut.sites) != is_slower
        assert ("told so" in str(each.report)) == is_slower
        with torch.no_grad():
            torch.testing.assert_close(each(src), module(src))


class Between(nn.Module):  # type: ignore[misc]
    """Plans around operators of torch's that no plan computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, src: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.first(src)
        larger = torch.maximum(made, other[:1])
        added = torch.tanh(larger - other) + made
        return self.last(torch.cumprod(added, 0)), torch.maximum(added, larger[:1])


def test_operators_of_torchs_write_into_the_arena() -> None:
    module = Between().eval()
    whole = fused.fuse(module, torch.randn(3, 8), torch.randn(3, 8))
    lives = whole.fusion._planned._lives
    assert {node.target._opname for node in lives.written} >= {"maximum"}
    kept = list[tuple[Any, Any]]()
    with torch.no_grad():
        for _ in range(3):
            given = torch.randn(3, 8), torch.randn(3, 8)
            kept.append((whole(*given), module(*given)))
    for got, want in kept:  # no result lies in the arena
        torch.testing.assert_close(got, want)


def test_both_forms_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"plans": lambda: torch.zeros(300, 300) @ torch.zeros(300, 300), "torch": lambda: None}
    made = timed(sites.Key("", "", "", "", ""), calls, torch.device("cpu"))
    assert (made.code, made.peer) == ("slower", "torch")
    assert made.seconds["plans"] > made.seconds["torch"]
    made = timed(sites.Key("", "", "", "", ""), dict(reversed(calls.items())), torch.device("cpu"))
    assert (made.code, made.plan) == ("", "torch")
    monkeypatch.setattr(quiet.HostWatch, "disturbance", lambda self: "others ran")
    made = timed(sites.Key("", "", "", "", ""), calls, torch.device("cpu"))
    assert (made.code, made.disturbance) == ("", "others ran")
    sites.keep(made)
    assert not sites.KEPT.records()


class Gaps(nn.Module):  # type: ignore[misc]
    """A plan that reads a range, with gaps, of what another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, src: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made = self.first(src)
        return self.last(torch.maximum(other, made[:, :8]) * made[:, 8:])


def test_launches_that_lay_an_operand_out_anew_are_bound() -> None:
    module = Gaps().eval()
    whole = fused.fuse(module, torch.randn(3, 8), torch.randn(3, 8))
    lives = whole.fusion._planned._lives
    launches = whole.fusion._graph.graph.find_nodes(op="call_function", target=launched)
    assert lives.bound == {*launches}
    with torch.no_grad():
        for _ in range(3):
            given = torch.randn(3, 8), torch.randn(3, 8)
            torch.testing.assert_close(whole(*given), module(*given))

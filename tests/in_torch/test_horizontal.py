"""Projections of one input as one launch: the weights stay the module's own, with other sizes and biases."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import fuseplan.torch
from fuseplan.stores import sites


class Heads(nn.Module):  # type: ignore[misc]
    """Self-attention of 4 heads of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        heads = (each(src).unflatten(2, (4, 8)).transpose(1, 2) for each in layers)
        made: torch.Tensor = functional.scaled_dot_product_attention(*heads)
        return made.transpose(1, 2).flatten(2)


class Turned(nn.Module):  # type: ignore[misc]
    """As a Llama's: queries of 4 heads, keys and values of 2, positions as angles of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, size, bias=False) for size in (32, 16, 16))
        angles = torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 2)
        self.cos, self.sin = nn.Buffer(angles.cos()[None, None]), nn.Buffer(angles.sin()[None, None])

    def turned(self, x: torch.Tensor, *, is_back: bool = False) -> torch.Tensor:
        halves = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * self.cos - halves * self.sin if is_back else x * self.cos + halves * self.sin

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (each(src).unflatten(2, (-1, 8)).transpose(1, 2) for each in layers)
        made: torch.Tensor = functional.scaled_dot_product_attention(
            self.turned(query), self.turned(key), value, enable_gqa=True
        )
        return made.transpose(1, 2).flatten(2)


class Branches(nn.Module):  # type: ignore[misc]
    """Convolutions of 4 and 6 channels on one image, which others read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 6, 1)
        self.after_one, self.after_two = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(6, 5, 3, padding=1)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        one, two = self.one(src).relu(), self.two(src).relu()
        return self.after_one(one) + self.after_two(two)


def close(module: nn.Module, whole: nn.Module, src: torch.Tensor) -> None:
    """The fused module is near its meaning in float64."""
    want = copy.deepcopy(module).double()(src.double()).detach()
    assert float((whole(src).detach().double() - want).abs().max() / want.abs().max()) <= 2e-6


def test_projections_are_one_launch_with_gradients_and_see_a_weight_that_changes() -> None:
    torch.manual_seed(0)
    module, src = Heads(), torch.randn(2, 32, 32)
    whole = fuseplan.torch.fuse(module, src)
    assert [row.plan for row in whole.report.sites] == [
        "f32[2x32x32] -> linear(96) -> bias",
        "f32[2x4x32x8, strides=3072:8:96:1 of bhsc] -> attention",
    ]
    assert whole.report.launches.after == 2
    assert {row.state for row in whole.report.operators} == {"fused", "view"}
    with torch.no_grad():
        close(module, whole, src)
        module.key.weight.mul_(2)
        close(module, whole, src)  # in memory that is planned, and joined anew
    close(module, whole, src)
    found, wanted = (
        torch.autograd.grad(made(src).square().sum(), [*module.parameters()]) for made in (whole, module)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_projections_are_one_launch_for_open_rows_and_stay_apart_in_training() -> None:
    torch.manual_seed(0)
    module, src = Heads(), torch.randn(3, 32, 32)
    rows = torch.export.Dim("rows", min=2, max=64)
    whole = fuseplan.torch.fuse(module, src, dynamic_shapes={"src": {0: rows}})
    assert [len(site.results) for site in whole.fusion.cut.sites] == [3, 1]
    with torch.no_grad():
        close(module, whole, src)
        close(module, whole, torch.randn(5, 32, 32))
    compiled = torch.compile(module, backend="fuseplan")
    close(module, compiled, src)
    with torch.no_grad():
        close(module, compiled, src)


def test_grouped_heads_with_positions_are_ranges_of_one_launch() -> None:
    """Queries and keys are turned in one launch; attention reads all three where they were left."""
    torch.manual_seed(0)
    module, src = Turned(), torch.randn(3, 12, 32)
    whole = fuseplan.torch.fuse(module, src)
    assert [row.plan for row in whole.report.sites] == [
        "f32[3x12x32] -> linear(64)",
        "f32[3x6x12x8, strides=768:8:64:1 of bhsd] -> rotary(whole=True)",
        "f32[3x4x12x8, strides=576:8:48:1 of bhsc] -> "
        "attention(key_heads=2, key_strides=(576, 8, 48, 1), value_strides=(768, 8, 64, 1))",
    ]
    assert whole.report.launches.after == 3
    with torch.no_grad():
        close(module, whole, src)
        close(module, torch.compile(module, backend="fuseplan"), src)
    found, wanted = (
        torch.autograd.grad(made(src).square().sum(), [*module.parameters()]) for made in (whole, module)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    rows = torch.export.Dim("rows", min=2, max=64)
    whole = fuseplan.torch.fuse(module, src, dynamic_shapes={"src": {0: rows}})
    with torch.no_grad():
        close(module, whole, src)
        close(module, whole, torch.randn(5, 12, 32))


@pytest.mark.usefixtures("resting")
def test_branches_are_checked_and_timed_beside_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    torch.manual_seed(0)
    module, src = Branches().eval(), torch.randn(2, 8, 7, 7)
    found = fuseplan.torch.fuse(module, src).fusion.cut.sites
    assert [len(site.results) for site in found] == [2, 1, 1]
    whole = fuseplan.torch.fuse(module, src, choose="measured")
    cut = whole.fusion.cut
    for site in (*cut.sites, *cut.reverted):
        assert site.measured.code == "slower" or not site.measured.said
        assert site.measured.error <= site.measured.allowed
        assert site.measured.peer_error < 1e-4
    with torch.no_grad():
        close(module, whole, src)


class TurnedApart(Turned):
    """Keys that are turned the other way than queries."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(src).unflatten(2, (-1, 8)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        made: torch.Tensor = functional.scaled_dot_product_attention(
            self.turned(query), self.turned(key, is_back=True), value, enable_gqa=True
        )
        return made.transpose(1, 2).flatten(2)


class Normed(Turned):
    """As a Qwen3's: heads are normalized before they are turned."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.rand(8) + 0.5 for _ in range(2)])

    def normed(self, heads: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = heads.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return scale * wide.to(heads.dtype)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        query, key, value = (each(src).unflatten(2, (-1, 8)) for each in (self.query, self.key, self.value))
        query, key = (
            self.normed(*each).transpose(1, 2) for each in zip((query, key), self.scales, strict=True)
        )
        made: torch.Tensor = functional.scaled_dot_product_attention(
            self.turned(query), self.turned(key), value.transpose(1, 2), enable_gqa=True
        )
        return made.transpose(1, 2).flatten(2)


def test_heads_are_normalized_and_turned_in_one_launch_where_they_lie() -> None:
    torch.manual_seed(0)
    module, src = Normed(), torch.randn(3, 12, 32)
    whole = fuseplan.torch.fuse(module, src)
    behind = "-> rms_norm(affine=False, epsilon=1e-06) -> scale -> rotary(whole=True)"
    assert [row.plan for row in whole.report.sites] == [
        "f32[3x12x32] -> linear(64)",
        f"f32[3x12x4x8, strides=768:64:8:1 of bshd] {behind}",
        f"f32[3x12x2x8, strides=768:64:8:1 of bshd] {behind}",
        "f32[3x4x12x8, bshc of bhsc] -> attention(key_heads=2, value_strides=(768, 8, 64, 1))",
    ]
    assert whole.report.launches.after == 4
    with torch.no_grad():
        close(module, whole, src)
        close(module, torch.compile(module, backend="fuseplan"), src)
    found, wanted = (
        torch.autograd.grad(made(src).square().sum(), [*module.parameters()]) for made in (whole, module)
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class TurnedValues(Turned):
    """Values that are turned, and keys between them and queries that are not."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(src).unflatten(2, (-1, 8)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        made: torch.Tensor = functional.scaled_dot_product_attention(
            self.turned(query), key, self.turned(value), enable_gqa=True
        )
        return made.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", [TurnedApart, TurnedValues])
def test_rotations_that_differ_or_lie_apart_are_two_launches(kind: type[Turned]) -> None:
    torch.manual_seed(0)
    module, src = kind(), torch.randn(3, 12, 32)
    whole = fuseplan.torch.fuse(module, src)
    plans = [row.plan for row in whole.report.sites]
    assert len([plan for plan in plans if "-> rotary(" in plan]) == 2
    with torch.no_grad():
        close(module, whole, src)


@pytest.mark.usefixtures("resting")
def test_rotations_that_are_one_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them beside torch's operators for both, on the values of the example's call."""
    monkeypatch.setenv("FUSEPLAN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sites.KEPT, "unsaved", {})
    torch.manual_seed(0)
    module, src = Turned(), torch.randn(3, 12, 32)
    whole = fuseplan.torch.fuse(module, src, choose="measured")
    cut = whole.fusion.cut
    (rotary,) = (site for site in (*cut.sites, *cut.reverted) if "rotary" in str(site.plan))
    assert len(rotary.results) == 2
    assert rotary.measured.error <= rotary.measured.allowed
    assert rotary.measured.peer_error < 1e-4
    with torch.no_grad():
        close(module, whole, src)


BARE = """
sys.modules["ml_dtypes"] = None  # type: ignore[assignment]
from tests.in_torch.test_horizontal import Heads
module = Heads().to(torch.bfloat16)
print(len(fuseplan.torch.fuse(module, torch.ones(2, 32, 32, dtype=torch.bfloat16)).fusion.cut.sites))
"""


def test_bfloat16_that_numpy_does_not_know() -> None:
    """As in a process where nobody imports ml_dtypes."""
    command = [sys.executable, "-c", f"import sys, torch, fuseplan.torch{BARE}"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.stdout == "2\n", child.stderr

"""Rows of elementwise operators of torch's: one plan each, right for infinities and NaN too."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused

F = nn.functional
SPECIAL = [
    math.inf,
    -math.inf,
    math.nan,
    0.0,
    -0.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    3.0,
    1e-30,
    -1e30,
    0.1,
    -0.1,
    9,
]
ROWS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "max": (lambda x, y, _: torch.max(x, y), "maximum"),
    "min": (lambda x, y, _: torch.min(x, y), "minimum"),
    "minimum": (lambda x, y, z: torch.minimum(x + z, y), "add -> minimum"),
    "multiply": (lambda x, y, _: torch.multiply(x, y), "mul"),
    "true_divide": (lambda x, y, _: torch.true_divide(x, y), "div"),
    "divide": (lambda x, y, z: (x * z) / y, "mul -> div"),
    "divided": (lambda x, y, z: y / (x * z), "mul -> div(turned=True)"),
    "subtract": (lambda x, y, _: torch.subtract(x, y), "add(alpha2=-1)"),
    "clamp tensors": (lambda x, y, z: x.clamp(y, z), "maximum -> minimum"),
    "clamp_min": (lambda x, y, _: x.clamp_min(y), "maximum"),
    "clamp_max": (lambda x, y, _: x.clamp_max(y), "minimum"),
    "clip": (lambda x, *_: torch.clip(x, -1.0, 1.0), "clamp(-1, max=1)"),
    "addcmul": (torch.addcmul, "mul -> add"),
    "addcdiv": (lambda x, y, z: torch.addcdiv(x, y, z, value=2), 'elementwise("2 * x") -> div -> add'),
    "logsigmoid": (lambda x, *_: F.logsigmoid(x), "log_sigmoid"),
    "softplus": (lambda x, *_: F.softplus(x), "softplus"),
    "softplus beta": (
        lambda x, *_: F.softplus(x, 2),
        'elementwise("(maximum(2 * x, 0) + log1p(exp(-abs(2 * x)))) / 2")',
    ),
    "rsub": (lambda x, *_: 3 - x, 'elementwise("3 - x")'),
    "rsub alpha": (lambda x, *_: torch.rsub(x, 3, alpha=2), 'elementwise("3 - 2 * x")'),
    "expit": (lambda x, *_: torch.special.expit(x), "sigmoid"),
    "absolute": (lambda x, *_: torch.absolute(x), "abs"),
    "negative": (lambda x, *_: torch.negative(x), 'elementwise("-x")'),
    "square": (lambda x, *_: torch.square(x), 'elementwise("x * x")'),
    "sign": (lambda x, *_: x.sign(), 'elementwise("where(x > 0, 1, where(0 > x, -1, 0))")'),
    "sgn": (lambda x, *_: x.sgn(), 'elementwise("where(x > 0, 1, where(0 > x, -1, 0))")'),
    "round": (lambda x, *_: x.round(), 'elementwise("round(x)")'),
    "expm1": (lambda x, *_: torch.expm1(x), 'elementwise("expm1(x)")'),
    "log1p": (lambda x, *_: torch.log1p(x), 'elementwise("log1p(x)")'),
    "threshold": (lambda x, *_: F.threshold(x, 0.5, 0.25), 'elementwise("where(0.5 >= x, 0.25, x)")'),
    "celu": (
        lambda x, *_: F.celu(x, 0.5),
        'elementwise("maximum(x, 0) + minimum(0.5 * expm1(x / 0.5), 0)")',
    ),
    "selu": (
        lambda x, *_: F.selu(x),
        'elementwise("1.0507009873554805 * where(x > 0, x, 1.6732632423543772 * expm1(x))")',
    ),
    "prelu": (lambda x, _, z: F.prelu(x, z[0]), "prelu"),
    "prelu shared": (lambda x, _, z: F.prelu(x, z[0, :1]), "prelu(shared=True)"),
}


class Called(nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.function(x, y, z)


@pytest.mark.parametrize("name", ROWS)
def test_an_operator_is_one_plan(name: str) -> None:
    function, want = ROWS[name]
    x, y, z = torch.randn(3, 4, 16)
    x[0], y[1] = torch.tensor(SPECIAL), torch.tensor(SPECIAL)
    y[2] = x[2]
    made = fused.fuse(Called(function), x, y, z)
    assert [str(site.plan) for site in made.fusion.cut.sites] == [f"f32[4x16] -> {want}"]
    exact = function(x.double(), y.double(), z.double()).float()
    torch.testing.assert_close(made(x, y, z), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_quotient_by_one_number_a_channel_tells_the_type() -> None:
    made = fused.fuse(Called(lambda x, y, _: x / y.sum(0)), *torch.rand(3, 4, 16))
    assert "div with sum_1.0: f32[16]" in [str(reason.got) for reason in made.fusion.cut.left.values()]


def test_heads_that_torch_repeats_are_no_view() -> None:
    """`repeat_interleave` copies, unless a plan of attention reads the heads where they lie."""
    made = fused.fuse(Called(lambda x, y, _: (x + y).repeat_interleave(2, 1)), *torch.rand(3, 2, 4, 16))
    (row,) = (each for each in made.report.operators if each.name == "repeat_interleave")
    assert (row.state, row.code, row.got) == ("left", "no-plan", "aten.repeat_interleave.self_int")
    assert row.moved == (1 + 2) * 2 * 4 * 16 * 4
    assert (made.report.launches.before, made.report.launches.libraries) == (2, {"torch": 1})


def test_a_softplus_that_is_soon_linear_is_torchs() -> None:
    x = torch.tensor([[0.5, 1.25, 2.0]])
    made = fused.fuse(Called(lambda x, *_: F.softplus(x, threshold=1.0)), x, x, x)
    torch.testing.assert_close(made(x, x, x), F.softplus(x, threshold=1.0))
    assert not made.fusion.cut.sites

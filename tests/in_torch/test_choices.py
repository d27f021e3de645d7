"""Choices between two values by comparisons, as parts of plans' formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fuseplan.torch as fused

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "two tensors": (lambda x: torch.where(x > 0, x, 0.1 * x), "where(x > 0, x, x * 0.1)"),
    "a number": (lambda x: torch.where(x >= 0.5, x, 0.0), "where(x >= 0.5, x, 0)"),
    "a number first": (lambda x: torch.where(x < 0.5, -1.0, x), "where(0.5 > x, -1, x)"),
    "a mask": (lambda x: x.masked_fill(x <= -0.5, 2.0), "where(-0.5 >= x, 2, x)"),
    "hardshrink": (nn.functional.hardshrink, "where(0.5 >= abs(x), 0, x)"),
}


class Called(nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.function(src)


def _src() -> torch.Tensor:
    """Numbers at and beside the bounds, infinities, and no numbers."""
    torch.manual_seed(0)
    src = torch.randn(6, 40)
    src[0, :8] = torch.tensor([0.0, -0.0, 0.5, -0.5, math.inf, -math.inf, math.nan, 0.1])
    return src


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_a_choice_is_a_formula(case: str, dtype: torch.dtype) -> None:
    function, formula = CASES[case]
    module, src = Called(function).eval(), _src().to(dtype)
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert [str(each.plan).partition(" -> ")[2] for each in made.report.sites] == [
            f'elementwise("{formula}")'
        ]
        assert not made.report.left
        torch.testing.assert_close(made(src), module(src), equal_nan=True)


def test_a_number_is_compared_in_the_dtype_of_the_tensor() -> None:
    """0.1 is no number of bf16: torch compares with the nearest, 0.10009765625."""
    src = torch.full((4, 8), 0.1, dtype=torch.bfloat16)
    module = Called(lambda x: torch.where(x > 0.1, 1.0, x)).eval()
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert made.report.sites
        assert torch.equal(made(src), src)


def test_a_comparison_that_others_read_is_torchs_too() -> None:
    module = Called(lambda x: (torch.where(x > 0, x, x * 2), torch.where(x > 0, x * 3, x), x > 0)).eval()
    src = _src()
    with torch.no_grad():
        made = fused.fuse(module, src)
        for got, want in zip(made(src), module(src), strict=True):
            torch.testing.assert_close(got, want, equal_nan=True)
        assert len({each.name for each in made.report.operators}) == len(made.report.operators)


def test_choices_by_other_tensors_and_of_whole_numbers_are_torchs() -> None:
    kept = torch.arange(40) % 3 == 0
    for function in (
        lambda x: torch.where(kept, x, 0.0),
        lambda x: torch.where(x.to(torch.int32) > 0, x, 0.0),
        lambda x: torch.where(torch.isnan(x), 0.0, x),
    ):
        module, src = Called(function).eval(), _src().nan_to_num()
        with torch.no_grad():
            made = fused.fuse(module, src)
            assert [each.code for each in made.report.left]
            torch.testing.assert_close(made(src), module(src))


def test_choices_behind_a_product() -> None:
    chosen = Called(lambda x: torch.where(x > 0.2, x, -1.0))
    module, src = nn.Sequential(nn.Linear(40, 16), chosen).eval(), torch.randn(6, 40)
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert [str(each.plan).partition(" -> ")[2] for each in made.report.sites] == [
            'linear(16) -> bias -> elementwise("where(x > 0.2, x, -1)")'
        ]
        torch.testing.assert_close(made(src), module(src))

"""Plans that would read copies of values with gaps: torch's own arithmetic is estimated to be faster."""

import pytest
import torch
from torch import nn

import fuseplan.torch
from fuseplan.graph.why import Why


class Step(nn.Module):  # type: ignore[misc]
    """A step of a recursion over knots: rows lose an element."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = getattr(torch, function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.function(x[..., :-1]) * x[..., 1:]
        return made


def left(rows: int, knots: int, function: str) -> set[Why]:
    """The reasons why operators are in no plan; what the module computes is compared."""
    x, module = torch.randn(rows, 16, knots), Step(function)
    with torch.no_grad():
        made = fuseplan.torch.fuse(module, x)
        torch.testing.assert_close(made(x), module(x))
    return {reason.why for reason in made.fusion.cut.left.values()}


def test_short_rows_with_gaps_are_left_to_torch() -> None:
    assert left(64, 11, "clone") == {Why.COPIED}


@pytest.mark.parametrize(("rows", "knots", "function"), [(1, 257, "clone"), (64, 11, "sigmoid")])
def test_long_rows_and_functions_are_not(rows: int, knots: int, function: str) -> None:
    assert Why.COPIED not in left(rows, knots, function)

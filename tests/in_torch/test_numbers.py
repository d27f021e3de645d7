"""Tensors that are one number in each call are numbers of plans; those that a call may change are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Limited(nn.Module):  # type: ignore[misc]
    """A product, limited by a tensor of one element."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(24, 16), kind
        self.register_buffer("limit", torch.tensor(0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        made = {"written": lambda: x.new_tensor(0.25), "filled": lambda: torch.full((), 0.25)}
        limit = made[self.kind]() if self.kind in made else self.limit
        return torch.minimum(x, limit) * 2


@pytest.mark.parametrize(("kind", "is_number"), [("written", True), ("filled", True), ("held", False)])
def test_a_tensor_that_is_one_number(kind: str, is_number: bool, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    module, x = Limited(kind), torch.randn(8, 24)
    with torch.no_grad():
        torch.compile(module, backend="fuseplan", options={"dryrun": True})(x)
        assert ("minimum(x, 0.25)" in capsys.readouterr().out) == is_number
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="fuseplan")
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)
        module.limit.fill_(-0.5)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)

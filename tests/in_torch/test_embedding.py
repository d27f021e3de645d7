"""Rows of torch's tables: found in models with what stands behind them, and the gradients that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused
from fuseplan.errors import ArgumentError, PlanError
from fuseplan.torch.dynamo import compile_graph

NORMED = "i64[2x5] -> embedding(11, features=24, padding=3) -> add -> add -> layer_norm"


class Words(nn.Module):  # type: ignore[misc]
    """Rows of words and places, a norm, and a product, as encoders begin."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 24, **({"padding_idx": 3} | settings))
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 7)
        self.places, self.kinds = (nn.Parameter(torch.randn(2, 5, 24)) for _ in range(2))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        words = self.words(indices)
        made: torch.Tensor = self.out(self.norm(words + self.places + self.kinds))
        return made


def indices(dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([[3, 0, 10, 3, 1], [7, 7, 2, 5, 3]], dtype=dtype)


def plans(module: nn.Module) -> list[str]:
    return [str(site.plan) for site in module.fusion.cut.sites]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_lookup_and_the_norm_behind_it_are_one_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Words().eval()
    made = fused.fuse(module, indices(dtype))
    assert plans(made)[0] == NORMED.replace("i64", "i64" if dtype == torch.int64 else "i32")
    with torch.no_grad():
        for given in (indices(dtype), indices(dtype).flip(0)):
            torch.testing.assert_close(made(given), module(given), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (2, 5), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_are_torchs_to_the_last_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(9, 5, dtype=dtype)
    given = torch.randint(0, 9, shape)
    made = fused.fuse(table, given)
    assert len(plans(made)) == 1
    with torch.no_grad():
        assert torch.equal(made(given), table(given))
    normed = nn.Sequential(table, nn.LayerNorm(5, dtype=dtype))
    made = fused.fuse(normed, given)
    assert [plan.count("->") for plan in plans(made)] == [2]
    with torch.no_grad():
        torch.testing.assert_close(made(given), normed(given))


def test_a_value_that_others_read_too_stays_in_memory() -> None:
    class Both(Words):
        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            words = self.words(indices)
            made: torch.Tensor = self.out(self.norm(words + self.places) + words)
            return made

    torch.manual_seed(0)
    module = Both().eval()
    made = fused.fuse(module, indices())
    assert "i64[2x5] -> embedding(11, features=24, padding=3)" in plans(made)
    with torch.no_grad():
        torch.testing.assert_close(made(indices()), module(indices()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_row_of_padding_has_no_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = Words().to(dtype)
    gradients = []
    for each in (module, fused.fuse(module, indices()), torch.compile(module, backend=compile_graph)):
        module.zero_grad()
        each(indices()).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    bound = 1e-4 if dtype == torch.float32 else 1e-11
    want, *others = gradients
    assert not want[1].isnan().any()
    assert not module.words.weight.grad[3].any()
    for got in others:
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("setting", ["scale_grad_by_freq", "sparse"])
def test_gradients_of_another_kind_are_torchs(setting: str) -> None:
    made = fused.fuse(Words(**{setting: True}).eval(), indices())
    assert not any("embedding" in plan for plan in plans(made))
    (row,) = (each for each in made.report.operators if each.kind == "aten.embedding.default")
    assert (row.code, row.got) == ("not-in-table", "embedding with scale_grad_by_freq or sparse")


class Stored(nn.Module):  # type: ignore[misc]
    """Indices that are the module's own."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.register_buffer("given", given)

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.table(self.given)) * factor
        return made


@pytest.mark.parametrize("index", [11, -1])
def test_an_index_without_a_row_is_an_error_as_in_torch(index: int) -> None:
    """Torch raises an IndexError; a plan an ArgumentError, with the index and its place."""
    module, right = Words().eval(), indices()
    wrong = right.clone()
    wrong[1, 2] = index
    with pytest.raises(IndexError):
        module(wrong)
    made = fused.fuse(module, right)
    with pytest.raises(IndexError):  # the first call that records gradients is torch's
        made(wrong)
    made(right)
    with pytest.raises(ArgumentError, match=rf"got {index} at \(1, 2\); want an index from 0 to 10"):
        made(wrong)
    with torch.no_grad(), pytest.raises(ArgumentError, match=rf"got {index} at \(1, 2\)"):
        made(wrong)
    stored = Stored(right)
    own, factor = fused.fuse(stored, torch.ones(6)), torch.ones(6)
    with torch.no_grad():
        torch.testing.assert_close(own(factor), stored(factor))
        stored.given.copy_(wrong)
        with pytest.raises(ArgumentError, match=rf"got {index} at \(1, 2\)"):
            own(factor)


def test_layers_with_a_table_are_plans() -> None:
    torch.manual_seed(0)
    module = fused.Fused(nn.Embedding(11, 24, padding_idx=3), nn.LayerNorm(24))
    assert module.operators == "embedding(11, features=24, padding=3) -> layer_norm"
    torch.testing.assert_close(module(indices()), nn.Sequential.forward(module, indices()))
    for settings in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(PlanError, match=f"this Embedding\n\n  got {next(iter(settings))}="):
            fused.plan_of(nn.Embedding(11, 24, **settings), "i64[2x5]")


def test_padding_is_a_row_of_the_table() -> None:
    with pytest.raises(PlanError, match="padding must be a row of the table, or -1"):
        fused.run("embedding(5, features=3, padding=5)", indices(), weight=torch.randn(5, 3))


class Sums(nn.Module):  # type: ignore[misc]
    """Operators that no plan computes."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return src.cumprod(1).flip(1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, of Inductor's imports
@pytest.mark.parametrize(("last", "is_plan"), [(nn.Linear(24, 8), False), (nn.LayerNorm(24), True)])
def test_beside_inductor_an_embedding_alone_is_inductors(
    last: nn.Module, is_plan: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Embedding(11, 24), last, Sums())
    options = {"rest": "inductor", "dryrun": True}
    with torch.no_grad():
        torch.compile(module, backend="fuseplan", options=options)(torch.zeros(2, 5, dtype=torch.int64))
    assert ("-> embedding(11, features=24)" in capsys.readouterr().out) == is_plan

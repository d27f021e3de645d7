"""`torch.einsum` and `torch.matmul` of models: products that plans compute, and attention spelled by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fuseplan.torch
from fuseplan.errors import ArgumentError
from fuseplan.torch.einsum import called, einsum

LABELS = "abcdef"
REFUSED = ["ij,jk,kl->il", "...i,ij->...j", "ii,ij->j", "ij,jk->i", "ij,kl->ijkl", "ij->ji", "ij,ij->ij"]


@st.composite
def products(draw: Any) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """An equation of two factors and a product of theirs, and the extents of the factors."""
    kinds = {each: draw(st.sampled_from(("batch", "rows", "columns"))) for each in LABELS[:-1]}
    kinds[LABELS[-1]] = "summed"
    extents = {each: draw(st.integers(1, 4)) for each in LABELS}
    first = draw(st.permutations([each for each, kind in kinds.items() if kind != "columns"]))
    second = draw(st.permutations([each for each, kind in kinds.items() if kind != "rows"]))
    made = draw(st.permutations(list(LABELS[:-1])))
    shapes = [tuple(extents[each] for each in labels) for labels in (first, second)]
    return f"{''.join(first)},{''.join(second)}->{''.join(made)}", shapes[0], shapes[1]


@given(products())
def test_a_product_is_torchs(case: tuple[str, tuple[int, ...], tuple[int, ...]]) -> None:
    equation, *shapes = case
    factors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    made = einsum(equation, factors)
    assert made is not None
    torch.testing.assert_close(made, torch.einsum(equation, factors))


@pytest.mark.parametrize("equation", ["ij,jk", "ba,cb", "ij,kj->ik", "bij,bjk->bik", " ij , jk -> ik "])
def test_an_equation_may_leave_the_product_s_labels_out(equation: str) -> None:
    extents = dict(zip("abcijk", (2, 3, 4, 3, 4, 5), strict=True))
    named = equation.replace(" ", "").partition("->")[0].split(",")
    factors = [torch.randn([extents[each] for each in names], dtype=torch.float64) for names in named]
    made = einsum(equation, factors)
    assert made is not None
    torch.testing.assert_close(made, torch.einsum(equation, factors))


@pytest.mark.parametrize("equation", REFUSED)
def test_what_is_no_product_of_matrices_stays_torchs(equation: str) -> None:
    names = equation.replace("...", "").partition("->")[0].split(",")
    factors = [torch.randn([3] * len(each), dtype=torch.float64) for each in names]
    assert einsum(equation, factors) is None
    torch.testing.assert_close(called(equation, *factors), torch.einsum(equation, factors))
    torch.testing.assert_close(called(equation, factors), torch.einsum(equation, factors))


def test_an_axis_of_one_element_may_stand_for_several_of_the_other_s() -> None:
    factors = [torch.randn(3, 1, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)]
    assert einsum("ij,jk->ik", factors) is None
    torch.testing.assert_close(called("ij,jk->ik", *factors), torch.einsum("ij,jk->ik", factors))


class Heads(nn.Module):  # type: ignore[misc]
    """Attention whose products are equations, with heads where a linear layer leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.Linear(32, 96)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(*each.shape[:2], 4, 8) for each in self.of(src).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


class Unseen(nn.Module):  # type: ignore[misc]
    """Equations that are no products, beside an activation."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return (
            torch.relu(torch.einsum("bij->bji", src)) + torch.einsum("bii->b", src[:, :, :5])[:, None, None]
        )


@pytest.mark.parametrize("way", ["fuse", "compile"])
@pytest.mark.parametrize("module", [Heads(), Unseen()], ids=["attention", "no products"])
def test_models_with_equations(module: nn.Module, way: str) -> None:
    src = torch.randn(2, 5, 32) if isinstance(module, Heads) else torch.randn(2, 5, 7)
    with torch.no_grad():
        run = (
            torch.compile(module, backend="fuseplan")
            if way == "compile"
            else fuseplan.torch.fuse(module, src)
        )
        torch.testing.assert_close(run(src), module(src))


def test_attention_by_equations_is_one_plan() -> None:
    fused = fuseplan.torch.fuse(Heads().eval(), torch.randn(2, 5, 32))
    words = [[op.name for op in site.plan.ops] for site in fused.fusion.cut.sites]
    assert words == [["linear", "bias"], ["attention"]]


class Unequal(nn.Module):  # type: ignore[misc]
    """An equation of tensors whose extents differ."""

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,jk->ik", src, src)


def test_a_wrong_equation_s_error_names_the_line_of_the_model() -> None:
    with pytest.raises(ArgumentError, match=r"test_einsum\.py:\d+: return torch\.einsum"):
        fuseplan.torch.fuse(Unequal(), torch.randn(3, 4))


class Times(nn.Module):  # type: ignore[misc]
    """A product with a parameter that is no layer's."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8) if turned else torch.randn(8, 6))
        self.turned = turned

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return torch.relu(src @ (self.weight.T if self.turned else self.weight))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
def test_a_product_with_a_parameter_is_a_plan(shape: tuple[int, ...], turned: bool) -> None:
    module, src = Times(turned=turned).eval(), torch.randn(shape)
    with torch.no_grad():
        fused = fuseplan.torch.fuse(module, src)
        (site,) = fused.fusion.cut.sites
        assert [op.name for op in site.plan.ops] == ["linear" if turned else "matmul", "relu"]
        torch.testing.assert_close(fused(src), module(src))


def test_stacks_of_matrices_are_left_to_torch() -> None:
    class Stacks(nn.Module):  # type: ignore[misc]
        def forward(self, src: torch.Tensor) -> torch.Tensor:
            return src @ src.transpose(-1, -2)

    src = torch.randn(3, 5, 8)
    fused = fuseplan.torch.fuse(Stacks(), src)
    assert not fused.fusion.cut.sites
    torch.testing.assert_close(fused(src), Stacks()(src))

"""Reductions and norms of torch's in plans: of several axes, of all, and those that several operators say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fuseplan.torch as fused

F = nn.functional


class Called(nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        return self.function(src)


def _normed(*inner: int, **options: Any) -> nn.Module:
    """A layer norm whose weights change every element otherwise."""
    made = nn.LayerNorm(inner, **options)
    for each in made.parameters():
        nn.init.normal_(each, 0.5)
    return made


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "mean": (lambda x: x.mean(), "mean((0, 1, 2))"),
    "sum": (lambda x: x.sum(), "sum((0, 1, 2))"),
    "largest": (lambda x: x.max() - x, "amax((0, 1, 2))"),
    "least": (lambda x: x.min(), "amin((0, 1, 2))"),
    "product": (lambda x: (x / 4).prod(1), "elementwise(\"x / 4\") -> prod(1)"),
    "logsumexp": (lambda x: torch.logsumexp(x, (0, 2), keepdim=True), "logsumexp((0, 2), keepdim=True)"),
    "variance": (lambda x: x.var(1), "var(1)"),
    "variance of all": (lambda x: x.var((0, 2), correction=0), "var((0, 2), correction=0)"),
    "correction": (lambda x: torch.var(x, 2, correction=3), "var(2, correction=3)"),
    "deviation": (lambda x: x.std(-1, keepdim=True), 'var(2, keepdim=True) -> elementwise("sqrt(x)")'),
    "biased": (lambda x: x.std(-1, unbiased=False), 'var(2, correction=0) -> elementwise("sqrt(x)")'),
    "length": (lambda x: x.norm(dim=-1), 'elementwise("x * x") -> sum(2) -> elementwise("sqrt(x)")'),
    "sum of sizes": (lambda x: x.norm(1, dim=(0, 1)), "abs -> sum((0, 1))"),
    "largest size": (lambda x: torch.linalg.vector_norm(x, torch.inf), "abs -> amax((0, 1, 2))"),
    "norm of two axes": (_normed(7, 33), "layer_norm"),
    "norm of all axes": (lambda x: F.layer_norm(x, (5, 7, 33)), "layer_norm(affine=False)"),
    "norm without a bias": (_normed(33, bias=False), "layer_norm(affine=False) -> scale"),
    "norm of two without a bias": (_normed(7, 33, bias=False), "layer_norm(affine=False) -> scale"),
    "RMS norm of two axes": (nn.RMSNorm((7, 33), eps=1e-6), "rms_norm(epsilon=1e-06)"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_a_statistic_is_a_plan(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, plan = CASES[case]
    module, src = copy.deepcopy(Called(function)).eval().to(dtype), torch.randn(5, 7, 33).to(dtype)
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert plan in [str(each.plan).partition(" -> ")[2] for each in made.report.sites]
        assert not [each for each in made.report.left if each.code in ("not-in-table", "shape")]
        got, exact = made(src), copy.deepcopy(module).double()(src.double())
        assert got.shape == exact.shape
        assert got.dtype == dtype
        bound = 1e-5 if dtype == torch.float32 else 1e-2
        assert (got.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize(("wanted", "plan"), [(1, "amax((2, 3), keepdim=True)"), (3, "max_pool2d((2, 4))")])
def test_the_largest_elements_of_a_number_of_windows(wanted: int, plan: str) -> None:
    module, src = nn.AdaptiveMaxPool2d(wanted).eval(), torch.randn(2, 5, 6, 12)
    src[0, 1, 2, 3] = torch.nan
    with torch.no_grad():
        made = fused.fuse(module, src)
        assert [str(each.plan).partition(" -> ")[2] for each in made.report.sites] == [plan]
        torch.testing.assert_close(made(src), module(src), equal_nan=True)
        places = fused.fuse(nn.AdaptiveMaxPool2d(wanted, return_indices=True), src)
        for got, want in zip(
            places(src), torch.nn.functional.adaptive_max_pool2d(src, wanted, True), strict=True
        ):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_elements_that_are_no_numbers_are_as_in_torch() -> None:
    src = torch.randn(4, 9)
    src[0, 3], src[1, 2], src[2] = torch.nan, torch.inf, -torch.inf
    for case in ("largest", "logsumexp", "variance", "length"):
        function = {"logsumexp": lambda x: torch.logsumexp(x, 1), "variance": lambda x: x.var(1)}
        module = Called(function.get(case, CASES[case][0])).eval()
        with torch.no_grad():
            torch.testing.assert_close(fused.fuse(module, src)(src), module(src), equal_nan=True)


def test_norms_of_several_axes_under_torch_compile(capsys: pytest.CaptureFixture[str]) -> None:
    module, src = (
        nn.Sequential(_normed(7, 33), nn.GELU(), _normed(33, bias=False)).eval(),
        torch.randn(400, 7, 33),
    )
    with torch.no_grad():
        made = torch.compile(module, backend="fuseplan")
        torch.testing.assert_close(made(src), module(src), atol=1e-5, rtol=1e-4)
        torch._dynamo.reset()
        torch.compile(module, backend="fuseplan", options={"dryrun": True})(src)
    assert "f32[400x231] -> layer_norm" in capsys.readouterr().out


def test_norms_of_several_axes_have_gradients() -> None:
    """A training step keeps torch's mean and deviation for its backward pass."""
    module, src = _normed(7, 33), torch.randn(40, 7, 33, requires_grad=True)
    made = torch.compile(module, backend="fuseplan")
    own, wanted = (
        torch.autograd.grad((each(src) ** 2).sum(), (src, *module.parameters())) for each in (made, module)
    )
    for got, want in zip(own, wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_norms_of_several_axes_of_an_open_batch_are_torchs() -> None:
    module, src = _normed(7, 33).eval(), torch.randn(6, 7, 33)
    with torch.no_grad():
        made = fused.fuse(module, src, dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
        torch.testing.assert_close(made(src[:5]), module(src[:5]), atol=1e-5, rtol=1e-4)

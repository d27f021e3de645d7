"""Plans whose features are given in ranges: several projections of one input in one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fuseplan
import fuseplan.torch
from fuseplan.errors import PlanError, Unsupported
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from fuseplan.tuning.verdict import OneAtATime

PROJECTIONS = "f32[6x16] -> linear(24) -> bias -> silu -> split((q, k, v), features=(16, 5, 3))"
BRANCHES = "f32[2x8x9x7, nhwc] -> conv2d(12, kernel=3, padding=1) -> bias -> relu -> split((a, b))"


@pytest.mark.parametrize("text", [PROJECTIONS, BRANCHES, BRANCHES.replace(", nhwc", "")])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_ranges_are_views_of_the_output(text: str, target: str) -> None:
    plan = FusionPlan.parse(text)
    assert FusionPlan.parse(str(plan)) == plan == FusionPlan.from_json(plan.to_json())
    arrays = random_arrays(plan, 2)
    compiled = fuseplan.compile(plan, target, threads=1)
    made, (out, views) = compiled(**arrays), evaluated(plan, arrays)
    assert made._fields == ("out", *plan.views)
    np.testing.assert_allclose(made.out, out, rtol=1e-4, atol=1e-4)
    axis = plan.output.channel_axis
    np.testing.assert_array_equal(np.concatenate(made[1:], axis), made.out)
    for name, want in views.items():
        got = getattr(made, name)
        assert np.shares_memory(got, made.out)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    src = arrays.pop("src")
    given = np.empty_like(made.out)
    bound = compiled.bind(**arrays)
    for _ in range(2):  # the first call checks more than the second
        again = bound(src, given)
        assert again.out is given
        assert np.shares_memory(again[-1], given)
        np.testing.assert_array_equal(given, made.out)
    np.testing.assert_allclose(OneAtATime(plan, {"src": src, **arrays}, 1)(), made.out, rtol=1e-4, atol=1e-4)


def test_the_kernel_is_that_of_the_plan_without_the_split() -> None:
    for text in (PROJECTIONS, BRANCHES):
        plain, _, _ = text.rpartition(" -> ")
        kernels = [lower(match(FusionPlan.parse(each))) for each in (text, plain)]
        assert kernels[0].text == kernels[1].text


def test_open_rows() -> None:
    plan = FusionPlan.parse(PROJECTIONS.replace("6x16", "*x16"))
    arrays = random_arrays(FusionPlan.parse(PROJECTIONS), 2)
    compiled = fuseplan.compile(plan, threads=1)
    made = compiled(**arrays)
    np.testing.assert_array_equal(made.v, made.out[:, 21:])
    empty = compiled(**arrays | {"src": arrays["src"][:0]})
    assert [each.shape for each in empty] == [(0, 24), (0, 16), (0, 5), (0, 3)]


def test_torch_gives_views_with_gradients() -> None:
    _, _, operators = PROJECTIONS.partition(" -> ")
    rng = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=rng) for shape in ((6, 16), (24, 16), (24,)))
    for each in (x, w, b):
        each.requires_grad_()
    out, q, k, v = fuseplan.torch.run(operators, x, weight=w, bias=b)
    want = torch.nn.functional.silu(torch.nn.functional.linear(x, w, b))
    torch.testing.assert_close(out, want)
    parts = want.split([16, 5, 3], 1)
    for got, part in zip((q, k, v), parts, strict=True):
        torch.testing.assert_close(got, part)
    gradients = [torch.autograd.grad((q * k.sum()).sum() + v.sum(), w)[0] for q, k, v in ((q, k, v), parts)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)


def test_what_is_refused() -> None:
    src = "f32[6x16] -> linear(24)"
    for wrong, told in (
        ("split((q, k), features=(16, 5))", "features are not src's"),
        ("split((q, k, v, w, x), features=(4, 4, 4, 4, 8))", "names must be the names of the ranges"),
        ("split((q, q))", "each once"),
        ("split((out, k))", "names must be the names of the ranges"),
        ("split((a, b, c, d, e))", "features are not src's"),
        ("split((weight, k))", "cannot be weight: the plan has a tensor of that name"),
    ):
        with pytest.raises(PlanError, match=told):
            FusionPlan.parse(f"{src} -> {wrong}")
    with pytest.raises(Unsupported, match="operators behind it"):
        fuseplan.compile("f32[6x16] -> linear(24) -> split((a, b)) -> relu")

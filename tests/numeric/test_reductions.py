"""Statistics over any axes: torch's numbers, and the CPU's kernels in every form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch

from closeness import assert_close, assert_same_exceptions
from forced import forced, narrowed
from fuseplan.backends.cpu.templates.reduction import Reduction
from fuseplan.backends.cpu.templates.reduction_terms import below, largest
from fuseplan.backends.triton.templates.reduction import GpuReduction
from fuseplan.errors import PlanError
from fuseplan.explanation import explain
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.measure.data import evaluated, random_arrays
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import calls, exp, leaf
from interpreted import assert_interpreted

TENSORS = (
    "7",
    "3x5",
    "2x3x7",
    "2x3x7, nwc",
    "2x3x7, bsc",
    "3x4x5, cbs of bsc",
    "2x5x3x7, nhwc",
    "2x3x5x7, bhsc",
    "2x3x5x7, strides=1:1000:100:10",
    "2x3x2x5x3, ndhwc",
    "2x3x2x5x3, abhsc",
)
REMOVING = {each: getattr(torch, each) for each in ("sum", "mean", "amax", "amin", "logsumexp")}
FLATTENED = {"argmax": torch.argmax, "prod": torch.prod}
EXPONENTIAL = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
SPECIAL = (np.inf, -np.inf, np.nan)


def subsets(rank: int) -> Iterator[tuple[int, ...]]:
    """All groups of axes."""
    return chain.from_iterable(combinations(range(rank), count) for count in range(1, rank + 1))


def torch_made(word: str, x: torch.Tensor, axes: tuple[int, ...], *, keepdim: bool = False) -> torch.Tensor:
    """The operator by torch; some take one axis, and over several it is that of all their elements."""
    if word in REMOVING:
        return REMOVING[word](x, axes, keepdim=keepdim)
    order = [*(axis for axis in range(x.ndim) if axis not in axes), *axes]
    rows = x.permute(order)
    if word in FLATTENED:
        made = FLATTENED[word](rows.flatten(x.ndim - len(axes)), -1)
        kept = [1 if axis in axes else extent for axis, extent in enumerate(x.shape)]
        return made.reshape(kept) if keepdim else made
    made = EXPONENTIAL[word](rows.flatten(x.ndim - len(axes)), -1).reshape(rows.shape)
    return made.permute([order.index(axis) for axis in range(x.ndim)])


@pytest.mark.parametrize("word", [*REMOVING, *FLATTENED, *EXPONENTIAL])
@pytest.mark.parametrize("tensor", TENSORS)
def test_operators_are_torchs(tensor: str, word: str) -> None:
    src = FusionPlan.parse(f"f64[{tensor}] -> relu").src
    x = np.random.default_rng(1).standard_normal(src.shape)
    for axes in subsets(src.rank):
        for keepdim in {False, word not in EXPONENTIAL}:
            told = f"{axes if len(axes) > 1 else axes[0]}{', keepdim=True' if keepdim else ''}"
            plan = FusionPlan.parse(f"f64[{tensor}] -> {word}({told})")
            want = torch_made(word, torch.from_numpy(x), axes, keepdim=keepdim)
            np.testing.assert_allclose(plan.reference(x, {}), want.numpy(), rtol=1e-12)
            assert plan.output.shape == tuple(want.shape)
            assert FusionPlan.parse(str(plan)).output == plan.output


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("f32[2x3x7] -> softmax", (2,)),
        ("f32[2x3x7] -> softmax(s)", (1,)),
        ("f32[2x5x3x7, nhwc] -> sum(hw)", (2, 3)),
        ("f32[2x5x3x7] -> amax", (0, 1, 2, 3)),
        ("f32[2x5x3x7] -> mean((-1, 1))", (1, 3)),
    ],
)
def test_axes_by_name_and_number(text: str, axes: tuple[int, ...]) -> None:
    (step,) = FusionPlan.parse(text).steps
    assert step.op.over(step.src) == axes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f32[2x3] -> sum(2)", "not axes of src"),
        ("f32[2x1] -> var(1)", "leaves nothing to divide by"),
        ("f32[2x3] -> var(1, correction=-1)", "must be a number of elements"),
        ("f16[2x3000000000] -> argmax(1)", "more elements than i32 counts"),
        ("f32[2x3] -> sum((0, -2))", "not axes of src"),
        ("f32[2x3] -> sum(h)", "not axes of src"),
        ("f32[2x3] -> sum(hh)", "must tell axes"),
        ("f32[2x3] -> sum(0.5)", "must tell axes"),
        ("f32[2x3x4, ncw] -> softmax", "reads the last axis"),
        ("f32[2x3x4] -> sum -> layer_norm", "there is none"),
        ("f32[2x3x4x5] -> sum(h) -> sum(0) -> batch_norm_training", "here they are axis 0"),
    ],
)
def test_axes_that_are_none(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        FusionPlan.parse(text)


# Plans in each order of the axes: elements or cells innermost, operands with src's axes and with dst's.
PLANS = (
    "[33x40] -> softmax",
    "[5x77] -> relu -> log_softmax",
    "[33x40] -> scale -> softmax(0) -> add",
    "[2x3x70, nwc] -> add -> softmax(w)",
    "[2x5x3x7, nhwc] -> relu -> mean(hw) -> bias",
    "[2x5x3x7] -> relu -> mean(hw) -> bias -> relu",
    "[2x5x3x70, nhwc] -> sum -> tanh",
    "[2x3x5x7, bhsc] -> bias -> amax(h) -> add",
    "[2x3x5x7, strides=1:1000:100:10] -> sum((1, 2), keepdim=True) -> scale",
    "[3x4x5, cbs of bsc] -> add -> softmax(bs) -> add",
    "[2x3x2x5x3, ndhwc] -> softmax(c)",
    "[2x3x2x5x19] -> batch_norm(per_activation) -> sum(0) -> add",
    "[4x3x5x7, strides=1:1000:100:10 of bhsc] -> layer_norm -> relu",
    "[19] -> softmax -> bias",
    "[7x1] -> softmax -> scale",
    "[3x1x4] -> relu -> log_softmax(1)",
    "[3x1x4] -> sum(1) -> tanh",
    "[2x3x5x7, bhsc] -> bias -> amin(hs) -> add",
    "[5x77] -> relu -> amin(0, keepdim=True)",
    "[33x9] -> prod(1) -> bias",
    "[33x40] -> var(1)",
    "[2x5x3x7, nhwc] -> scale -> var(hw, correction=0) -> bias",
    "[5x77] -> logsumexp(1) -> add",
    "[2x3x70, nwc] -> logsumexp(w, keepdim=True)",
    "[2x5x3x7, nhwc] -> add -> prod(hw)",
)
# Equal elements in several places, NaN and infinities: the index has to be the first one's.
PLACES = (
    "[7] -> argmax",
    "[33x40] -> argmax(1)",
    "[33x40] -> relu -> argmax(0)",
    "[2x3x70, nwc] -> argmax(wn)",
    "[3x4x5, cbs of bsc] -> argmax(bs, keepdim=True)",
    "[2x5x3x7, nhwc] -> add -> argmax(hw)",
    "[2x3x5x7, strides=1:1000:100:10] -> argmax((1, 2))",
    "[2x3x2x5x3, abhsc] -> argmax",
    "[2x3x2x5x19, ndhwc] -> argmax(c) -> cast(f32) -> relu",
)


@pytest.mark.part(4)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("width", [16, 64])
def test_any_plan_and_dtype(dtype: str, plan: str, width: int) -> None:
    made = FusionPlan.parse(dtype + plan)
    assert_close(forced(made, Reduction, narrowed(width)), random_arrays(made, 5), slack=64)


def with_equals(plan: FusionPlan) -> dict[str, Any]:
    """Small whole numbers, and in some places NaN and infinities."""
    arrays = random_arrays(plan, 3)
    for array in arrays.values():
        array[...] = np.random.default_rng(array.size).integers(-2, 3, array.shape)
    src = arrays["src"]
    for place, special in enumerate((*SPECIAL, np.nan)):
        src[np.unravel_index((place * 11 + 5) % src.size, src.shape)] = special
    return arrays


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16"])
@pytest.mark.parametrize("plan", PLACES)
def test_the_first_of_equal_elements(dtype: str, plan: str) -> None:
    made = FusionPlan.parse(dtype + plan)
    arrays = with_equals(made)
    with np.errstate(all="ignore"):
        want = evaluated(made, arrays)[0]
    for width in (16, 64):
        np.testing.assert_array_equal(forced(made, Reduction, narrowed(width))(**arrays), want)


@pytest.mark.parametrize(("cells", "parts"), [(1, 3), (2, 2)])
def test_the_first_of_equal_elements_in_parts(cells: int, parts: int) -> None:
    plan = FusionPlan.parse("f32[3x9001] -> argmax(1)")
    src = np.zeros((3, 9001), np.float32)
    src[0, [7, 8000]], src[1, [4999, 5000]], src[2, [8999, 9000]] = 1, np.nan, 3
    compiled = forced(plan, Reduction, narrowed(32, threads=2), Reduction(cells, parts, split=True))
    np.testing.assert_array_equal(compiled(src), [7, 4999, 8999])


def test_indices_that_f32_does_not_hold() -> None:
    plan = FusionPlan.parse(f"f16[1x{2**24 + 9}] -> argmax(1)")
    src = np.zeros(plan.src.shape, np.float16)
    src[0, 2**24 + 1] = 1
    assert forced(plan, Reduction, narrowed(32))(src) == 2**24 + 1
    assert lower(match(plan)).compute_dtype == "f64"


@pytest.mark.parametrize(
    ("plan", "cut"),
    [
        ("f32[3x9001] -> add -> softmax", Reduction(1, 3, split=True)),
        ("f32[3x9001] -> add -> softmax", Reduction(2, 2, split=True)),
        ("f32[5x600x13] -> softmax(1)", Reduction(8, 3, split=True)),
        ("f32[5x600x13] -> sum(1) -> add", Reduction(8, 2, split=True)),
        ("f64[2x3x5000, strides=20000:6000:1] -> sum -> tanh", Reduction(1, 4, split=True)),
        ("f32[700x21] -> log_softmax(0)", Reduction(16, 2, split=True)),
        ("f32[4x3x50x70, strides=10500:1:210:3 of bhsc] -> layer_norm", Reduction(3, 1)),
        ("f32[2x3x2x9000, strides=108000:9000:27000:1 of bhsc] -> layer_norm", Reduction(1, 2, split=True)),
        ("f32[2x12x9x7, nhwc] -> relu -> group_norm(4) -> add", Reduction(24, 1, folded=True)),
        ("f16[2x30x20x30, nhwc] -> group_norm(3) -> relu", Reduction(16, 2, split=True, folded=True)),
        ("f64[3x22x5x7, nhwc] -> group_norm(2, affine=False)", Reduction(99, 1, folded=True)),
        ("f32[40x21x3x3] -> softmax((0, 2, 3))", Reduction(63, 1, folded=True)),
    ],
)
def test_any_cut(plan: str, cut: Reduction) -> None:
    made = FusionPlan.parse(plan)
    compiled = forced(made, Reduction, narrowed(32, threads=2), cut)
    assert_close(compiled, random_arrays(made, 5), slack=64)


@pytest.mark.parametrize("plan", ["[3x1100] -> scale -> softmax", "[2x3x700x4] -> log_softmax((2, 3))"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("near", [True, False])
def test_rows_past_the_caches(plan: str, dtype: str, near: bool) -> None:
    """Runs that begin anywhere in a line of the caches, with and without a pass for each level."""
    made = FusionPlan.parse(dtype + plan)
    target = replace(narrowed(32), l3_bytes=0, l2_bytes=narrowed(32).l2_bytes if near else 0)
    compiled = forced(made, Reduction, target)
    assert f"near={near}, stream=True" in compiled.choice.template.text
    assert_close(compiled, random_arrays(made, 5), slack=64)


@pytest.mark.parametrize(
    "plan", ["[2x80x9x7, nhwc] -> group_norm(16)", "[3x128x5x9, nhwc] -> instance_norm -> relu"]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_columns_past_the_caches(plan: str, dtype: str) -> None:
    """Rows that begin lines of the caches, with lanes along their channels."""
    made = FusionPlan.parse(dtype + plan)
    compiled = forced(made, Reduction, replace(narrowed(32), l3_bytes=0))
    assert compiled.choice.template.knobs["stream"] == (dtype == "f32" or "128" in plan)
    assert_close(compiled, random_arrays(made, 5), slack=64)


@pytest.mark.parametrize(
    ("plan", "formulas"),
    [
        ("f32[3x5] -> softmax", 2),
        ("f32[5x3] -> log_softmax(0)", 1),
        ("f32[3x5] -> cross_entropy", 1),
        ('f32[3x5] -> elementwise("exp(x)") -> logsumexp(1)', 1),
        ("f32[3x5] -> softmax_backward", 0),
    ],
)
def test_exponentials_of_what_is_at_most_zero(plan: str, formulas: int) -> None:
    """Of an element less the maximum of all; any other may be of any number."""
    kernel = lower(match(FusionPlan.parse(plan)))
    tops = largest(kernel.statistics)
    terms = [part.term for each in kernel.statistics for part in each.parts]
    listed = [below(each, tops) for each in (*terms, kernel.epilogue[0].expression)]
    assert sum("exp_below" in calls(each) for each in listed) == formulas
    assert not any("exp" in calls(each) for each in listed)
    others = leaf("x") - leaf("most"), leaf("x"), leaf("x") + leaf(next(iter(tops), "x"))
    assert all(below(exp(each), tops) == exp(each) for each in others)


@pytest.mark.parametrize(("threads", "cells"), [(1, 700), (2, 87)])
def test_one_thread_goes_through_whole_rows(threads: int, cells: int) -> None:
    kernel = lower(match(FusionPlan.parse("f32[3000x700] -> softmax(0)")))
    (chosen,) = Reduction.candidates(kernel, narrowed(32, threads), "default")
    assert chosen.knobs["cells"] == cells


@pytest.mark.parametrize(("size", "groups"), [(14, 2), (14, 32), (99, 2)])
def test_short_runs_of_a_groups_channels_are_columns(size: int, groups: int) -> None:
    """Channels last, lanes are channels: a run of 8 elements leaves most lanes of 16 empty.

    Longer runs are columns where a group's elements do not stay in the second cache.
    """
    kernel = lower(match(FusionPlan.parse(f"f32[1x256x{size}x{size}, nhwc] -> group_norm({groups})")))
    (chosen,) = Reduction.candidates(kernel, replace(narrowed(64), l2_bytes=1 << 20), "default")
    assert chosen.knobs["folded"] == (groups == 32 or size == 99)


@pytest.mark.parametrize(
    "plan",
    [
        "f32[33x40] -> softmax",
        "f32[40x33] -> log_softmax(0)",
        "f16[7x70] -> amax(1)",
        "f32[7x70] -> sum(0)",
        "f32[7x70] -> amin(0)",
        "f32[7x70] -> amin(1)",
        "f32[7x70] -> prod(0)",
        "f32[7x70] -> logsumexp(0)",
        "f32[7x70] -> logsumexp(1)",
    ],
)
def test_infinities_and_nan(plan: str) -> None:
    """Rows and columns with one such element, with several, and with nothing but -inf."""
    made = FusionPlan.parse(plan)
    arrays = random_arrays(made, 5)
    src: Any = arrays["src"]
    for place, special in enumerate(SPECIAL):
        src[place, place], src[-1 - place, 3:6] = special, special
    src[4, :], src[:, 9] = -np.inf, -np.inf
    assert_same_exceptions(forced(made, Reduction, narrowed(32)), arrays)
    if "softmax" in plan:
        with np.errstate(all="ignore"):
            want = torch_made(made.ops[0].name, torch.from_numpy(src).double(), made.ops[0].over(made.src))  # type: ignore[attr-defined]
            np.testing.assert_array_equal(np.isnan(made.reference(src, {})), want.isnan().numpy())


@pytest.mark.parametrize("correction", [0, 1, 3])
def test_the_variance_is_torchs_at_any_mean(correction: int) -> None:
    """In f64 with a mean of a million; in f32 with one that its elements hold."""
    for dtype, mean, kept in ((np.float64, 1e6, 1e-9), (np.float32, 100.0, 1e-4)):
        x = (np.random.default_rng(1).standard_normal((3, 5, 700)) + mean).astype(dtype)
        plan = FusionPlan.parse(f"f{8 * x.itemsize}[3x5x700] -> var((0, 2), correction={correction})")
        want = torch.var(torch.from_numpy(x).double(), (0, 2), correction=correction).numpy()
        np.testing.assert_allclose(plan.reference(x, {}), want, rtol=1e-9)
        np.testing.assert_allclose(forced(plan, Reduction, narrowed(32))(x), want, rtol=kept)


def test_long_sums_keep_their_digits() -> None:
    """A million equal numbers, whose sum one by one would lose four digits."""
    for text in ("f32[1x1000003] -> sum(1)", "f32[100003x3] -> sum(0)"):
        plan = FusionPlan.parse(text)
        src = np.full(plan.src.shape, 0.1, np.float32)
        got = forced(plan, Reduction, narrowed(16))(src)
        np.testing.assert_allclose(got, src.astype(np.float64).sum(plan.ops[0].over(plan.src)), rtol=5e-6)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "plan",
    [
        "i8[9x40] -> dequantize -> softmax",
        "f8e4m3[9x40] -> amax(0)",
        "f32[9x40] -> scale -> softmax -> quantize(i8)",
        "f32[9x40] -> cast(f16) -> mean(1) -> cast(i32)",
    ],
)
def test_other_dtypes(plan: str) -> None:
    made = FusionPlan.parse(plan)
    assert_close(forced(made, Reduction, narrowed(32)), random_arrays(made, 5), slack=64)
    assert_interpreted(made, GpuReduction, slack=64)


@pytest.mark.parametrize("target", ["cpu", "triton:sm_90"])
@pytest.mark.parametrize(
    ("plan", "passes"), [("f32[8x512x768, bsc] -> scale -> softmax", 2), ("f32[64x300] -> sum -> tanh", 1)]
)
def test_the_explanation_tells_what_is_reduced(plan: str, passes: int, target: str) -> None:
    told = " ".join(str(explain(plan, target)).split())
    assert f"passes {passes} over the data: the statistics of a place along the other axes" in told

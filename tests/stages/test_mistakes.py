"""Mistakes at calls: each is answered by what was wrong and what to do."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fuseplan
from fuseplan.errors import ArgumentError, FuseplanError, PlanError, a_thing
from fuseplan.kernels.target import parse_target
from fuseplan.plans.plan import FusionPlan
from fuseplan.scalar import leaf
from fuseplan.stores.tuned import processor_of
from fuseplan.tensors.arguments import Arguments

LAYER = FusionPlan.parse("f32[2x8] -> matmul(4) -> bias")
X, W, B = np.ones((2, 8), np.float32), np.ones((8, 4), np.float32), np.ones(4, np.float32)
LARGE = 10**400
KINDS: tuple[object, ...] = ([], X, 1, "a")


def said(call: Callable[[], object]) -> str:
    with pytest.raises(FuseplanError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def layer() -> Any:
    return fuseplan.compile(LAYER, "reference")


def test_operands_without_names_are_told_their_names(layer: Any) -> None:
    want = "pass operands by name, as in compiled(src, weight=..., bias=...)"
    assert said(lambda: layer(X, W, B)).startswith(f"1 tensor after `src` and `out` has no name: {want}")
    assert said(lambda: layer(X, None, W, B)).startswith("2 tensors after `src` and `out` have no name")
    assert want in said(lambda: layer.bind(weight=W)(X, None, B))
    assert want in said(lambda: layer.bind(weight=W, bias=B)(X, None, B))
    assert "pass operands by name" in said(lambda: layer(X, W, weight=W, bias=B))


@pytest.mark.parametrize(
    ("plan", "given", "says"),
    [
        (
            "f32[2x8] -> matmul(4)",
            (4, 8),
            "axes are swapped: pass it transposed, or write matmul(4, transposed=True) in the plan",
        ),
        ("f32[2x8] -> matmul(4, transposed=True)", (8, 4), "or write matmul(4) in the plan"),
        ("f32[2x3x8] -> matmul(4, batched=True)", (2, 4, 8), "batched=True, transposed=True"),
        (
            "f32[1x3x9x9] -> conv2d(8, kernel=3)",
            (3, 3, 3, 8),
            "axes are in another order: transpose it",
        ),
        ("f32[2x4] -> bias", (1, 4), "It has the right number of elements: reshape it to (4,)"),
        ("f32[2x4] -> bias", (5,), "got f32[5]; want f32[4]"),
    ],
)
def test_a_transposed_or_reshaped_operand_is_recognized(plan: str, given: tuple[int, ...], says: str) -> None:
    key = FusionPlan.parse(plan).operands[0].key
    printed = said(lambda: Arguments(plan, **{key: np.ones(given, np.float32)}))
    if "batched" in says:
        says = "matmul(4, transposed=True, batched=True)"
    assert says in printed


def test_folding_batch_normalization_is_answered_by_the_way_by_hand() -> None:
    plan = FusionPlan.parse("f32[1x2x5x5] -> conv2d(3, kernel=3) -> bias -> batch_norm -> relu")
    printed = said(lambda: fuseplan.compile(plan, "reference").bind(fold=True))
    assert "Batch normalization is not folded into a weight" in printed
    assert "k = scale / sqrt(variance + epsilon)" in printed
    drawn = np.random.default_rng(0).random
    given = {each.key: drawn(each.shape) for each in plan.operands}
    k = given["scale"] / np.sqrt(given["variance"] + 1e-5)
    folded = {"weight": given["weight"] * k[:, None, None, None]}
    folded["bias"] = (given["bias"] - given["mean"]) * k + given["shift"]
    by_hand = FusionPlan.parse("f32[1x2x5x5] -> conv2d(3, kernel=3) -> bias -> relu")
    src = drawn((1, 2, 5, 5))
    np.testing.assert_allclose(by_hand.reference(src, folded), plan.reference(src, given), rtol=1e-12)
    own = fuseplan.compile('f32[1x4] -> elementwise("x * fold", fold=2)', "reference")
    assert own.bind(fold=3)(np.ones((1, 4), np.float32))[0, 0] == 3


def test_a_number_that_fits_in_no_float_is_refused_wherever_one_is_taken() -> None:
    elu = fuseplan.compile("f32[2x3] -> elu", "reference")
    src = np.ones((2, 3), np.float32)
    for call in (
        lambda: elu(src, alpha=LARGE),
        lambda: elu.bind(alpha=LARGE),
        lambda: elu.bind()(src, alpha=LARGE),
        lambda: Arguments(elu.plan, alpha=LARGE),
        lambda: elu.plan.reference(src, {}, {"alpha": LARGE}),
        lambda: fuseplan.compile(elu.plan, "reference", accuracy=LARGE),
        lambda: fuseplan.compile(elu.plan, "cpu", tune=LARGE),
        lambda: FusionPlan.parse(f"f32[2x3] -> elu({LARGE})"),
        lambda: FusionPlan.parse("f32[2x3] -> elu(1e400)"),
        lambda: FusionPlan.parse("f32[2x3] -> elu(-1e400)"),
        lambda: FusionPlan.parse('f32[2x3] -> elementwise("x + 1e400")'),
        lambda: FusionPlan.from_json(elu.plan.to_json().replace("{}", '{"alpha": 1e400}')),
        lambda: leaf("x") * LARGE,
    ):
        printed = said(call)
        assert "float" in printed or "not negative" in printed
        assert len(printed) < 1_500


@pytest.mark.parametrize("tune", ["x", -1, float("nan"), float("inf"), True, [1]])
def test_a_budget_that_is_none_is_refused_before_anything_is_decided(tune: Any) -> None:
    for target in ("reference", "cpu"):
        with pytest.raises(ArgumentError, match=re.escape("want seconds, a number that is not negative")):
            fuseplan.compile("f32[2x3] -> relu", target, tune=tune)


@pytest.mark.parametrize("template", [3, b"direct", ["direct"]])
def test_a_template_that_is_no_text_is_refused(template: Any) -> None:
    with pytest.raises(ArgumentError, match="want a template's name"):
        fuseplan.compile("f32[2x3] -> relu", "cpu:avx2", template=template)


def test_a_candidate_without_its_knobs_is_refused() -> None:
    with pytest.raises(ArgumentError, match=re.escape("no candidate prints as 'pointwise('")):
        fuseplan.compile("f32[2x3] -> relu", "cpu:avx2", template="pointwise(")


def test_a_size_over_the_largest_is_told_so() -> None:
    printed = said(lambda: FusionPlan.parse("f32[1x3x9x9] -> conv2d(2, kernel=3, stride=2147483648)"))
    assert printed.startswith("conv2d: stride must be at most 2^31 - 1\n")


def test_nan_in_a_plan_is_refused_with_the_way_to_give_it() -> None:
    with pytest.raises(PlanError, match="NaN equals nothing: a call may give it"):
        fuseplan.LeakyRelu(float("nan"))
    assert np.isnan(fuseplan.compile("f32[1x1] -> elu", "reference")(-np.ones((1, 1), "f"), alpha=np.nan))


def test_counts_and_articles_agree_with_their_nouns(layer: Any) -> None:
    assert [a_thing(value) for value in KINDS] == [
        "a list",
        "an ndarray",
        "an int",
        "a str",
    ]
    assert "`src` is an int; want" in said(lambda: layer(1, weight=W, bias=B))
    one = fuseplan.explain("f32[2x3] -> relu", "cpu:avx2", threads=1)
    assert "1 thread," in str(one)
    target = parse_target("cpu:avx2")
    assert processor_of(target).endswith("threads" if target.threads > 1 else "thread")


def test_axes_without_parentheses_are_told_the_right_form() -> None:
    told = said(lambda: FusionPlan.parse("f32[2x3x4] -> amax(0, 2)"))
    assert "want amax((0, 2)), or keepdim=..." in told

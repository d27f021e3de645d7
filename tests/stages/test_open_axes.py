"""Open axes: their text, JSON and arithmetic, the plans with numbers, the refusals, the tensors of a call."""

from __future__ import annotations

import copy
import pickle
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, PlanError, Unsupported
from fuseplan.execution.stages import decide
from fuseplan.kernels.centre import Reduction
from fuseplan.kernels.lower import lower
from fuseplan.kernels.match import match
from fuseplan.language.extents import OPEN
from fuseplan.language.tensor import TensorSpec
from fuseplan.plans.plan import FusionPlan
from fuseplan.tensors.arrays import empty
from strategies import plans

PLANS = (
    "f16[*x512x768] -> linear(3072) -> bias -> gelu",
    "f32[*x64x56x56, nhwc] -> conv2d(32, kernel=3, padding=1) -> batch_norm -> add -> relu",
    "f16[*x*x768] -> linear(10) -> add",
    "f32[*x*x7] -> relu",
    "bf16[*x768] -> add -> layer_norm",
    "f32[*x8x3, strides=30:3:1] -> relu",
    "f32[*x9x7, strides=100:9:1 of bsc] -> linear(10)",
    "f32[4x*x6, sbc of bsc] -> relu",
)


@pytest.mark.parametrize("text", PLANS)
def test_an_open_plan_is_a_value(text: str) -> None:
    plan = FusionPlan.parse(text)
    assert str(plan) == text
    assert plan == FusionPlan.parse(text) == FusionPlan.from_json(plan.to_json())
    assert hash(plan) == hash(FusionPlan.parse(text))
    assert plan.is_open
    assert not plan.with_extents(*[3] * len(plan.src.open_axes)).is_open
    assert pickle.loads(pickle.dumps(plan.src)) == plan.src == copy.deepcopy(plan.src)
    assert str(plan.output) in plan.to_dot()


def test_none_and_a_star_are_open() -> None:
    assert TensorSpec((None, 5, 7)) == TensorSpec(("*", 5, 7)) == TensorSpec.parse("f32[*x5x7]")
    assert TensorSpec((None, 5, 7)).shape == (OPEN, 5, 7)


@given(plans())
def test_numbers_for_the_first_axis_give_the_plan(plan: FusionPlan) -> None:
    src = plan.src
    is_first = src.shape[0] > 1 and src.element_strides[0] == max(src.element_strides)
    if not is_first or prod(src.shape[1:]) == 1:
        return  # extents of 1 do not tell the order of the axes
    try:
        layout = src.layout_text if src.layout and src.is_layout_said else None
        spec = TensorSpec((None, *src.shape[1:]), src.dtype, layout, src.strides, src.names)
        opened = FusionPlan(spec, *plan.ops)
    except PlanError as error:
        assert "open" in str(error)  # noqa: PT017 - an operator that sums over the axis
        return
    assert opened.with_extents(src.shape[0]) == plan
    assert [each.key for each in opened.operands] == [each.key for each in plan.operands]


@pytest.mark.parametrize("attribute", ["size", "nbytes", "span"])
def test_no_number_is_made_of_an_open_extent(attribute: str) -> None:
    with pytest.raises(PlanError, match=r"with_extents"):
        getattr(TensorSpec((None, 5, 7)), attribute)
    with pytest.raises(PlanError, match="an extent is open"):
        prod((OPEN, 3))


@pytest.mark.parametrize(
    "text",
    ["f32[2x*x8] -> relu", "f32[*x3x*x5] -> relu", "f32[*x4x8, strides=1:9:50] -> relu"],
)
def test_open_axes_are_outermost(text: str) -> None:
    with pytest.raises(PlanError, match="outermost ones in memory") as refused:
        FusionPlan.parse(text)
    assert "^" in str(refused.value)


@pytest.mark.parametrize("extents", [(), (1, 2), (0,), (-3,), (2.5,), ("*",)])
def test_extents_are_positive_numbers(extents: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError):
        FusionPlan.parse(PLANS[0]).with_extents(*extents)


def test_extents_that_overflow_are_refused() -> None:
    with pytest.raises(PlanError, match="larger than memory can be"):
        FusionPlan.parse(PLANS[0]).with_extents(2**60)


@pytest.mark.parametrize(
    ("text", "operator", "words"),
    [
        ("f32[4x*, strides=1:4] -> relu", 0, "outermost"),
        ("f32[*x*x8x8] -> conv2d(4, kernel=3)", 0, "an extent is open"),
    ],
)
def test_what_needs_a_number_is_refused_with_the_plan(text: str, operator: int | None, words: str) -> None:
    with pytest.raises(PlanError, match=words) as refused:
        FusionPlan.parse(text)
    assert refused.value.operator == operator
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        ("f32[*x*x5] -> relu -> bias", 1),
        ("f32[*x*x5x6] -> matmul(3, batched=True)", 0),
        ("f32[*x5] -> relu -> batch_norm_training", 1),
        ("f32[4x*x6, sbc of bsc] -> linear(5)", None),
        ("f32[*x*] -> relu", None),
        ("f32[*x*x5x5] -> relu -> softmax(2)", 1),
        ("f32[*x5x*x3, nhwc] -> cumsum(-3)", 0),
        ("f32[*x5x*x3, nhwc] -> relu -> softmax(-3)", 1),
    ],
)
def test_a_kernel_has_one_open_extent_in_all_tensors(text: str, operator: int | None) -> None:
    with pytest.raises(Unsupported, match="open axes are rows or images") as refused:
        compile_plan(text)
    assert [each.operator for each in refused.value.refusals] == [operator]
    assert text in str(refused.value)


@pytest.mark.parametrize("text", ["f32[*x5x*x3, nhwc] -> softmax(1)", "f32[*x*x5x3] -> softmax(-2)"])
def test_an_axis_is_the_same_one_where_open_axes_are_one(text: str) -> None:
    """Axes that lie in front of an open one keep their number, and others are counted from the end."""
    centre = lower(match(FusionPlan.parse(text))).centre
    assert isinstance(centre, Reduction)
    assert centre.over == (1,)


def test_extents_are_not_in_the_kernels_text() -> None:
    """So that one entry of the cache serves all, whichever axes are open."""
    texts = {
        lower(match(FusionPlan.parse(f"f32[{shape}x768] -> linear(8) -> add"))).text
        for shape in ("*", "*x*", "*x*x*")
    }
    assert len(texts) == 1
    assert "*x768" in texts.pop()
    assert decide("f32[*x5] -> relu").kernel.text != decide("f32[1024x5] -> relu").kernel.text


# ---- calls, on the reference

ADDED = "f32[*x5x7] -> add -> relu"


def filled(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(prod(shape), dtype=np.float32).reshape(shape) - 9


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_operands_are_as_long_as_src(target: str) -> None:
    compiled = compile_plan(ADDED, target)
    np.testing.assert_array_equal(
        compiled(filled((3, 5, 7)), other=filled((3, 5, 7))), np.maximum(2 * filled((3, 5, 7)), 0)
    )
    both = r"`other` and `src` have open axes.*\n.*got 2 and 3; want 3 in `other`"
    with pytest.raises(ArgumentError, match=both):
        compiled(filled((3, 5, 7)), other=filled((2, 5, 7)))
    held = compiled.bind(other=filled((2, 5, 7)))
    assert held.missing == ()
    assert compiled.bind().missing == ("other",)
    np.testing.assert_array_equal(held(filled((2, 5, 7))), np.maximum(2 * filled((2, 5, 7)), 0))
    with pytest.raises(ArgumentError, match=both):
        held(filled((3, 5, 7)))
    with pytest.raises(ArgumentError, match="`out` does not match"):
        compiled(filled((3, 5, 7)), filled((2, 5, 7)), other=filled((3, 5, 7)))


@pytest.mark.parametrize("src", [filled((3, 5)), filled((3, 5, 8)), filled((3, 5, 7)).astype(np.float64)])
@pytest.mark.parametrize("rows", [slice(0), slice(None)])
def test_src_is_what_the_plan_takes(src: np.ndarray[Any, Any], rows: slice) -> None:
    with pytest.raises(ArgumentError, match=r"`src` does not match the plan(.|\n)*want f32\[.x5x7"):
        compile_plan("f32[*x5x7] -> relu", "reference")(src[rows])


@pytest.mark.parametrize("like", [np.asarray, torch.asarray])
def test_no_elements_give_no_elements(like: Any) -> None:
    compiled = compile_plan("f32[*x*x7, bsc] -> add -> linear(5) -> relu", "reference")
    for extents in ((0, 4), (4, 0), (0, 0)):
        src = like(np.zeros((*extents, 7), np.float32))
        made = compiled(src, other=src, weight=filled((5, 7)))
        assert type(made) is type(src)
        assert tuple(made.shape) == (*extents, 5)
        assert compiled(src, made, other=src, weight=filled((5, 7))) is made
    with pytest.raises(ArgumentError, match="`out` does not match"):
        compiled(filled((0, 4, 7)), filled((4, 0, 5)), other=filled((0, 4, 7)), weight=filled((5, 7)))


def test_any_number_of_extents_is_met() -> None:
    bound = compile_plan("f32[*x2] -> relu", "reference").bind()
    for rows in [*range(1, 90), 3, 1]:
        np.testing.assert_array_equal(bound(filled((rows, 2))), np.maximum(filled((rows, 2)), 0))
    assert copy.copy(bound) is bound
    assert repr(bound) == "<bound: f32[*x2] -> relu>"
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(bound)


def test_a_copy_has_operands_of_its_own() -> None:
    other = filled((2, 5, 7))
    bound = compile_plan(ADDED, "reference").bind(other=other)
    held = copy.deepcopy(bound)
    other[...] = -1000
    assert np.all(bound(filled((2, 5, 7))) == 0)
    assert held(filled((2, 5, 7))).max() > 0


@given(st.integers(1, 40), st.integers(1, 5))
def test_the_meaning_is_of_the_extents_of_src(rows: int, columns: int) -> None:
    plan = FusionPlan.parse("f32[*x*x3] -> linear(2) -> add")
    src, other = filled((rows, columns, 3)), filled((rows, columns, 2))
    weight = filled((2, 3))
    got = plan.reference(src, {"weight": weight, "other": other})
    np.testing.assert_allclose(got, src @ weight.T + other)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_beside_open_ones_are_of_each_element(rows: int) -> None:
    """The rows of layer norm are one axis, which has five times as many elements as the open one."""
    src = filled((rows, 5, 7))
    got = compile_plan("f32[*x5x7] -> layer_norm", "reference")(src, scale=filled((7,)), shift=filled((7,)))
    apart = src.astype(np.float64) - src.mean(-1, keepdims=True)
    want = apart / np.sqrt((apart**2).mean(-1, keepdims=True) + 1e-5) * filled((7,)) + filled((7,))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_empty_needs_numbers() -> None:
    with pytest.raises(PlanError, match="with_extents"):
        empty("f32[*x3]")


def test_kernels_whose_code_differs_have_texts_of_their_own() -> None:
    """The cache keeps kernels by their text: rows of `*x*x16` are those of `*x5x16` without a factor of 5."""
    plans = ("f32[*x*x16] -> layer_norm", "f32[*x5x16] -> layer_norm", "f32[*x7x16] -> layer_norm")
    assert len({str(decide(plan, "cpu").kernel) for plan in plans}) == len(plans)

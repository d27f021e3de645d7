"""Remedies: what a refusal says would do is done, to the letter, and the plan is taken."""

import inspect
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from fuseplan.backends import backend_of
from fuseplan.cli.commands import fuseplan
from fuseplan.compile import compile as compile_plan
from fuseplan.errors import ArgumentError, Unsupported
from fuseplan.execution.stages import Records, decide
from fuseplan.kernels.match import RULES
from fuseplan.kernels.target import KINDS, parse_target
from fuseplan.kernels.template import Template
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.reasons import Reason, Refusal, named
from fuseplan.ops.ranges import Within
from fuseplan.plans.plan import FusionPlan
from strategies import plans

ROWS = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())["refusal"]
SPLITS = (
    Reason.SEVERAL_CONTRACTIONS,
    Reason.SEVERAL_NORMALIZATIONS,
    Reason.RUNS,
    Reason.CONTRACTION_AND_NORMALIZATION,
    Reason.ONE_FEATURE,
    Reason.RESULT_AGAIN,
    Reason.BESIDE_SUMMARY,
    Reason.SUMMED_PRODUCT,
    Reason.ROW_TILES,
    Reason.SEVERAL_PARTS,
    Reason.PARTS_BESIDE,
    Reason.BLOCKS,
    Reason.RESULT_DTYPE,
    Reason.PARTS_OF_FEATURES,
    Reason.BESIDE_GRADIENT,
    Reason.OPERANDS_BETWEEN,
    Reason.BEFORE_ATTENTION,
    Reason.BESIDE_ATTENTION,
    Reason.BESIDE_SCAN,
    Reason.INDEX,
    Reason.LOOKUP,
)


def name(row: dict[str, Any]) -> str:
    return f"{row['code']} by {row['tried']}: {row['plan']}"


def templates_on(target: str) -> tuple[str, ...]:
    return tuple(each.name for each in backend_of(parse_target(target).backend).templates)


def refused_by(plan: FusionPlan | str, target: str, accuracy: Any = "default", **how: Any) -> Unsupported:
    with pytest.raises(Unsupported) as refused:
        decide(plan, target, accuracy=accuracy, **how)
    return refused.value


def laid_out(plan: FusionPlan, layout: str) -> FusionPlan:
    return FusionPlan(TensorSpec(plan.src.shape, plan.src.dtype, layout), *(step.op for step in plan))


def became(plan: FusionPlan, target: str, accuracy: Any) -> Iterator[Records]:
    """The plan, taken; or what became of it by the first remedy of its refusal."""
    with suppress(Unsupported):
        yield decide(plan, target, accuracy=accuracy)
        return
    yield from follow(plan, refused_by(plan, target, accuracy).refusals[0], target, accuracy)


def follow(plan: FusionPlan, refusal: Refusal, target: str, accuracy: Any) -> Iterator[Records]:
    """What became of the plan, by what the refusal says would do."""
    if refusal.reason in (*SPLITS, Reason.SAVED_PROLOGUE):
        at = refusal.operator or 0
        cut = at + (at == 0 or refusal.reason is Reason.SAVED_PROLOGUE)
        first = FusionPlan(plan.src, *(step.op for step in plan.steps[:cut]))
        yield from became(first, target, accuracy)
        rest = FusionPlan(first.output, *(step.op for step in plan.steps[cut:]))
        yield from became(rest, target, accuracy)
    elif refusal.reason is Reason.ACCURACY:
        yield decide(plan, target, accuracy=float(refusal.got or 0))
    elif refusal.reason is Reason.STRIDED_PROLOGUE:
        words = LAYOUTS[plan.src.rank] if plan.src.has_channel_names else (plan.src.names,)
        yield from (decide(laid_out(plan, each), target) for each in words)
    elif refusal.reason in (Reason.UNNAMED_DST, Reason.SCATTERED_ROWS, Reason.SUMMED_ROWS):
        yield decide(laid_out(plan, plan.src.names), target)
    elif refusal.reason in (Reason.ATTENTION_DTYPE, Reason.HEAD_SIZE):
        yield decide(plan, "cpu:avx2", template="attention")
    elif refusal.reason is Reason.PADDED_SRC:
        yield decide(plan, "triton:sm_90", template="product")
    elif refusal.reason in (Reason.OPEN_AXES, Reason.KNOWN_EXTENTS):
        yield decide(plan.with_extents(*[3] * len(plan.src.open_axes)), target)
    elif refusal.reason is Reason.RANGE:
        yield decide(FusionPlan(plan.src, *(op for op in plan.ops if not isinstance(op, Within))), target)
    elif refusal.reason is Reason.EMPTY_PLAN:
        yield decide(FusionPlan.parse(f"{plan.src} -> relu"), target)
    else:
        raise AssertionError(f"{refusal.code} is no reason to refuse a plan: {refusal.remedy}")


@pytest.mark.parametrize("row", [row for row in ROWS if row["refused"]], ids=name)
def test_the_first_remedy_of_a_refused_plan_works(row: dict[str, Any]) -> None:
    target, accuracy = row.get("target", "cpu:avx2"), row.get("accuracy", "default")
    refused = refused_by(row["plan"], target, accuracy)
    assert list(follow(FusionPlan.parse(row["plan"]), refused.refusals[0], target, accuracy))


@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90", "triton:sm_80", "triton:gfx942"])
@given(plan=plans(max_contractions=2, max_normalizations=2))
@settings(max_examples=40)
def test_the_first_remedy_of_any_plan_works(plan: FusionPlan, target: str) -> None:
    assert list(became(plan, target, "default"))


@pytest.mark.parametrize("row", [row for row in ROWS if not row["refused"]], ids=name)
def test_a_template_that_a_remedy_names_takes_the_plan(row: dict[str, Any]) -> None:
    target = row.get("target", "cpu:avx2")
    here = templates_on(target)
    if row["tried"] not in here:
        return  # a rule
    refusal = refused_by(row["plan"], target, template=row["tried"]).refusals[0]
    pointed = [each for each in named(refusal.remedy) if each in here]
    assert pointed or "Give src" in refusal.remedy
    taken = []
    for each in pointed:
        with suppress(Unsupported):
            taken.append(decide(row["plan"], target, template=each))
    assert taken or not pointed


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize(
    "plan",
    [
        "f16[2x16x6x6] -> relu",
        "f16[2x16x6x6] -> batch_norm_training",
        "f16[2x6x6x16, bchs of bhsc] -> matmul(16)",
        "f64[2x16x6x6] -> relu -> conv2d(16, kernel=3, stride=2)",
        "f32[2x16x6x6, nhwc] -> conv2d(16, kernel=1)",
        "f16[2x64] -> bias -> matmul(64)",
        "f16[2x64x8, bcs of bsc] -> matmul(64, batched=True)",
    ],
)
def test_every_template_that_refuses_says_what_takes_the_plan_here(plan: str, target: str) -> None:
    here = templates_on(target)
    taken = {each for each in here if takes(plan, target, each)}
    assert taken
    for each in here:
        if each not in taken:
            remedy = refused_by(plan, target, template=each).refusals[0].remedy
            assert set(named(remedy)) & taken or "Give src" in remedy, (each, remedy)


def takes(plan: str, target: str, template: str) -> bool:
    try:
        decide(plan, target, template=template)
    except Unsupported:
        return False
    return True


def test_remedies_name_rules_templates_and_arguments() -> None:
    known = set(RULES).union(*(templates_on(target) for target in KINDS))
    known |= vars(Template).keys() | inspect.signature(FusionPlan.backward).parameters.keys()
    assert {each for reason in Reason for each in named(reason.remedy)} <= known


@pytest.mark.parametrize(
    ("plan", "padded", "got"),
    [
        (
            "bf16[1x56x8x8, nhwc] -> conv2d(32, kernel=3, groups=2)",
            "bf16[1x64x8x8, nhwc] -> conv2d(32, kernel=3, groups=2)",
            "28 channels",
        ),
    ],
)
def test_what_is_to_be_padded_is_named(plan: str, padded: str, got: str) -> None:
    refusal = refused_by(plan, "triton:sm_90", template="hopper").refusals[0]
    assert (refusal.reason, got in str(refusal)) == (Reason.COPY_ALIGNMENT, True)
    assert takes(padded, "triton:sm_90", "hopper")


def test_layouts_are_only_asked_for_where_there_are_several() -> None:
    for plan in ("f32[8x8] -> matmul(8)", "f32[1x8x1x1] -> conv2d(8, kernel=1)"):
        for refusal in (each.refusal for each in decide(plan, "cpu:avx2").choice.considered):
            assert refusal is None or refusal.reason is not Reason.CHANNELS_LAST, plan


@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90"])
def test_the_command_that_lists_all_refusals_does(target: str) -> None:
    refused = refused_by('f32[1x8x8x8] -> elementwise("x*2") -> conv2d(8, kernel=3)', target, 1e-9)
    command = str(refused).rpartition("`fuseplan ")[2].partition("`")[0]
    printed = unfolded(CliRunner().invoke(fuseplan, shlex.split(command)).output)
    assert all(unfolded(f"{each.tried}: {each}") in printed for each in refused.refusals)


def unfolded(told: str) -> str:
    """A text without line breaks and without the gaps that set codes apart."""
    return " ".join(told.split())


def test_an_array_is_bound_by_its_name() -> None:
    compiled = compile_plan("f32[2x3] -> bias", "reference")
    bias, src = np.ones(3, np.float32), np.zeros((2, 3), np.float32)
    with pytest.raises(ArgumentError, match=r"want Arguments\(plan\), got an ndarray; operands by name"):
        compiled.bind(bias)  # type: ignore[arg-type]
    assert (compiled.bind(bias=bias)(src) == 1).all()


@pytest.mark.parametrize("src", ["f32[4x16]", "f32[2x8x16]", "f32[1x3x5x16]"])
@pytest.mark.parametrize("target", ["cpu:avx2", "triton:sm_90"])
def test_a_split_is_not_vain_where_its_parts_are_taken(src: str, target: str) -> None:
    """A layout for a template that would refuse the operator too is told behind it."""
    refused = refused_by(f"{src} -> linear(8) -> rotary", target)
    first = refused.refusals[0]
    assert (first.reason, first.operator) == (Reason.PARTS_OF_FEATURES, 1)
    assert refused.advice(first) == first.remedy
    before = str(refused).partition(first.code)[0]
    assert not [each for each in Reason if f"[{each.code}]" in before]

"""The first stage: the rules, and the one that makes one kernel of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from fuseplan.errors import Unsupported, with_article
from fuseplan.kernels.joined import are_joined, parts_fit
from fuseplan.kernels.representative import representative
from fuseplan.language.extents import OPEN
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.quantities import bytes_text
from fuseplan.messages.reasons import Claim, Reason, Refusal, claim, first_refusal
from fuseplan.op import Op
from fuseplan.ops import UNARY
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.ranges import RANGES, Within
from fuseplan.ops.scan import UnaryOp
from fuseplan.plans.dot import dot_text
from fuseplan.plans.plan import FusionPlan, as_plan
from fuseplan.plans.step import Step
from fuseplan.scalar import leaves_of

AnyOp = TypeVar("AnyOp", bound=Op)


@dataclass(frozen=True)
class Rule:
    """What is said of a rule, and what it refuses of centres of its kind.

    Attributes:
        description: the plan before and after, and what is saved.
        missing: the reason where a plan has no such centre; None of elementwise operators.
        beside: the reason where any other centre stands beside one.
    """

    description: str
    missing: Reason | None = None
    beside: Reason | None = None


def _of_unary(each: type[UnaryOp]) -> Rule:
    """The rule of operators of src alone along an axis."""
    return Rule(
        f"""One {each.kind} and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> {each.kind} -> elementwise*, each reading and writing memory
    after:  prologue -> {each.kind} -> epilogue, each element read once and written once
    saves:  writing and reading again, once each, the result of every operator but the last
    """,
        each.missing,
        each.beside,
    )


# The rules in order of preference. A rule has the name of its centre's kind.
RULES = {
    "contraction": Rule(
        """One contraction and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> contraction -> elementwise*, each reading and writing memory
    after:  prologue -> contraction -> epilogue; the prologue is applied as src is read, the epilogue in
    registers
    saves:  writing and reading again, once each, the result of every operator but the last

    Statistics of its features may stand behind it: a cross-entropy, a maximum, a sum. Nothing writes its
    result then.
    """,
        Reason.NO_CONTRACTION,
    ),
    "pointwise": Rule(
        """Elementwise operators, one after another, are one kernel.

    before: elementwise+, each reading and writing memory
    after:  one pass: an element is read, taken through all of them in a register, and written
    saves:  writing and reading again, once each, the result of every operator but the last
    """
    ),
    "normalization": Rule(
        """Normalizations of the same elements, and elementwise operators, are one kernel.

    before: elementwise* -> normalization -> elementwise*, each reading and writing memory, the normalization
    once more for each of its reductions
    after:  prologue -> reductions, as often as there are; then prologue -> element formula -> epilogue
    saves:  writing and reading again, once each, the result of every operator but the last
    """,
        Reason.NO_NORMALIZATION,
    ),
    "attention": Rule(
        """Attention and every elementwise operator behind it are one kernel.

    before: scores -> mask -> softmax -> product -> elementwise*, each reading and writing memory
    after:  a block of scores at a time, in registers; the epilogue is applied to the sums
    saves:  writing and reading again the scores of every query and key, at least twice each
    """,
        Reason.NO_ATTENTION,
        Reason.BESIDE_ATTENTION,
    ),
    **{each.kind: _of_unary(each) for each in UNARY},
}
_SEVERAL = {
    frozenset({"contraction"}): Reason.SEVERAL_CONTRACTIONS,
    frozenset({"normalization"}): Reason.SEVERAL_NORMALIZATIONS,
    frozenset({"contraction", "normalization"}): Reason.CONTRACTION_AND_NORMALIZATION,
}
SMALL = {"channel", "shared"}  # operands whose places do not follow from an element's


def conditions(rule: str, plan: FusionPlan) -> Iterator[Claim]:
    """The claims under which a rule applies: one centre of its kind, or several of the same elements.

    The first centre that those before it do not join is to blame: the operators in front are one kernel.
    """
    centres = [step for step in plan if step.op.kind != "elementwise"]
    yield claim(len(plan) > 0, Reason.EMPTY_PLAN)
    met = centres[0] if rule == "pointwise" and centres else None
    at, told = (met.index, f"{met.title} is {with_article(met.op.kind)}") if met else (None, None)
    yield claim(met is None, Reason.CENTRE_IN_POINTWISE, got=told, operator=at)
    parted = [step for step in plan if step.op.has_parts]
    yield claim(len(parted) < 2, Reason.SEVERAL_PARTS, operator=parted[1].index if parted[1:] else None)
    blocked = (step for step in plan if parted and any(each.per == "block" for each in step.operands))
    first = next(blocked, None)
    yield claim(first is None, Reason.BLOCKS, operator=first.index if first else None)
    yield from _range(plan, centres)
    yield _lookup_claim(plan, rule, parted)
    yield _index_claim(plan, rule, parted, centres)
    missing = RULES[rule].missing
    if missing is None:
        return
    yield claim(any(step.op.kind == rule for step in centres), missing)
    end = _unjoined(plan, centres)
    two = centres[end - 1 : end + 1] if end else []
    kinds = frozenset(step.op.kind for step in two)
    told = " comes after ".join(step.title for step in reversed(two))
    second = two[1].index if two else None
    is_summary = rule == "contraction" and is_summed(centres)
    for several, reason in _SEVERAL.items():
        yield claim(is_summary or kinds != several, reason, got=told, operator=second)
    if is_summary:
        yield from summary_claims(plan.steps, *centres)
    alone = ((kind, each.beside) for kind, each in RULES.items() if each.beside)
    for kind, beside in alone:
        yield claim(kind not in kinds, beside, got=told, operator=second)
    yield from _gradient(plan, centres)
    centre = centres[0].index if centres else len(plan)
    is_first = rule != "attention" or centre == 0
    yield claim(is_first, Reason.BEFORE_ATTENTION, got=None if is_first else plan[0].title, operator=centre)
    # A template may read the result of a contraction in parts.
    apart = [step for step in parted if rule != "contraction" or step.index < centre]
    if rule == "normalization" and parted and parts_fit(plan.steps, parted[0]):
        apart = []
    told, behind = (apart[0].title, max(apart[0].index, centre)) if apart else (None, None)
    yield claim(not apart, Reason.PARTS_BESIDE, got=told, operator=behind)


def _unjoined(plan: FusionPlan, centres: Sequence[Step]) -> int | None:
    """The first centre that is no part of one kernel with those before it; None where all are one."""
    if len(centres) < 2 or _are_one(plan.steps, centres):
        return None
    ends = range(1, len(centres) - 1)
    parts = ((plan.steps[: centres[end].index + 1], centres[: end + 1]) for end in ends)
    return next((end for end, part in zip(ends, parts, strict=True) if not _are_one(*part)), len(centres) - 1)


def _are_one(steps: Sequence[Step], centres: Sequence[Step]) -> bool:
    return {step.op.kind for step in centres} == {"normalization"} and are_joined(steps)


def _lookup_claim(plan: FusionPlan, rule: str, parted: Sequence[Step]) -> Claim:
    """Rows of a table are what a kernel of elements or of statistics reads as src."""
    found = [step for step in plan if step.op.looks_up]
    is_read = rule in ("pointwise", "normalization") and not parted
    wrong = next((step for step in found if step.index or not is_read), None)
    at, told = (wrong.index, wrong.title) if wrong else (None, None)
    return claim(wrong is None, Reason.LOOKUP, got=told, operator=at)


def _index_claim(plan: FusionPlan, rule: str, parted: Sequence[Step], centres: Sequence[Step]) -> Claim:
    """Nothing is counted in front of a contraction, nor beside parts but behind those of its result."""
    start = len(plan) if parted else 0
    if rule == "contraction":
        start = max((step.index for step in (*centres[:1], *parted)), default=0)
    early = next((step for step in plan.steps[:start] if step.indices), None)
    at, told = (early.index, early.title) if early else (None, None)
    return claim(early is None, Reason.INDEX, got=told, operator=at)


def _range(plan: FusionPlan, centres: Sequence[Step]) -> Iterator[Claim]:
    """The claims of ranges: the last operator; of a result in a range: no other tensor is as large."""
    early = next((step for step in plan.steps[:-1] if isinstance(step.op, RANGES)), None)
    at = early.index if early else None
    yield claim(early is None, Reason.RANGE, got=early and "operators behind it", operator=at)
    found = next((step for step in plan if isinstance(step.op, Within)), None)
    behind = plan.steps[centres[0].index + 1 if centres else 0 :] if found else ()
    large = [
        step
        for step in behind
        if step.results or step.indices or {each.per for each in step.operands} - SMALL
    ]
    told = large[0].title if large else None
    yield claim(not large, Reason.RANGE, got=told, operator=large[0].index if large else None)


def _gradient(plan: FusionPlan, centres: Sequence[Step]) -> Iterator[Claim]:
    """The claims of a weight's gradient: src and grad are the only tensors; rows are those of a matrix."""
    lone = next((step for step in centres if step.op.is_gradient), None)
    others = [step for step in plan if lone and step != lone]
    others = [each for each in others if each.operands or each.results or each.op.has_parts or each.indices]
    at, told = (max(lone.index, others[0].index), others[0].title) if lone and others else (None, None)
    yield claim(not others, Reason.BESIDE_GRADIENT, got=told, operator=at)
    is_even = lone is None or lone.op.reads != "rows" or row_stride(plan.src) is not None
    want = "evenly spaced rows, such as those of a dense tensor whose last axis is innermost"
    yield claim(
        is_even, Reason.SCATTERED_ROWS, got=str(plan.src), want=want, operator=lone.index if lone else None
    )


def row_stride(spec: TensorSpec) -> int | None:
    """Elements from a row to the next, where all rows are evenly spaced; None where they are not."""
    outer = [axis for axis in range(spec.rank) if axis != spec.channel_axis and spec.shape[axis] > 1]
    strides = [spec.element_strides[axis] for axis in outer]
    below = [spec.shape[inner] * step for inner, step in zip(outer[1:], strides[1:], strict=True)]
    if strides[:-1] != below:
        return None
    return strides[-1] if strides else spec.span


def rows_of(spec: TensorSpec) -> TensorSpec:
    """The same elements as one image: (1, rows, elements of a row).

    Raises:
        ValueError: the rows are not evenly spaced; the rule checks that they are.
    """
    stride = row_stride(spec)
    if stride is None:
        raise ValueError(f"the rows of {spec} are not evenly spaced")
    rows, inner = spec.size // spec.channels, spec.element_strides[spec.channel_axis]
    return TensorSpec((1, rows, spec.channels), spec.dtype, strides=(max(1, spec.span), stride, inner))


@dataclass(frozen=True)
class Match:
    """A plan's steps and the rule that fuses them.

    Attributes:
        steps: all of the plan's; of an open plan, those of its representative.
        refusals: one of each rule that was tried before it.
        opened: `src` and the keys of the tensors whose outermost extent each launch says; () where none is.
    """

    rule: str
    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...] = ()
    opened: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {' -> '.join(step.op.name for step in self.steps)}"

    def to_json(self) -> dict[str, object]:
        """The match as JSON values."""
        return {
            "rule": self.rule,
            "steps": [step.op.name for step in self.steps],
            "passed_over": [refusal.to_json() for refusal in self.refusals],
        }

    def to_dot(self) -> str:
        """The plan in Graphviz's language, with a frame around the operators of the kernel."""
        return dot_text(self.steps[0].src, self.steps, f"one kernel: {self.rule}")


def match(plan: FusionPlan) -> Match:
    """The first rule of RULES whose conditions hold for the plan.

    Raises:
        Unsupported: no rule applies; the error carries the refusal of each.
    """
    known, refusals = representative(plan) if plan.is_open else plan, list[Refusal]()
    for rule in RULES:
        refusal = first_refusal(conditions(rule, known), rule)
        if refusal is None:
            return Match(rule, known.steps, tuple(refusals), _opened(plan))
        refusals.append(refusal)
    refusals.sort(key=lambda refusal: -refusal.held)  # the rule that got furthest comes first
    raise Unsupported("no rule makes this plan one kernel", text=str(plan), refusals=refusals)


def _opened(plan: FusionPlan) -> tuple[str, ...]:
    """`src` and the keys of the operands and results with open axes."""
    if not plan.is_open:
        return ()
    given = (each for kind in (plan.operands, plan.results) for each in kind)
    return ("src", *(each.key for each in given if OPEN in each.shape))


def unfuse(plan: FusionPlan | str) -> tuple[FusionPlan, ...]:
    """The same operators one at a time: a plan of each, on the result of the operator before.

    Args:
        plan: the plan, or its text.

    Raises:
        PlanError: the text is no plan.
        ArgumentError: `plan` is neither a plan nor a text.
    """
    return tuple(FusionPlan(step.src, alone(step.op)) for step in as_plan(plan))


def alone(op: AnyOp) -> AnyOp:
    """The operator with tensors as operands, where it reads earlier values of its plan."""
    return cast(AnyOp, replace(cast(Any, op), **dict.fromkeys(op.again))) if op.again else op


def is_summed(centres: Sequence[Step]) -> bool:
    """Whether the second centre has statistics of the features that the first one makes, and is the last."""
    if len(centres) != 2:
        return False
    first, second = centres
    if first.op.kind != "contraction" or first.op.is_gradient or not isinstance(second.op, Normalization):
        return False
    return second.op.over(second.src) == (second.src.channel_axis,) and not second.op.split(second.src)


def summary_claims(steps: Sequence[Step], first: Step, second: Step) -> Iterator[Claim]:
    """What follows reads the numbers alone, and no step has places, parts or values to keep."""
    op, made = second.op, second.src
    assert isinstance(op, Normalization)  # by `is_summed`
    yield claim(made.channels > 1, Reason.ONE_FEATURE, operator=second.index)
    names = {key for _, key in second.statistics}
    again = [*second.formulas, *op.result_formulas(second.leaves, made).values()]
    own = [term for each in op.reductions(second.leaves, made) for term in each.expressions]
    is_once = not any("x" in leaves_of(each) for each in again)
    is_once = is_once and not any(names & leaves_of(each) for each in own)
    yield claim(is_once, Reason.RESULT_AGAIN, got=None if is_once else _told(made), operator=second.index)
    kept = [step for step in steps if step.op.has_parts or step.indices or (step.results and step != second)]
    at, told = (max(second.index, kept[0].index), kept[0].title) if kept else (None, None)
    yield claim(not kept, Reason.BESIDE_SUMMARY, got=told, operator=at)


def _told(made: TensorSpec) -> str:
    rows = made.size // made.channels
    return f"{rows} x {made.channels} elements, {bytes_text(made.nbytes)}, one pass to sum and one to write"

"""Statistics of a contraction's result: the claims under which nothing has to write that result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.quantities import bytes_text
from fuseplan.messages.reasons import Claim, Reason, claim
from fuseplan.ops.normalization import Normalization
from fuseplan.plans.step import Step
from fuseplan.scalar import leaves_of


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

"""Operators with statistics of the same elements, one behind the other, as one reduction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from fuseplan.errors import PlanError
from fuseplan.kernels.centre import Reduction
from fuseplan.kernels.kernel import Stage
from fuseplan.language.declarations import Result
from fuseplan.language.reduction import INDEX, Statistic
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.parts import Parted
from fuseplan.ops.ranges import Save
from fuseplan.plans.step import Step
from fuseplan.plans.text import operator_text
from fuseplan.scalar import Scalar, leaf, leaves_of, replaced


def centres(steps: Sequence[Step]) -> list[Step]:
    """The steps with statistics."""
    return [step for step in steps if isinstance(step.op, Normalization)]


def runs_of(steps: Sequence[Step]) -> tuple[int, int] | None:
    """The axis and the number of its runs, where the last operator's statistics are of runs of a cell."""
    *others, last = centres(steps)
    assert isinstance(last.op, Normalization)  # by its kind
    return last.op.split(last.src) if others else None


def statistics(steps: Sequence[Step]) -> tuple[Statistic, ...]:
    """Those of all operators, in order, over the value in front of the first of them.

    Every pass computes the value between two of them again, from the numbers of the first.

    Raises:
        PlanError: an expression would be too large.
    """
    listed = centres(steps)
    values, found = {"x": leaf("x")}, list[Statistic]()
    first = steps[0].index
    for step in steps[listed[0].index - first : listed[-1].index - first + 1]:
        if isinstance(step.op, Normalization):
            made = step.op.reductions(step.leaves, step.src)
            found += [
                replace(each, expressions=tuple(replaced(term, values) for term in each.expressions))
                for each in made
            ]
        if step is listed[-1]:
            break
        values["x"] = replaced(step.formulas[0], values)
        if isinstance(step.op, Save):
            values[step.op.key] = values["x"]
    return tuple(found)


def with_inner(
    made: Reduction, steps: Sequence[Step], places: Sequence[int], runs: tuple[int, int] | None
) -> Reduction:
    """The statistics of the last operator apart, where they are of runs of an axis."""
    names = {key for _, key in centres(steps)[-1].statistics}
    last = tuple(each for each in made.statistics if names & {*each.names})
    whole = tuple(each for each in made.statistics if each not in last)
    return replace(made, statistics=whole, inner=last, inner_over=(places[runs[0] + 1],)) if runs else made


def numbered(stage: Stage, step: Step, over: tuple[int, ...]) -> Stage:
    """The stage with the kernel's axes in the operator's text, where the operator tells any."""
    if not isinstance(step.op, Normalization):
        return stage
    return replace(stage, op_text=operator_text(step.op.numbered(over), parameters=False))


def results(step: Step) -> Iterator[tuple[Result, Scalar]]:
    """The results of an operator with statistics, and the formula of each."""
    assert isinstance(step.op, Normalization)  # by its kind
    formulas = step.op.result_formulas(step.leaves, step.src)
    return ((each, formulas[each.name]) for each in step.results if each.name in formulas)


def sums(step: Step) -> Iterator[tuple[Result, Scalar]]:
    """The results that are sums over the axes that stay, and the term of each element."""
    assert isinstance(step.op, Normalization)  # by its kind
    terms = step.op.sums(step.leaves, step.src)
    return ((each, terms[each.name]) for each in step.results if each.name in terms)


def are_joined(steps: Sequence[Step]) -> bool:
    """Whether several operators have statistics of the same elements, and all of them have src's shape."""
    first, *others = centres(steps)
    seen, whole = _seen(first), others[:-1] if runs_of(steps) else others
    if seen is None or any(_seen(each) != seen for each in whole):
        return False
    for last in others[len(whole) :]:  # of runs of the one axis that the first are over
        assert isinstance(last.op, Normalization)  # by `centres`
        if last.op.over(last.src) != seen or last.op.per != "cell" or last.op.removes(last.src):
            return False
    return _fit(steps)


def parts_fit(steps: Sequence[Step], parted: Step) -> bool:
    """Whether statistics and an operator that reads parts of an axis are one kernel.

    One part that is made of several in front of the statistics is like any other src. Several parts are
    elements of the same cells, in front of all statistics or behind them.
    """
    listed = centres(steps)
    if not listed or not all(cast(Normalization, each.op).per in ("row", "cell") for each in listed):
        return False
    if runs_of(steps) or any(True for each in listed for _ in sums(each)):
        return False
    first, last = listed[0], listed[-1]
    assert isinstance(first.op, Normalization)
    assert isinstance(parted.op, Parted)  # by the caller
    split, runs = parted.op.split(parted.src), first.op.split(first.src)
    if parted.index < first.index and split.makes == 1:
        return not runs or not split.interleaved or runs[0] != split.axis
    is_between = first.index < parted.index < last.index
    formulas = [first.formulas[0], *(term for each in statistics(steps) for term in each.expressions)]
    counts = any(INDEX in leaves_of(each) for each in formulas)
    return split.axis in (_seen(first) or ()) and not is_between and not counts


def _seen(step: Step) -> tuple[int, ...] | None:
    """The axes that an operator's statistics are over; None where these are not those of whole cells.

    None too where the operator makes one element of a cell: statistics behind it are of its elements alone.
    """
    op, src = step.op, step.src
    assert isinstance(op, Normalization)  # by the caller
    is_whole = op.per in ("row", "cell") and op.split(src) is None and step.dst.shape == src.shape
    is_whole = is_whole and not op.sums(step.leaves, src)
    return op.over(src) if is_whole else None


def _fit(steps: Sequence[Step]) -> bool:
    try:
        statistics(steps)
    except PlanError:
        return False
    return True

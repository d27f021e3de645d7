"""Open plans as plans with numbers: adjacent open axes become one, of an extent that stands for all of them.

The kernel is the one of that plan, but for the extent, which every launch is given. Templates and knobs are
chosen for the representative: 8 images, or as many as have 1024 rows. From there on the time of a launch
grows as its extent does, and the best choice changes no more.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuseplan.errors import PlanError, Unsupported
from fuseplan.language.declarations import Operand, Result
from fuseplan.language.extents import OPEN, opened
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.reasons import Claim, Reason, claim, first_refusal
from fuseplan.ops.normalization import Normalization
from fuseplan.ops.scan import UnaryOp
from fuseplan.plans.plan import FusionPlan
from fuseplan.plans.step import Step

IMAGES, ROWS = 8, 1024
_PROBE = 1021  # no usual extent


def representative(plan: FusionPlan) -> FusionPlan:
    """The plan with a number for its open axes, which it has.

    Raises:
        Unsupported: an operator sums over an open axis, or no single extent serves the open axes.
    """
    refusal = first_refusal(_claims(plan), "open axes")
    if refusal is not None:
        raise Unsupported("no kernel has these open axes", text=str(plan), refusals=[refusal])
    image = numbered(plan, 1).output
    rows = image.size // image.channels
    return numbered(plan, max(IMAGES, -(-ROWS // rows)))


def numbered(plan: FusionPlan, extent: int) -> FusionPlan:
    """The plan whose open axes are one axis of that extent.

    Raises:
        PlanError: an operator does not take so few axes.
    """
    src = plan.src
    first, *others = src.open_axes
    if not others:
        return plan.with_extents(extent)
    kept = [axis for axis in range(src.rank) if axis not in others]
    shape = [extent if axis == first else src.shape[axis] for axis in kept]
    inner = src.with_extents(*[1] * len(src.open_axes)).element_strides
    strides = [max(inner[axis] for axis in src.open_axes) if axis == first else inner[axis] for axis in kept]
    names = None if src.has_channel_names else "".join(src.names[axis] for axis in kept)
    return FusionPlan(TensorSpec(shape, src.dtype, strides=strides, names=names), *plan.ops)


def _claims(plan: FusionPlan) -> Iterator[Claim]:
    """What a plan with open axes has to hold; the last claims compare it with the plan where they are one."""
    axes = set(plan.src.open_axes)
    for step in plan:
        names = " and ".join(plan.src.names[axis] for axis in sorted(axes & _summed(step)))
        got = f"{step.title} sums over {names}"
        yield claim(not names, Reason.OPEN_AXES, got=got, operator=step.index)
        given: tuple[Operand | Result, ...] = (*step.operands, *step.results)
        for each in given:
            got = f"`{each.key}` has open axes, and is a second factor or has other axes first"
            is_first = each.per != "weight" and opened(each.shape) == tuple(range(len(axes)))
            yield claim(is_first or OPEN not in each.shape, Reason.OPEN_AXES, got=got, operator=step.index)
    try:
        merged = numbered(plan, _PROBE)
    except PlanError as error:
        got = f"as one axis: {error.what}"
        yield claim(False, Reason.OPEN_AXES, got=got, operator=error.operator)
        return
    is_first = merged.src.batch == _PROBE
    got = f"{plan.src}: another axis than c comes before the open ones, or c is open"
    yield claim(is_first, Reason.OPEN_AXES, got=got)
    for step, one in zip(plan, merged, strict=True):
        _, *more = step.src.open_axes
        same = {axis - sum(each < axis for each in more) for axis in _summed(step)}
        got = f"{step.title} numbers its axes past open ones: count them from the other end"
        yield claim(same == _summed(one), Reason.OPEN_AXES, got=got, operator=step.index)
        for mine, other in zip(_shapes(step), _shapes(one), strict=True):
            got = f"{step.title} has a tensor of {'x'.join(map(str, mine))}"
            is_alike = _as_one(mine, len(axes)) == other
            yield claim(is_alike, Reason.OPEN_AXES, got=got, operator=step.index)


def _summed(step: Step) -> set[int]:
    """The axes of src over which an operator sums."""
    if isinstance(step.op, Normalization):
        sums = step.op.sums(step.leaves, step.src)
        return set(range(step.src.rank) if sums else step.op.over(step.src))
    if isinstance(step.op, UnaryOp):
        return {step.op.axis_of(step.src)}
    return {step.src.channel_axis} if step.op.kind in ("contraction", "attention") else set()


def _shapes(step: Step) -> list[tuple[int, ...]]:
    """The shapes of everything that an operator is given or gives."""
    operands = [each.shape for each in step.operands]
    return [step.dst.shape, *operands, *(each.shape for each in step.results)]


def _as_one(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape whose `count` open axes are one, of the extent `_PROBE`; itself where it has none."""
    if shape.count(OPEN) != count:
        return shape
    place = shape.index(OPEN)
    return (*shape[:place], _PROBE, *(extent for extent in shape[place:] if extent is not OPEN))

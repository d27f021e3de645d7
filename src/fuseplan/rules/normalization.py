"""The rule around one operator with statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from fuseplan.ops.normalization import Normalization
from fuseplan.plan import FusionPlan
from fuseplan.reasons import Claim, Reason, claim
from fuseplan.rules.alone import alone
from fuseplan.tensor import TensorSpec


class NormalizationRule:
    """One normalization and every elementwise operator on either side of it are one kernel.

    before: elementwise* -> normalization -> elementwise*, each reading and writing memory, the normalization
    once more for each of its reductions
    after:  prologue -> reductions, as often as there are; then prologue -> element formula -> epilogue
    saves:  writing and reading again, once each, the result of every operator but the last
    """

    name: ClassVar[str] = "normalization"

    def conditions(self, plan: FusionPlan) -> Iterator[Claim]:
        """Exactly one operator is a normalization, and none a contraction; rows are one axis in memory."""
        yield from alone(plan, "normalization", Reason.NO_NORMALIZATION)
        rows = next(
            (step for step in plan if isinstance(step.op, Normalization) and step.op.per == "row"), None
        )
        if rows is None:
            return
        for spec in (plan.src, plan.output):
            words = "evenly spaced rows, such as those of a dense tensor whose last axis is innermost"
            is_even = row_stride(spec) is not None
            yield claim(is_even, Reason.UNEVEN_ROWS, got=str(spec), want=words, operator=rows.index)
        for step in plan:
            names = [each.name for each in step.operands if each.per == "activation"]
            told = f"{step.title} has {' and '.join(names)} for each element of an image"
            is_row = not names or plan.src.rank == 2
            yield claim(is_row, Reason.IMAGES_OF_ROWS, got=told, operator=step.index)


def row_stride(spec: TensorSpec) -> int | None:
    """Elements from a row to the next, where all rows are evenly spaced; None where they are not."""
    outer = [axis for axis in range(spec.rank) if axis != spec.channel_axis and spec.shape[axis] > 1]
    strides = [spec.element_strides[axis] for axis in outer]
    below = [spec.shape[inner] * step for inner, step in zip(outer[1:], strides[1:], strict=True)]
    if strides[:-1] != below:
        return None
    return strides[-1] if strides else spec.span

"""src as rows of a table: where an element of it lies follows from an index that the kernel reads.

In the kernel src has dst's shape and the table's dtype, and places of its own: a row begins at the place of
its index times `pitch`, a power of two above the features. So no two rows are one run, and a place tells the
index and the element of the row. Only the code that reads an element of src knows of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fuseplan.language.tensor import TensorSpec
from fuseplan.ops.embedding import Embedding
from fuseplan.plans.step import Step

K = TypeVar("K")


@dataclass(frozen=True)
class Lookup:
    """How src is read.

    Attributes:
        key: of the table among the operands.
        indices: the dtype of what lies where the caller has src.
        from_end: whether indices below zero count from the end.
        pitch: places of src from a row to the next.
    """

    key: str
    rows: int
    features: int
    indices: str
    from_end: bool
    pitch: int

    @property
    def text(self) -> str:
        """All fields in one line."""
        counted = ", below zero from the end" if self.from_end else ""
        return f"src is rows of {self.key}[{self.rows}x{self.features}] at {self.indices}{counted}"


def reads_rows(lowered: Callable[[Sequence[Step]], K]) -> Callable[[Sequence[Step]], K]:
    """What makes a kernel of steps, also of those whose first one looks up rows."""

    def looking(steps: Sequence[Step]) -> K:
        first, *others = steps
        if not isinstance(first.op, Embedding):
            return lowered(steps)
        op, pitch = first.op, 1 << first.op.features.bit_length()
        strides = (*(step * pitch for step in first.src.element_strides), 1)
        src = TensorSpec(first.dst.shape, first.dst.dtype, strides=strides, names=first.dst.names)
        kernel: Any = lowered([replace(first, src=src), *others])
        key = first.keys["weight"]
        lookup = Lookup(key, op.rows, op.features, first.src.dtype, op.from_end, pitch)
        operands = (replace(each, role="table") if each.key == key else each for each in kernel.operands)
        made: K = replace(kernel, lookup=lookup, operands=tuple(operands))
        return made

    return looking

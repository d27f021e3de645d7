"""Rows of a table, looked up by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan

from fuseplan.errors import PlanError
from fuseplan.language.declarations import Array, Beside, count, operand, word
from fuseplan.language.dtypes import FACTORS
from fuseplan.language.fields import refused
from fuseplan.language.layouts import ROWS
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.op import Given, Op, operator

INDICES = ("i32", "i64")
MOST_AXES = max(ROWS) - 1  # of indices: the rows are one more


@operator
class Embedding(Op):
    """weight[x]

    The row of a table for each index, as torch.nn.functional.embedding: src has the indices, i32 or i64, and
    dst one axis more, of `features` elements in the table's dtype. It is the first operator of a plan, whose
    kernel reads src's rows where the table has them: `i64[8x128] -> embedding(30522, features=768) -> add ->
    layer_norm` reads a row of the table once.

    An index is from 0 to rows - 1, with `from_end` also from -rows, counted from the end of the table as in
    NumPy and ONNX. On a CPU another index is an error that names it and its place. On a GPU its row is NaN,
    where torch stops the whole process; exported kernels for CPUs do the same. No memory beside the table is
    read.

    weight: (rows, features), of `dtype`, read where the caller has it. In gradients of torch's, the row
    `padding` has none, as with torch's padding_idx; -1 is no row. Its elements are read like any other's.
    """

    kind = "elementwise"
    looks_up = True
    torch = "embedding"
    onnx = "Gather"

    rows: int = count()
    features: int = count()
    dtype: str = word(FACTORS, default="f32")
    from_end: bool = False
    padding: int = -1
    weight = operand(lambda op, src: Beside(Dense((op.rows, op.features), op.dtype)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.padding < self.rows:
            raise refused(self.name, "padding", "must be a row of the table, or -1", got=self.padding)

    def check_dtype(self, src: TensorSpec) -> None:
        """Indices alone; a PlanError where src has numbers of another dtype."""
        if src.dtype not in INDICES:
            raise PlanError("embedding reads indices", got=src.dtype, want=" or ".join(INDICES))

    def output(self, src: TensorSpec) -> TensorSpec:
        """A row for each index, whatever the strides of the indices are.

        Raises:
            PlanError: no tensor has one axis more.
        """
        if not 0 < src.rank <= MOST_AXES:
            raise PlanError(f"embedding reads 1 to {MOST_AXES} axes of indices", got=str(src))
        return TensorSpec((*src.shape, self.features), self.dtype, ROWS[src.rank + 1])

    def meaning(self, given: Given) -> tuple[Array, dict[str, Array]]:
        """The rows; NaN where there is none."""
        where = given.by.table["where"]
        at = where(given.src < 0, given.src + self.rows * self.from_end, given.src)
        is_row = (at >= 0) & (at < self.rows)
        found = given.operands["weight"][given.by.whole(where(is_row, at, 0))]
        return where(is_row[..., None], found, nan), {}

    @classmethod
    def samples(cls) -> Iterator[tuple[str, Op]]:
        yield "i64[3x5]", cls(7, 5)
        yield "i32[2x3x7]", cls(11, 16)
        yield "i64[9x1]", cls(4, 3, from_end=True)

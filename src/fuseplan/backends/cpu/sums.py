"""The multiply-add loop of every contraction: accumulators in registers, and products added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from fuseplan.backends.cpu.ir import Builder, Index, Value
from fuseplan.backends.cpu.ir_text import BITS, element_of, lanes_of
from fuseplan.backends.cpu.loops import batches, pieces

UNROLL = 4  # steps of a sum that are written out
# The most steps between two additions to a longer sum. Sums of 3072 products erred 4.5 times as much as
# PyTorch's, and with blocks 0.8 times as much, in 1.01 of the time.
BLOCK = 192

# Of a few steps from one on: the vectors of a step, and the element of a step that belongs to a row, spread.
Operands = tuple[Callable[[int], Sequence[Value]], Callable[[int, int], Value]]


class Sums:
    """Rows of vectors of accumulators, all `first` at first."""

    def __init__(
        self, b: Builder, rows: int, vectors: int, first: float = 0.0, *, kind: str | None = None
    ) -> None:
        self.b, self.vectors, self.shape = b, vectors, (rows, vectors)
        self.kind = kind or b.vector
        self._rows = [[b.variable(self.kind, first) for _ in range(vectors)] for _ in range(rows)]

    def begin(self, line: Sequence[Value]) -> None:
        """Makes all rows of sums these."""
        for row in self._rows:
            for each, value in zip(row, line, strict=True):
                each.set(value)

    def values(self) -> list[list[Value]]:
        """The sums as they are now."""
        return [[each.get() for each in row] for row in self._rows]

    def get(self, row: int, vector: int) -> Value:
        """One of them as it is now."""
        return self._rows[row][vector].get()

    @contextmanager
    def open(self) -> Iterator[list[list[Value]]]:
        """The sums, for straight code to replace in the list; they are kept at its end."""
        values = self.values()
        yield values
        for row, ends in zip(self._rows, values, strict=True):
            for each, end in zip(row, ends, strict=True):
                each.set(end)


def add_products(
    sums: Sums,
    depth: Index,
    operands: Callable[[Index], Operands],
    product: Callable[[Value, Value, Value], Value] | None = None,
) -> None:
    """sums[row][j] += spread[step, row] * vectors[step][j] over `depth` steps, each product rounded once.

    A long sum is the sum of blocks' sums (pairwise summation of one level: Higham, Accuracy and Stability of
    Numerical Algorithms, 4.2), so fewer roundings are as large as the whole.

    `product(x, y, sum)` is another sum of a product.
    """
    b = sums.b
    if isinstance(depth, int) and depth > BLOCK and product is None:
        pieces(b, depth, _block(depth), partial(_add_block, sums, operands), name="block")
        return
    add, keep = product or b.fma, _keep_operand if product is None else _keep_order

    def steps(first: Index, count: int) -> None:
        vectors, spread = operands(first)
        with sums.open() as values:
            for step in range(count):
                if step:
                    b.keep_loads()
                line = vectors(step)
                for row, before in enumerate(values):
                    x = spread(step, row)
                    values[row] = [add(x, each, value) for each, value in zip(line, before, strict=True)]
                    keep(b, x, values[row])

    if isinstance(depth, int):
        pieces(b, depth, UNROLL, steps, name="k")
    else:
        batches(b, 0, depth, UNROLL, steps)


def _add_block(sums: Sums, operands: Callable[[Index], Operands], first: Index, depth: int) -> None:
    """Adds the sum of some steps, which has as many roundings as these, and as small ones."""
    part = Sums(sums.b, *sums.shape)
    add_products(part, depth, lambda step: operands(first + step))
    with sums.open() as values, part.open() as added:
        for row, other in zip(values, added, strict=True):
            row[:] = [one + each for one, each in zip(row, other, strict=True)]


def _block(depth: int) -> int:
    """Steps of a block: a divisor of the depth, where there is one of at least half of the most."""
    return next((size for size in range(BLOCK, BLOCK // 2, -UNROLL) if depth % size == 0), BLOCK)


def _keep_operand(b: Builder, x: Value, totals: Sequence[Value]) -> None:
    """Keeps an operand until a sum is made of it, which then stays in its register; it is no instruction.

    With AVX2, LLVM puts a sum into the register of an operand that nothing else reads. The sums of tiles with
    one vector were moved and spilled in every turn: `linear(8)` of 641 rows of 160 channels took 43 us, not
    28, on a Zen 3. Longer vectors have operands in memory, and more registers.
    """
    if len(totals) == 1 and _native(b, totals[0].type) == 32:
        b.line(f'call void asm sideeffect "", "x,x"({x.type} {x.name}, {totals[0].type} {totals[0].name})')


def _keep_order(b: Builder, _: Value, totals: Sequence[Value]) -> None:
    """Keeps the loads of the next row behind the sums of a row; it is no instruction.

    Where a product and its sum are two instructions, LLVM moves products to the front of the loop, and spills
    sums: 128 rows of 768 integers to 3072 took 4.33 to 4.43 ms on a Zen 3, with the order kept 4.11.
    """
    register = {32: "x,", 64: "v,"}.get(_native(b, totals[0].type))  # any of 16, or of 32
    if register:
        given = ", ".join(f"{each.type} {each.name}" for each in totals)
        b.line(f'call void asm sideeffect "", "{register * len(totals)}~{{memory}}"({given})')


def _native(b: Builder, kind: str) -> int:
    """The bytes of a vector of AVX2 or AVX-512, where it is one of the longest that the processor has."""
    features, nbytes = b.module.features, BITS[element_of(kind)] * lanes_of(kind) // 8
    longest = 64 if "+avx512f" in features else 32 if "+avx2" in features else 0
    return nbytes if nbytes == longest else 0

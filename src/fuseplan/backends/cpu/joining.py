"""How an element under a tap is joined to those of its window: its product is added, or as a pool says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from fuseplan.backends.cpu.dialect import table
from fuseplan.backends.cpu.frame import Frame
from fuseplan.backends.cpu.ir import Index, Value
from fuseplan.backends.cpu.ir_text import literal

Count = Index | tuple[int, ...]  # of all lanes, or of each


class Joining:
    """The join of a contraction's windows in a kernel that is being written.

    Attributes:
        weight: the address of the weight; of a pool, of nothing.
    """

    def __init__(self, frame: Frame) -> None:
        kernel, self.b = frame.kernel, frame.body
        self._pool = kernel.contraction.pool
        self._join = table(self.b)[self._pool.join] if self._pool else None
        self.weight = self.b.parameters[0]
        if self._pool is None:
            self.weight = frame.pointer("operand", kernel.weight.key)

    def join(self, x: Value, before: Value, weight: Callable[[], Value]) -> Value:
        """What is made of an element and of those before it; `weight` gives the element's factor."""
        return self._join(before, x) if self._join else self.b.fma(x, weight(), before)

    def finished(self, value: Value, counts: Callable[[], Iterable[Count]]) -> Value:
        """A window's value: of a mean, over the product of the counts along the axes."""
        if self._pool is None or not self._pool.counted:
            return value
        b = self.b
        lanes, rest = [1] * b.lanes, None
        for count in counts():
            if isinstance(count, Value):
                rest = count if rest is None else rest * count
            else:
                each = (count,) * b.lanes if isinstance(count, int) else count
                lanes = [one * other for one, other in zip(lanes, each, strict=True)]
        numbers = (literal(1 / count if count else inf, b.element) for count in lanes)
        value = value * Value(b, b.vector, f"<{', '.join(f'{b.element} {number}' for number in numbers)}>")
        return value if rest is None else value / b.splat(b.convert("uitofp", rest, b.element))

"""The axes that the parts of a formula depend on: the channel's, others, or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from fuseplan.kernels.kernel import KernelOperand
from fuseplan.language.parts import part_of
from fuseplan.scalar import INDEXED, Scalar, leaves_of

SHARED, CHANNEL, EVERYWHERE = frozenset[int](), frozenset({1}), frozenset({0, 1})


@dataclass(frozen=True)
class Dependence:
    """Tells it for formulas over the leaf `x`, parameters, and these operands by key.

    `values` are the names of earlier values, which differ between positions as `x` does.
    """

    operands: Mapping[str, KernelOperand]
    values: Collection[str] = ()
    _met: dict[Scalar, frozenset[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def axes(self, node: Scalar) -> frozenset[int]:
        """The axes that the value depends on; of x and what lies as it does, `EVERYWHERE`."""
        if node not in self._met:
            self._met[node] = SHARED.union(*(self._axes(part_of(leaf)[0]) for leaf in leaves_of(node)))
        return self._met[node]

    def _axes(self, name: str) -> frozenset[int]:
        operand = self.operands.get(name)
        if operand is not None:
            return CHANNEL if operand.is_channel else EVERYWHERE if operand.axes else SHARED
        return EVERYWHERE if name in ("x", *self.values) else SHARED

    def varies(self, node: Scalar) -> bool:
        """Whether the value differs between positions of one channel."""
        return not self.axes(node) <= CHANNEL

    def channelled(self, node: Scalar) -> bool:
        """Whether the value differs between channels, and is the same at all positions of one."""
        return self.axes(node) == CHANNEL

    def invariants(self, node: Scalar) -> Iterator[Scalar]:
        """The largest numbers that are the same for all positions of a channel; conditions are none."""
        yield from largest(node, self._is_invariant)

    def inputs(self, node: Scalar) -> Iterator[Scalar]:
        """What is no number: the largest parts that `invariants` gives, and the leaves that vary.

        An index is none of them: what is made of it is. A condition is no number either.
        """
        found = largest(node, lambda n: self._is_invariant(n) or not children(n) or n.fn in INDEXED)
        yield from (each for each in found if each.fn != "const")

    def _is_invariant(self, node: Scalar) -> bool:
        return not (self.varies(node) or node.is_condition)


def largest(root: Scalar, is_one: Callable[[Scalar], bool]) -> Iterator[Scalar]:
    """The first parts on each way down that are one, each once: a shared part is met on many ways."""
    left, met = [root], {root}
    while left:
        node = left.pop()
        if is_one(node):
            yield node
            continue
        new = [child for child in dict.fromkeys(children(node)) if child not in met]
        met.update(new)
        left += reversed(new)


def children(node: Scalar) -> tuple[Scalar, ...]:
    """The expressions that a node is made of; none for a leaf and a number."""
    return tuple(child for child in node.args if isinstance(child, Scalar))

"""The axes that the parts of a formula depend on: the channel's, others, or none."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fuseplan.kernels.kernel import KernelOperand
from fuseplan.language.parts import part_of
from fuseplan.scalar import INDEXED, Scalar

SHARED, CHANNEL, EVERYWHERE = frozenset[int](), frozenset({1}), frozenset({0, 1})


@dataclass(frozen=True)
class Dependence:
    """Tells it for formulas over the leaf `x`, parameters, and these operands by key.

    `values` are the names of earlier values, which differ between positions as `x` does.
    """

    operands: Mapping[str, KernelOperand]
    values: Collection[str] = ()

    def axes(self, node: Scalar) -> frozenset[int]:
        """The axes that the value depends on; of x and what lies as it does, `EVERYWHERE`."""
        if node.fn == "leaf":
            name = part_of(str(node.args[0]))[0]
            operand = self.operands.get(name)
            if operand is not None:
                return CHANNEL if operand.is_channel else EVERYWHERE if operand.axes else SHARED
            return EVERYWHERE if name in ("x", *self.values) else SHARED
        return SHARED.union(*map(self.axes, children(node)))

    def varies(self, node: Scalar) -> bool:
        """Whether the value differs between positions of one channel."""
        return not self.axes(node) <= CHANNEL

    def channelled(self, node: Scalar) -> bool:
        """Whether the value differs between channels, and is the same at all positions of one."""
        return self.axes(node) == CHANNEL

    def invariants(self, node: Scalar) -> Iterator[Scalar]:
        """The largest numbers that are the same for all positions of a channel; conditions are none."""
        if not (self.varies(node) or node.is_condition):
            yield node
            return
        for child in children(node):
            yield from self.invariants(child)

    def inputs(self, node: Scalar) -> Iterator[Scalar]:
        """What is no number: the largest parts that `invariants` gives, and the leaves that vary.

        An index is none of them: what is made of it is. A condition is no number either.
        """
        is_kept = not self.varies(node) and not node.is_condition
        if is_kept or not children(node) or node.fn in INDEXED:
            yield from () if node.fn == "const" else (node,)
            return
        for child in children(node):
            yield from self.inputs(child)


def children(node: Scalar) -> tuple[Scalar, ...]:
    """The expressions that a node is made of; none for a leaf and a number."""
    return tuple(child for child in node.args if isinstance(child, Scalar))

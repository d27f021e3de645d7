"""What the parts of a formula depend on: the position, the channel, or neither."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fuseplan.kernel import KernelOperand
from fuseplan.parts import part_of
from fuseplan.scalar import Scalar


@dataclass(frozen=True)
class Dependence:
    """Tells it for formulas over the leaf `x`, parameters, and these operands by key.

    `values` are the names of earlier values, which differ between positions as `x` does.
    """

    operands: Mapping[str, KernelOperand]
    values: Collection[str] = ()

    def varies(self, node: Scalar) -> bool:
        """Whether the value differs between positions of one channel."""
        if node.fn == "leaf":
            name = part_of(str(node.args[0]))[0]
            axes = ("element", "activation", "position", "axes", "blocks")
            return name in ("x", *self.values) or self._per(node) in axes
        return any(map(self.varies, children(node)))

    def channelled(self, node: Scalar) -> bool:
        """Whether the value differs between channels."""
        if node.fn == "leaf":
            return self._per(node) == "channel"
        return any(map(self.channelled, children(node)))

    def invariants(self, node: Scalar) -> Iterator[Scalar]:
        """The largest parts that are the same for all positions of a channel."""
        if not self.varies(node):
            yield node
            return
        for child in children(node):
            yield from self.invariants(child)

    def inputs(self, node: Scalar) -> Iterator[Scalar]:
        """What is no number: the largest parts that `invariants` gives, and the leaves that vary."""
        if not self.varies(node) or not children(node):
            yield from () if node.fn == "const" else (node,)
            return
        for child in children(node):
            yield from self.inputs(child)

    def _per(self, leaf: Scalar) -> str:
        operand = self.operands.get(part_of(str(leaf.args[0]))[0])
        return operand.per if operand else ""


def children(node: Scalar) -> tuple[Scalar, ...]:
    """The expressions that a node is made of; none for a leaf and a number."""
    return tuple(child for child in node.args if isinstance(child, Scalar))

"""Regions: the formulas that read a value and each other, as long as one value leaves them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from fuseplan.errors import PlanError
from fuseplan.graph.formulas import JOINED, Axes, formula_of
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node, told
from fuseplan.graph.ops import Convert
from fuseplan.graph.why import Reason, Why
from fuseplan.op import Elementwise
from fuseplan.ops.conversion import Dequantize
from fuseplan.scalar import Scalar, fold, leaf

X = leaf("x")
OUTSIDE = "@"  # in front of the names of other values, so that none is taken for x
MOST_NODES = 64  # of a region: a longer chain of formulas is several kernels


@dataclass(frozen=True)
class Applied:
    """An operator of plans in a region: that its expression is the operator of `src` with these operands."""

    op: Elementwise
    src: Scalar
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """The formulas from a value x to the value that leaves them.

    Attributes:
        start: the value x.
        head: the value that leaves the region; `start` where it is empty.
        nodes: in an order of execution.
        expression: of head, over x and the other values that the region reads, each as `@` and its name.
        axes: of those, the axes of head along which each has more than one element.
        applied: operators of plans, by their expression.
        ended: why the region goes no further.
        claimed: ids of nodes that other plans compute.
    """

    start: str
    head: str
    nodes: tuple[Node, ...]
    expression: Scalar
    axes: dict[str, Axes]
    applied: dict[Scalar, Applied]
    ended: Reason
    claimed: Collection[int]


@dataclass
class _Growth:
    """What is known while a region grows from a value."""

    graph: Graph
    start: str
    claimed: Collection[int]
    is_inside: bool  # x is made by the region's anchor, so that it must not leave either
    formulas: dict[str, Scalar] = field(default_factory=dict)  # of the values that a region asked for
    nodes: dict[str, Node] = field(default_factory=dict)  # by result, in order
    axes: dict[str, Axes] = field(default_factory=dict)
    applied: dict[Scalar, Applied] = field(default_factory=dict)
    refused: dict[int, Reason] = field(default_factory=dict)  # by node: why it is not in the region

    def grow(self) -> None:
        """Takes nodes in the order of the graph."""
        places = self.graph.places
        ahead = [places[id(node)] for node in self.graph.readers[self.start]]
        heapq.heapify(ahead)
        seen: set[int] = set()
        while ahead and len(self.nodes) < MOST_NODES:
            node = self.graph.nodes[heapq.heappop(ahead)]
            if id(node) in seen:
                continue
            seen.add(id(node))
            reason = self._take(node)
            if reason is not None:
                self.refused[id(node)] = reason
                continue
            for reader in self.graph.readers[node.outputs[0]]:
                heapq.heappush(ahead, places[id(reader)])

    def _take(self, node: Node) -> Reason | None:
        """Takes a node, or says why not."""
        if id(node) in self.claimed:
            return Reason(Why.CLAIMED, told(node))
        formula = formula_of(self.graph, node)
        if formula is None:
            return Reason(Why.CONSUMER, told(node))
        types = self.graph.types
        inner = [name for name in node.inputs if name == self.start or name in self.nodes]
        whole = types[self.start]
        if any(types[name].shape != whole.shape for name in (*inner, node.outputs[0])):
            return Reason(Why.BROADCAST, f"{told(node)} makes {types[node.outputs[0]]} of {whole}")
        outer = {name: axes for name, axes in formula.axes.items() if name not in inner}
        if any(self.axes.get(name, axes) != axes for name, axes in outer.items()):
            return Reason(Why.BROADCAST, f"{told(node)} reads a value along other axes than before it")
        self.axes |= outer
        self.nodes[node.outputs[0]] = node
        return None

    def _is_composed(self, node: Node) -> bool:
        """Whether an element of a node's result has an expression, over x and other values outside."""
        if node.outputs[0] in self.formulas:
            return True
        formula = formula_of(self.graph, node)
        assert formula is not None  # as it was taken
        meanings = {name: self.formulas.get(name, leaf(OUTSIDE + name)) for name in formula.axes}
        try:
            made = fold(formula.expression, meanings, JOINED)
        except PlanError:
            self.refused[id(node)] = Reason(Why.FORMULA, f"{told(node)} makes it too large for a kernel")
            return False
        is_changed = made != self.formulas.get(node.inputs[0])  # not by identity
        if formula.op is not None and node.inputs[0] in self.formulas and is_changed:
            self.applied[made] = Applied(formula.op, self.formulas[node.inputs[0]], node.inputs[1:])
        self.formulas[node.outputs[0]] = made
        return True

    def regions(self) -> Iterator[Region]:
        """The regions from the largest to the empty one, each with one value that leaves it."""
        self.formulas[self.start] = X
        for head in self._heads():
            inside = self._within(head)
            closed = [name for name in (self.start, *inside) if name != head][not self.is_inside :]
            is_left = any(self.graph.leaves(name, inside.values()) for name in closed)
            if not is_left and all(map(self._is_composed, inside.values())):
                yield self._region(head, tuple(inside.values()))
        yield self._region(self.start, ())

    def _heads(self) -> list[str]:
        """The values that everything passes which follows from some reader of x, the last first.

        Each value is followed by the first one that all of its ways pass; by none, where one way leaves.
        """
        places = {name: place for place, name in enumerate(self.nodes)}
        following = dict[str, str]()
        for name in reversed(self.nodes):
            readers = self.graph.readers[name]
            made = {each.outputs[0] for each in readers}
            is_left = name in self.graph.outputs or not made <= following.keys()
            while not is_left and len(made) > 1:
                first = min(made, key=places.__getitem__)
                made = made - {first} | {following[first]}
                is_left = "" in made
            following[name] = "" if is_left or not made else made.pop()
        found = set[str]()
        for reader in self.graph.readers[self.start]:
            head = reader.outputs[0]
            while head in following and head not in found:
                found.add(head)
                head = following[head]
        return sorted(found, key=places.__getitem__, reverse=True)

    def _within(self, head: str) -> dict[str, Node]:
        """The nodes between x and head, by result, in order."""
        needed, ahead = set[str](), [head]
        while ahead:
            name = ahead.pop()
            if name in self.nodes and name not in needed:
                needed.add(name)
                ahead += self.nodes[name].inputs
        return {name: node for name, node in self.nodes.items() if name in needed}

    def _region(self, head: str, nodes: tuple[Node, ...]) -> Region:
        read = {name for node in nodes for name in node.inputs}
        axes = {name: axes for name, axes in self.axes.items() if name in read}
        made, ended = self.formulas[head], self._ended(head)
        return Region(self.start, head, nodes, made, axes, self.applied, ended, self.claimed)

    def _ended(self, head: str) -> Reason:
        """Why the region that ends at head goes no further."""
        if head in self.graph.outputs:
            return Reason(Why.GRAPH_OUTPUT, head)
        readers = self.graph.readers[head]
        if len(readers) > 1:
            return Reason(Why.EXTERNAL_CONSUMER, " and ".join(map(told, readers[:3])))
        if not readers:
            return Reason(Why.CONSUMER, "nothing reads it")
        return self.refused.get(id(readers[0])) or Reason(Why.CONSUMER, told(readers[0]))


def is_widened(graph: Graph, name: str) -> bool:
    """Whether a value is another one with more bits, which its readers convert as they read the other."""
    node = graph.made_by.get(name)
    is_converted = node is not None and (isinstance(node.op, Convert) or node.op.word == Dequantize.name)
    if node is None or not is_converted or name in graph.outputs:
        return False
    return graph.types[name].nbytes > graph.types[node.inputs[0]].nbytes


def regions(graph: Graph, start: str, claimed: Collection[int], *, is_inside: bool) -> Iterator[Region]:
    """The regions that begin at a value, largest first; the last is empty.

    Args:
        claimed: ids of nodes that other plans compute.
        is_inside: the value is made in the same kernel, so that nothing else may read it.
    """
    growth = _Growth(graph, start, claimed, is_inside)
    growth.grow()
    return growth.regions()

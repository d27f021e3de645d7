"""Gated products: gate and value as the halves of one product, which a model has as two or as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from fuseplan.errors import PlanError
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Foreign, Slice
from fuseplan.graph.region import Region, regions
from fuseplan.graph.write import Stage, Unwritten, joined
from fuseplan.op import Elementwise
from fuseplan.ops.activation import Identity
from fuseplan.ops.affine import Bias, Mul
from fuseplan.ops.matmul import Linear, Matmul
from fuseplan.ops.parts import Glu

Behind = Callable[[Node, Region], list[Stage]]


@dataclass(frozen=True)
class Gated:
    """A product with `glu` behind it.

    Attributes:
        stages: the product, and the operators behind it.
        nodes: that they compute, besides those of the first product and its region.
        end: the region whose head is the result.
        apart: the operators of each plan that computes a part of them otherwise.
    """

    stages: list[Stage]
    nodes: tuple[Node, ...]
    end: Region
    apart: tuple[list[Stage], ...]


def of_two(
    graph: Graph, node: Node, region: Region, claimed: Collection[int], behind: Behind
) -> Iterator[Gated]:
    """Two products of one value whose regions one product of both ends.

    Nothing else reads their values; the weights have one shape and dtype, and both have a bias or none.

    Args:
        node: the first product; its region multiplies with the other's result.
        region: behind it.
        claimed: ids of nodes that other plans compute.
        behind: the operators of a product and the region behind it.
    """
    for other in graph.readers[node.inputs[0]]:
        if other is node or id(other) in claimed or other.op != node.op or other.inputs[0] != node.inputs[0]:
            continue
        for inner in _read_by(graph, region, other.outputs[0], claimed):
            with contextlib.suppress(Unwritten):
                one, two = behind(node, region), behind(other, inner)
                stages = _joined(graph, one, two, inner.head)
                yield from [Gated(stages, (other, *inner.nodes), region, (one, two))] if stages else ()


def of_halves(
    graph: Graph,
    region: Region,
    stages: list[Stage],
    claimed: Collection[int],
    write: Callable[[Region], list[Stage]],
) -> Iterator[Gated]:
    """A product of which nothing is read but two halves, one of which gates the other.

    Args:
        region: behind the product.
        stages: of the product and the region.
        claimed: ids of nodes that other plans compute.
        write: the operators of a region.
    """
    made = graph.types[region.head]
    axis, half = made.rank - 1, (made.shape or (0,))[-1] // 2
    apart = [Slice(axis, 0, half), Slice(axis, half, 2 * half)]
    turned = [Slice(axis, 0, 2 * half, 2), Slice(axis, 1, 2 * half, 2)]
    views = [each for each in graph.readers[region.head] if not _is_dead(graph, each)]
    found = [each.op for each in views]
    if region.head in graph.outputs or not any(found in (ops, ops[::-1]) for ops in (apart, turned)):
        return
    if found[::-1] in (apart, turned):
        views.reverse()
    for one in regions(graph, views[0].outputs[0], claimed, is_inside=True):
        for two in _read_by(graph, one, views[1].outputs[0], claimed):
            with contextlib.suppress(Unwritten):
                behind = _gate(write(one), write(two), two.head, is_interleaved=found[0] in turned)
                nodes = (*views, *one.nodes, *two.nodes)
                yield from [Gated([*stages, *behind], nodes, one, (stages, behind))] if behind else ()


def _read_by(graph: Graph, region: Region, start: str, claimed: Collection[int]) -> Iterator[Region]:
    """The regions from a value whose results another region alone reads."""
    inside = {id(each) for each in region.nodes}
    for found in regions(graph, start, claimed, is_inside=True):
        readers = {id(each) for each in graph.readers[found.head]}
        if readers and readers <= inside and found.head not in graph.outputs:
            yield found


def _is_dead(graph: Graph, node: Node) -> bool:
    """Whether nothing reads what another library's operator makes, such as the ranges of a split."""
    made = [name for name in node.outputs if graph.readers.get(name) or name in graph.outputs]
    return isinstance(node.op, Foreign) and not made


def _joined(graph: Graph, one: list[Stage], two: list[Stage], head: str) -> list[Stage] | None:
    """The stages of two products as those of one, where the first multiplies with the other's result."""
    op = one[0].op
    count = 2 if isinstance(one[1].op, Bias) else 1
    if [each.op for each in one[:count]] != [each.op for each in two[:count]]:
        return None
    behind = _gate(one[count:], two[count:], head)
    if behind is None or not isinstance(op, Linear | Matmul):
        return None
    made = []
    for mine, other in zip(one[:count], two[:count], strict=True):
        ((key, bound),) = mine.operands.items()
        whole = joined(graph, (bound, other.operands[key]), 0 if key == "bias" or op.transposed else 1)
        if whole is None:
            return None
        made.append(Stage(mine.op, {key: whole}))
    return [replace(made[0], op=replace(op, features=2 * op.features)), *made[1:], *behind]


def _gate(
    one: Sequence[Stage], two: Sequence[Stage], head: str, *, is_interleaved: bool = False
) -> list[Stage] | None:
    """`glu` and the stages behind it, for stages that multiply with the result of others."""
    places = [place for place, each in enumerate(one) if head in filter(_is_name, each.operands.values())]
    if len(places) != 1 or not isinstance(one[places[0]].op, Mul):
        return None
    before = [*one[: places[0]], *two]
    if len(before) > 1 or any(each.operands for each in before):
        return None
    activation = before[0].op if before else Identity()
    if not isinstance(activation, Elementwise):
        return None
    try:
        op = Glu(activation, gate="second" if two else "first", interleaved=is_interleaved)
    except PlanError:  # glu takes no such activation
        return None
    return [Stage(op), *one[places[0] + 1 :]]


def _is_name(bound: object) -> bool:
    return isinstance(bound, str)

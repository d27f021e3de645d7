"""What stands in front of an operator with statistics in its kernel: formulas, and a lookup of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from fuseplan.graph.formulas import formula_of
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node
from fuseplan.graph.region import regions
from fuseplan.graph.rules import Rule
from fuseplan.graph.write import Stage, Unwritten, written
from fuseplan.language.tensor import TensorSpec

Front = tuple[str, tuple[Node, ...], list[Stage]]  # the value that is read, nodes and operators


def fronts(
    graph: Graph,
    name: str,
    pieces: tuple[Node, ...],
    spec: TensorSpec,
    claimed: Collection[int],
    known: Collection[str],
    rules: Sequence[Rule],
) -> Iterator[Front]:
    """What may stand in front of an operator that alone reads a value: the most first, at last nothing.

    Args:
        spec: the value as the operator reads it.
        claimed: ids of nodes that other plans compute.
        known: constants and weights.
    """
    found: list[Front] = []
    if not graph.leaves(name, pieces) and name in graph.made_by:
        starts = _before(graph, graph.made_by[name], known)
        grown = (each for start in starts for each in regions(graph, start, claimed, is_inside=False))
        for region in (each for each in grown if each.head == name):
            with contextlib.suppress(Unwritten):
                found.append((region.start, region.nodes, written(graph, region, spec, rules)))
    found.append((name, (), []))
    for front in found:
        yield from _with_lookup(graph, front, pieces, claimed, known)
    yield from found


def spines(graph: Graph, node: Node, known: Collection[str]) -> list[str]:
    """The inputs that may be src of a plan of formulas."""
    whole = graph.types[node.outputs[0]].shape
    names = dict.fromkeys(name for name in filter(None, node.inputs) if graph.types[name].shape == whole)
    return [name for name in names if name not in known]


def src_of(graph: Graph, name: str, stages: Sequence[Stage], src: TensorSpec) -> TensorSpec:
    """The input of a plan of these operators: `src` in the value's own dtype, or indices."""
    read = graph.types[name]
    return read.spec() if stages and stages[0].op.looks_up else src.with_dtype(read.dtype)


def _before(graph: Graph, node: Node, known: Collection[str]) -> list[str]:
    """The values from which formulas that nothing else reads may lead to a node, the furthest first."""
    found, nodes = dict[str, None](), {id(node): node}
    ahead = [node]
    for each in ahead:
        for name in reversed(spines(graph, each, known)):
            found[name] = None
            maker = graph.made_by.get(name)
            is_free = maker is not None and id(maker) not in nodes and not graph.leaves(name, nodes.values())
            if maker is not None and is_free and formula_of(graph, maker) is not None:
                nodes[id(maker)] = maker
                ahead.append(maker)
    return [*reversed(found)]


def _with_lookup(
    graph: Graph, front: Front, pieces: tuple[Node, ...], claimed: Collection[int], known: Collection[str]
) -> Iterator[Front]:
    """A front with the lookup that makes the value which it alone reads, if there is one."""
    name, nodes, stages = front
    maker = graph.made_by.get(name)
    is_free = maker is not None and id(maker) not in claimed and not graph.leaves(name, (*nodes, *pieces))
    if maker is not None and is_free and isinstance(maker.op, Layer) and maker.op.op.looks_up:
        indices, table = maker.inputs
        if table in known:
            rows = Stage(maker.op.op, {"weight": graph.constants.get(table, table)})
            yield indices, (maker, *nodes), [rows, *stages]

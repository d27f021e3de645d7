"""The order in which a cut graph runs: sites, single operators, and runs of another library's operators."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from fuseplan.graph.cut import Cut, Site
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node
from fuseplan.graph.ops import VIEWS, Foreign


@dataclass(frozen=True)
class Unit:
    """Nodes that run together.

    Attributes:
        nodes: in an order of execution; of another library, or of a site, or a single one.
        reads: the values that it is given, each once.
        writes: the values that it makes and others read; the model's outputs among them.
        site: the plan that computes the nodes; None where none does.
    """

    nodes: tuple[Node, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    site: Site | None = None

    @property
    def library(self) -> str:
        """The library that runs it; empty for sites and for operators of ours."""
        op = self.nodes[0].op
        return op.library if isinstance(op, Foreign) else ""

    @property
    def is_view(self) -> bool:
        """The same elements in another shape or order."""
        return self.site is None and isinstance(self.nodes[0].op, VIEWS)


def schedule(cut: Cut) -> list[Unit]:
    """The units of a graph, each after those whose values it reads; a library's operators in long runs."""
    units = [Unit(site.nodes, site.reads, site.results, site) for site in cut.sites]
    inside = {id(node) for unit in units for node in unit.nodes}
    units += [unit_of(cut.graph, (node,)) for node in cut.graph.nodes if id(node) not in inside]
    return _merged(cut, _ordered(cut, units))


def unit_of(graph: Graph, nodes: tuple[Node, ...]) -> Unit:
    """Some nodes of a graph, in an order of execution, as one unit."""
    made = {name for node in nodes for name in node.outputs if name}
    kept = {id(node) for node in nodes}
    reads = [name for node in nodes for name in node.inputs if name and name not in made]
    writes = [
        name
        for name in made
        if name in graph.outputs or any(id(reader) not in kept for reader in graph.readers[name])
    ]
    return Unit(nodes, tuple(dict.fromkeys(reads)), tuple(sorted(writes)))


def _ordered(cut: Cut, units: list[Unit]) -> list[Unit]:
    """The units in an order of execution that changes between libraries seldom."""
    makers = {name: index for index, unit in enumerate(units) for node in unit.nodes for name in node.outputs}
    waits = [{makers[name] for name in unit.reads if name in makers} for unit in units]
    followers: dict[int, list[int]] = {}
    for index, needed in enumerate(waits):
        for other in needed:
            followers.setdefault(other, []).append(index)
    ready: dict[str, list[tuple[int, int]]] = {}

    def add(indices: Iterable[int]) -> None:
        for index in indices:
            entry = cut.graph.places[id(units[index].nodes[-1])], index
            heapq.heappush(ready.setdefault(units[index].library, []), entry)

    add(index for index, needed in enumerate(waits) if not needed)
    found: list[Unit] = []
    library = ""
    while any(ready.values()):
        if not ready.get(library):
            library = min((name for name, queue in ready.items() if queue), key=lambda name: ready[name][0])
        _, index = heapq.heappop(ready[library])
        found.append(units[index])
        for other in followers.get(index, ()):
            waits[other].discard(index)
        add(other for other in followers.get(index, ()) if not waits[other])
    return found


def _merged(cut: Cut, units: list[Unit]) -> list[Unit]:
    """Neighbours of one library as one unit."""
    found: list[Unit] = []
    for unit in units:
        if unit.library and found and found[-1].library == unit.library:
            found[-1] = unit_of(cut.graph, (*found[-1].nodes, *unit.nodes))
        else:
            found.append(unit)
    return found

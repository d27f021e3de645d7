"""A model with its sites as functions, which any runtime of ONNX runs: a body is the site's own nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from fuseplan.graph.cut import Cut, Site
from fuseplan.onnx.protos import read_inside
from fuseplan.onnx.reader import ReadModel, sorted_nodes
from fuseplan.reports.books import named, origins
from fuseplan.system import limits

DOMAIN = "fuseplan"
FUNCTIONS_FROM = 8  # the version of ONNX's format that has functions of models


@dataclass(frozen=True)
class Written:
    """A model with functions.

    Attributes:
        functions: the plan of each function, by the function's name.
        skipped: plans without a function: an operator of the model is in several of them, or stands between
            operators of one and is no part of it.
    """

    model: Any
    functions: Mapping[str, str]
    skipped: tuple[str, ...]

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the model; large constants go into a file beside it where one file cannot hold all.

        Raises:
            OSError: the file cannot be written.
        """
        stored = sum(each.ByteSize() for each in self.model.graph.initializer)
        is_large = stored > limits.MODEL_BYTES // 2
        beside = f"{Path(path).name}.data"
        onnx.save_model(self.model, str(path), save_as_external_data=is_large, location=beside)


def written(model: Any, found: ReadModel, cut: Cut) -> Written:
    """The model with a function for each site; the function's body is the site's own nodes."""
    nodes = list(model.graph.node)
    units = _Units(nodes, found, cut)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.ir_version = max(made.ir_version, FUNCTIONS_FROM)
    made.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    functions, skipped, taken, calls = dict[str, str](), list[str](), set[int](), list[Any]()
    for number, site in enumerate(cut.sites, 1):
        inside = units.inside(site)
        if inside is None or taken & set(inside):
            skipped.append(str(site.plan))
            continue
        name = "_".join([*(op.name for op in site.plan.ops), str(number)])
        ends = _ends(nodes, inside, [each.name for each in model.graph.output])
        made.functions.append(_function(model, name, site, [nodes[place] for place in inside], *ends))
        calls.append(helper.make_node(name, *ends, name, str(site.plan), domain=DOMAIN))
        functions[name] = str(site.plan)
        taken |= set(inside)
    _replace(made.graph, [*(node for place, node in enumerate(nodes) if place not in taken), *calls])
    return Written(made, functions, tuple(skipped))


class _Units:
    """The nodes of ONNX's that a site computes, by their places."""

    def __init__(self, nodes: Sequence[Any], found: ReadModel, cut: Cut) -> None:
        self._nodes = nodes
        places = {name: place for place, node in enumerate(nodes) for name in node.output}
        self._places = {name: places[node.output[0]] for name, node in found.protos.items()}
        self._origins = {origin.name: listed for origin, listed in origins(cut.graph).items()}
        self._folded = {self._places[each.name] for each in cut.graph.folded}
        self._readers: dict[str, list[int]] = {}
        self._makers: dict[str, list[int]] = {}
        for place, node in enumerate(nodes):
            for name in _read(node):
                self._readers.setdefault(name, []).append(place)
            for name in filter(None, node.output):
                self._makers[name] = [place]

    def inside(self, site: Site) -> list[int] | None:
        """The places of a site's nodes, and of folded ones between them; None where they are no unit."""
        own = {id(node) for node in site.nodes}
        names = dict.fromkeys(named(node).name for node in site.nodes)
        shared = [name for name in names if any(id(node) not in own for node in self._origins[name])]
        for first, *others in (self._origins[name] for name in shared):
            if any((each.op, each.inputs) != (first.op, first.inputs) for each in others):
                return None
        inside = {self._places[name] for name in names if name not in shared}  # others read its copies
        after = self._reached(inside, self._readers, lambda node: node.output)
        before = self._reached(inside, self._makers, _read)
        between = (after & before) - inside
        return sorted(inside | between) if between <= self._folded else None

    def _reached(
        self, inside: set[int], others: Mapping[str, list[int]], ends: Callable[[Any], Iterable[str]]
    ) -> set[int]:
        """The places that are reached from the given ones, over the values at one end of the nodes."""
        reached, ahead = set[int](), list(inside)
        while ahead:
            found = (place for name in ends(self._nodes[ahead.pop()]) for place in others.get(name, ()))
            fresh = set(found) - reached
            reached |= fresh
            ahead += fresh
        return reached


def _read(node: Any) -> list[str]:
    """The values that a node reads, those of its inner graphs among them."""
    return [name for name in (*node.input, *read_inside(node.attribute)) if name]


def _ends(nodes: Sequence[Any], inside: Sequence[int], outputs: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values that nodes read from outside, and those that they make and others read."""
    own = set(inside)
    made = {name for place in inside for name in nodes[place].output if name}
    reads = dict.fromkeys(
        name for place in inside for name in nodes[place].input if name and name not in made
    )
    wanted = {*outputs}
    for place, node in enumerate(nodes):
        if place not in own:
            wanted.update(_read(node))
    return [name for name in reads if name not in made], [name for name in made if name in wanted]


def _function(
    model: Any, name: str, site: Site, nodes: Sequence[Any], reads: Sequence[str], writes: Sequence[str]
) -> Any:
    made = helper.make_function(DOMAIN, name, reads, writes, nodes, list(model.opset_import))
    made.doc_string = str(site.plan)
    for key, value in (("plan", str(site.plan)), ("template", str(site.built.choice))):
        made.metadata_props.add(key=f"{DOMAIN}.{key}", value=value)
    return made


def _replace(graph: Any, nodes: Sequence[Any]) -> None:
    """Puts nodes into a graph, in an order of execution; types of values that are no more go."""
    del graph.node[:]
    graph.node.extend(nodes)
    ordered = sorted_nodes(graph)
    made = {name for node in ordered for name in node.output}
    kept = [each for each in graph.value_info if each.name in made]
    for field, listed in ((graph.node, ordered), (graph.value_info, kept)):
        copies = [type(each).FromString(each.SerializeToString()) for each in listed]
        del field[:]
        field.extend(copies)

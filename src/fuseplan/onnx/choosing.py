"""A model cut into plans and operators of ONNX's, as predicted or measured."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from fuseplan.errors import BuildError
from fuseplan.graph.choose import Mode, chosen
from fuseplan.graph.cut import Attempt, Cut, Site
from fuseplan.graph.find import find
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Origin
from fuseplan.graph.op import GraphOp
from fuseplan.graph.ops import Map, Reduce
from fuseplan.graph.rules import Rule
from fuseplan.graph.schedule import unit_of
from fuseplan.graph.trial import launch
from fuseplan.graph.type import Type
from fuseplan.graph.why import Reason, Why
from fuseplan.kernels.target import Target, available_threads
from fuseplan.kernels.template import Accuracy
from fuseplan.measure.machine import version_of
from fuseplan.onnx.reader import ReadModel, read
from fuseplan.onnx.runtime import RUNTIME, Onnx
from fuseplan.system.locks import cached_property

NONE: Mapping[str, Any] = MappingProxyType({})
# Operators with arithmetic; all but the first are torch's on a GPU.
COMPUTED: tuple[type[GraphOp], ...] = (Layer, Map, Reduce)


@dataclass(frozen=True)
class How:
    """How a model is compiled.

    Attributes:
        target: the machine, with the threads of a launch.
        accuracy: as for `fuseplan.compile`.
        choose, rules: as for `fuseplan.onnx.load`.
    """

    target: Target
    accuracy: Accuracy
    choose: Mode
    rules: tuple[Rule, ...] = ()

    @property
    def threads(self) -> int:
        """The most threads of ONNX Runtime."""
        return available_threads() if self.target.processors else self.target.threads


def cut_of(
    proto: Any,
    types: Mapping[str, Type],
    how: How,
    is_built: bool = True,
    example: Mapping[str, Any] = NONE,
    opened: Callable[[Cut], Cut] = lambda cut: cut,
) -> tuple[ReadModel, Cut]:
    """The model as a graph, cut into plans; an operator of a site that is reverted is ONNX's.

    Args:
        is_built: as for `fuseplan.graph.choose.chosen`.
        example: arrays for the inputs, which sites are measured with; random ones where there are none.
        opened: gives sites of a cut kernels that serve other extents too.
    """
    framework, left = Runtime(proto, types, how.threads, example), dict[Origin, Reason]()
    reverted, tried = list[Site](), list[Attempt]()
    while True:
        model = read(proto, types, left.get)
        found = find(model.graph, how.target, accuracy=how.accuracy, rules=how.rules)
        cut = chosen(opened(found), framework, how.choose, is_built)
        reverted += cut.reverted
        gone = {node.origin: cut.left[id(node)] for site in cut.reverted for node in site.nodes}
        gone |= _computed(cut, framework, COMPUTED[:1] if how.target.processors else COMPUTED)
        if not gone:
            return model, replace(cut, reverted=tuple(reverted), tried=(*tried, *cut.tried))
        left |= gone
        ends = (each for each in cut.tried if not each.is_site)
        tried += [each for each in ends if any(node.origin in gone for node in each.nodes)]


def _computed(cut: Cut, framework: Runtime, kinds: tuple[type[GraphOp], ...]) -> dict[Origin, Reason]:
    """The operators of some kinds in no plan, which NumPy would compute in float64, and ONNX Runtime takes.

    An average pool of a classifier took 2.8 s a run in NumPy.
    """
    inside = {node.origin for site in cut.sites for node in site.nodes}
    found = dict[Origin, Reason]()
    for node in cut.graph.nodes:
        reason = cut.reason(node)
        if reason is None or node.origin in inside or not isinstance(node.op, kinds):
            continue
        if cut.graph.types[node.outputs[0]].is_float and framework.takes(node.origin):
            found[node.origin] = reason
    return found


class Runtime:
    """ONNX Runtime, or the reference evaluator; `fuseplan.graph.trial.Framework` tells the methods."""

    def __init__(
        self, proto: Any, types: Mapping[str, Type], threads: int, inputs: Mapping[str, Any]
    ) -> None:
        package = RUNTIME if importlib.util.find_spec(RUNTIME) else "onnx"
        self.name = f"{package} {version_of(package)}"
        self._proto, self._types, self._threads, self._inputs = proto, types, threads, inputs

    def example(self, names: Collection[str]) -> Mapping[str, Any]:
        """The values that a run of the whole model makes of the example; not those within operators."""
        graph = self._plain
        made = tuple(name for name in names if name in graph.made_by)
        found = {name: self._inputs[name] for name in names if name in self._inputs}
        if not self._inputs or not made:
            return found
        unit = replace(unit_of(graph, tuple(graph.nodes)), writes=made)
        try:
            run = Onnx(self._proto, self._threads).prepare(graph, unit)
        except BuildError:
            return found  # `own` tells the same of each site
        return found | dict(zip(made, run([self._inputs.get(name) for name in unit.reads]), strict=True))

    def own(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A run of the model's operators that the site stands for, on dense arrays.

        Raises:
            LookupError: the operators read or make other values than the site.
            BuildError: nothing runs them.
        """
        graph, origins = self._plain, {node.origin for node in site.nodes}
        unit = unit_of(graph, tuple(node for node in graph.nodes if node.origin in origins))
        missing = [name for name in unit.reads if name not in values and name not in graph.constants]
        if {*unit.writes} != {*site.results} or missing:
            told = ", ".join(missing or unit.writes)
            raise LookupError(f"the operators are those of other sites too: {told}")
        run = Onnx(self._proto, self._threads).prepare(graph, replace(unit, writes=site.results))
        dense = {name: np.ascontiguousarray(each) for name, each in values.items()}
        given = [dense.get(name) for name in unit.reads]
        return lambda: run(given)

    def takes(self, origin: Origin) -> bool:
        """Whether ONNX Runtime runs one of the model's operators."""
        graph = self._plain
        nodes = tuple(each for each in graph.nodes if each.origin == origin)
        return Onnx(self._proto, self._threads).takes(graph, unit_of(graph, nodes))

    def fused(self, site: Site, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A launch of the site's plan, as a session has it."""
        return launch(site, values)

    @cached_property
    def _plain(self) -> Graph:
        """The model with all operators as ONNX's."""
        return read(self._proto, self._types, lambda _: Reason(Why.NOT_IN_TABLE)).graph

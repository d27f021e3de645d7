"""The graph: nodes in an order of execution, with the types of all values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.graph.evaluate import Run, evaluate
from fuseplan.graph.node import Node, Origin, Parts, Stored, told
from fuseplan.graph.op import Tensor
from fuseplan.graph.text import graph_json, graph_text, parse_graph, parse_json
from fuseplan.graph.type import Type, type_of
from fuseplan.system.locks import cached_property


class Graph(Parts):
    """Operators on named values, as a framework's model has them; its parts are not changed afterwards.

    Attributes:
        types: the type of each value, by name.

    Raises:
        PlanError: a name is used before it is made, or made twice; or an operator does not take its inputs.
    """

    def __init__(
        self,
        inputs: Mapping[str, Type],
        nodes: Iterable[Node],
        outputs: Sequence[str],
        constants: Mapping[str, Tensor] | None = None,
        folded: Iterable[Origin] = (),
        stored: Mapping[str, Stored] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            dict(inputs), list(nodes), list(outputs), dict(constants or {}), list(folded), stored
        )
        self.types = dict(inputs)
        for name, array in self.constants.items():
            self._define(name, type_of(array), f"constant {name}")
        for node in self.nodes:
            self._check(node)
        for name in self.outputs:
            if name not in self.types:
                raise PlanError(f"the output {name} is never made", want="a value of the graph")

    def _check(self, node: Node) -> None:
        """Finds the types of a node's results."""
        where = told(node)
        for name in node.inputs:
            if name and name not in self.types:
                raise PlanError(f"{where}: {name} is not made before", want="nodes in an order of execution")
        try:
            made = node.op.infer([self.types[name] for name in node.inputs if name])
        except PlanError as error:
            error.what = f"{where}: {error.what}"
            raise
        if len(made) < len(node.outputs):
            raise PlanError(f"{where}: it has fewer results", got=len(node.outputs), want=len(made))
        for name, each in zip(node.outputs, made, strict=False):
            if name:
                self._define(name, each, where)

    def _define(self, name: str, made: Type, where: str) -> None:
        if name in self.types:
            raise PlanError(f"{where}: there is a value {name} already", want="each name once")
        self.types[name] = made

    @cached_property
    def made_by(self) -> dict[str, Node]:
        """The node that makes each value; not of inputs and constants."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def places(self) -> dict[int, int]:
        """The place of each node, by the node's identity."""
        return {id(node): place for place, node in enumerate(self.nodes)}

    def place(self, name: str) -> int:
        """The place of the node that makes a value."""
        return self.places[id(self.made_by[name])]

    @cached_property
    def formulas(self) -> dict[int, Any]:
        """The formulas of nodes that were asked for, by the node's identity."""
        return {}

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """The nodes that read each value, each once."""
        found: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, node.inputs)):
                found[name].append(node)
        return found

    def leaves(self, name: str, nodes: Iterable[Node]) -> bool:
        """Whether a value is needed outside of some nodes."""
        return name in self.outputs or not {*map(id, self.readers[name])} <= {*map(id, nodes)}

    def evaluate(self, given: Mapping[str, Any], run: Mapping[str, Run] | None = None) -> dict[str, Any]:
        """The outputs by name; floats in float64.

        Args:
            given: the inputs by name.
            run: how to run operators of other libraries, by the library's word.

        Raises:
            ArgumentError: an input is missing, unknown, or of another shape.
            Unsupported: an operator of a library that `run` does not have.
        """
        return evaluate(self, given, run or {}, self.types)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        if self.inputs != other.inputs or self.outputs != other.outputs or self.nodes != other.nodes:
            return False
        mine, theirs = self.constants, other.constants
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return graph_text(self, self.types)

    def __repr__(self) -> str:
        return (
            f"<graph of {len(self.nodes)} operators: {', '.join(self.inputs)} -> {', '.join(self.outputs)}>"
        )

    @classmethod
    def parse(cls, text: str, constants: Mapping[str, Tensor] | None = None) -> Graph:
        """The graph that a text writes.

        Args:
            text: as `str(graph)` prints it.
            constants: the arrays whose elements the text does not have.

        Raises:
            PlanError: it writes none; the message has the line.
        """
        return cls(**vars(parse_graph(text, constants or {})))

    def to_json(self) -> str:
        """The graph as JSON; `from_json` reads it."""
        return graph_json(self, self.types)

    @classmethod
    def from_json(cls, text: str, constants: Mapping[str, Tensor] | None = None) -> Graph:
        """The graph that `to_json` wrote; `constants` as for `parse`.

        Raises:
            PlanError: the text is something else.
        """
        return cls(**vars(parse_json(text, constants or {})))


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and np.array_equal(mine, theirs)

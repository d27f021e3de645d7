"""A graph of torch's, of functional ATen operators, as a graph of ours."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fuseplan.errors import PlanError
from fuseplan.graph.flattened import with_axes
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node, Origin
from fuseplan.graph.ops import Concat, Foreign, Reshape
from fuseplan.graph.type import Type
from fuseplan.graph.why import LeftError, Reason, Why
from fuseplan.language.layouts import LAYOUTS, channel_names
from fuseplan.torch.aten import TABLE
from fuseplan.torch.choices import SIGNS
from fuseplan.torch.given import Given, origin_of, stands_for, type_of
from fuseplan.torch.integers import made_of_weights
from fuseplan.torch.lying import ORDER


@dataclass(frozen=True)
class ReadGraph:
    """What was read.

    Attributes:
        graph: the graph; a value that torch's operator makes has the name of torch's node.
        makers: torch's node that makes each value; not of values within one of torch's operators.
        values: the value that each of torch's nodes makes; several make one, where some change nothing, or
            compute what an earlier one did.
        weights: the values that torch's operators make of weights alone.
    """

    graph: Graph
    makers: dict[str, fx.Node]
    values: dict[fx.Node, str]
    weights: frozenset[str] = frozenset()


def read(given: fx.GraphModule, joins: bool = False, is_once: bool = False) -> ReadGraph:
    """Reads a graph: an operator without a row in the table is torch's own.

    Args:
        joins: `cat` is an operator of the graph, into whose value plans may write.
        is_once: what torch makes of the module's own tensors alone is made once.
    """
    weights = made_of_weights(given.graph) if is_once else set[fx.Node]()
    reader = _Reader(TABLE | {torch.ops.aten.cat.default: _cat} if joins else TABLE, weights)
    for node in given.graph.nodes:
        reader.read(node)
    reader.drop(SIGNS)
    outputs = list(dict.fromkeys(reader.outputs))
    graph = with_axes(Graph(reader.inputs, reader.nodes, outputs, folded=reader.folded))
    made = frozenset(reader.values[node] for node in weights)
    return ReadGraph(graph, reader.makers, reader.values, made)


def _cat(given: Given) -> str:
    """Tensors one behind the other, in a value that stays in the graph.

    Raises:
        LeftError: the value is an output, which is new memory in each call.
    """
    if any(user.op == "output" for user in given.node.users):
        raise LeftError(Why.GRAPH_OUTPUT, given.node.name)
    tensors = [given.value(each) for each in given.argument("tensors")]
    return given.add(Concat(int(given.number("dim")) % len(given.result.shape or (1,))), *tensors)


class _Reader:
    def __init__(self, table: Mapping[Any, Callable[[Given], str]], weights: Collection[fx.Node]) -> None:
        self._table, self._weights = table, weights
        self.inputs: dict[str, Type] = {}
        self.nodes: list[Node] = []
        self.folded: list[Origin] = []
        self.outputs: list[str] = []
        self.makers: dict[str, fx.Node] = {}
        self.values: dict[fx.Node, str] = {}
        self._types: dict[str, Type] = {}
        self._calls: dict[Any, fx.Node] = {}

    def read(self, node: fx.Node) -> None:
        """Adds one of torch's nodes."""
        if node.op == "output":
            self.outputs += [self.values[each] for each in node.all_input_nodes]
        elif node.op != "call_function":
            made, order = type_of(node.meta.get("val")), node.meta.get(ORDER, ())
            is_last = made.rank in LAYOUTS and order == (0, *range(2, made.rank), 1)
            self.inputs[node.name] = replace(made, names=channel_names(made.rank)) if is_last else made
            self._is(node, node.name, self.inputs[node.name])
        else:
            same = self._earlier(node)
            if same is None:
                self._called(node)
            else:
                self.values[node] = self.values[same]
                self.folded.append(origin_of(node))

    def drop(self, targets: Collection[object]) -> None:
        """Takes out torch's nodes of some operators that no value is made of: formulas have them again."""
        read = {*self.outputs, *(name for node in self.nodes for name in node.inputs)}
        again = {node.origin for node in self.nodes if not isinstance(node.op, Foreign)}
        dropped = {
            name for name, node in self.makers.items()
            if node.target in targets and name not in read and origin_of(node) in again
        }  # fmt: skip
        self.nodes = [node for node in self.nodes if not dropped & {*node.outputs}]

    def _earlier(self, node: fx.Node) -> fx.Node | None:
        """An earlier node that a node repeats: the same operator on the same values, without chance."""
        op = node.target
        is_op = isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" and not op._schema.is_mutable
        if op is not operator.getitem and not (is_op and torch.Tag.nondeterministic_seeded not in op.tags):
            return None
        made = node.meta.get("val")
        lies = (made.dtype, made.shape, made.stride()) if isinstance(made, torch.Tensor) else ()
        told = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        same = self._calls.setdefault(
            (op, repr((told, lies))), node
        )  # 0.0 and -0.0 are equal, 1 and True too
        return same if same is not node and (not lies or stands_for(same, node)) else None

    def _is(self, node: fx.Node, name: str, made: Type) -> None:
        self.values[node], self._types[name] = name, made
        if isinstance(node.meta.get("val"), torch.Tensor):
            self.makers.setdefault(name, node)

    def _called(self, node: fx.Node) -> None:
        row, given = self._table.get(node.target), Given(node, self.values, self._types)
        row = self._table.get(str(node.target)) if row is None else row
        why: Reason | None = None
        if node in self._weights:
            row, why = None, Reason(Why.NOT_IN_TABLE, "of the module's own tensors alone")
        if row is not None:
            try:
                name = row(given)
                self._check(given, name, node)
            except LeftError as error:
                why = error.reason
            except PlanError as error:
                why = Reason(Why.REFUSED, error.what)
            else:
                self.nodes += given.added
                if not given.added:
                    self.folded.append(origin_of(node))
                self._types |= given.made
                self._is(node, name, given.type_of(name))
                self._reshaped(given)
                return
        self._foreign(node, why)

    def _reshaped(self, given: Given) -> None:
        """A mask without its axes of extent 1 is made by torch's node of the mask."""
        for each in given.added:
            if isinstance(each.op, Reshape) and each.inputs[0] in self.makers:
                self.makers.setdefault(each.outputs[0], self.makers[each.inputs[0]])

    def _check(self, given: Given, name: str, node: fx.Node) -> None:
        """The row's result has torch's shape and dtype, but for one of several, which `getitem` takes."""
        made, wanted = given.type_of(name), given.result
        further = [user for user in node.users if user.target is operator.getitem and user.args[1] != 0]
        further = [user for user in further if given.result_name(name, user.args[1]) not in given.made]
        if wanted.dtype == "?" and any(user.users for user in further):
            raise LeftError(Why.NOT_IN_TABLE, f"{node.target}, whose further results are wanted")
        if wanted.dtype != "?" and (made.shape, made.dtype) != (wanted.shape, wanted.dtype):
            raise LeftError(Why.REFUSED, f"{node.target} makes {wanted}, not {made}")

    def _foreign(self, node: fx.Node, why: Reason | None) -> None:
        made = type_of(node.meta.get("val"))
        inputs = tuple(dict.fromkeys(self.values[each] for each in node.all_input_nodes))
        op = Foreign(f"torch.{node.target}", (), (made,))
        self.nodes.append(Node(op, inputs, (node.name,), origin_of(node), why))
        self._is(node, node.name, made)

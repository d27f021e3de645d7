"""The graph of one call in an arena: launches that were bound before it, and torch's own operators."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fuseplan.torch.lifetimes import Lifetimes, function_of


def call_of(graph: fx.Graph, lives: Lifetimes) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The graph of one call, and the nodes whose values it is given as a list in front of its inputs."""
    made: fx.Graph = fx.Graph()
    held = made.placeholder("held")
    slots: list[fx.Node] = []
    values = dict[fx.Node, fx.Node]()

    def value(node: fx.Node) -> fx.Node:
        if node not in values:
            values[node] = made.call_function(operator.getitem, (held, len(slots)))
            slots.append(node)
        return values[node]

    for node in graph.nodes:
        if node in lives.bound:
            values[node] = made.call_function(operator.call, (value(node), *map(value, lives.late(node))))
        elif node in lives.same:
            values[node] = value(node.args[0])
        elif node in lives.copied:
            for part, (_, *where) in lives.copied[node]:
                made.call_function(_copy, (value(node), value(part), *where))
        elif node.op == "output":
            made.output(fx.map_arg(node.args[0], value))
        elif node in lives.written or node not in lives.known:
            args = {each: value(each) for each in node.all_input_nodes}
            args |= {each: made.call_method("clone", (args[each],)) for each in lives.rewritten(node)}
            out = {"out": value(node)} if node in lives.written else {}
            values[node] = made.node_copy(node, args.__getitem__)
            values[node].target = function_of(node, in_place=node in lives.renewed)
            values[node].kwargs = {**values[node].kwargs, **out}
    return fx.GraphModule({}, made), slots


def _copy(whole: torch.Tensor, part: torch.Tensor, axis: int, begin: int, extent: int) -> None:
    """Copies a part into the value that joins it with others, or all of a value into its place."""
    place = whole if whole.shape[axis] == extent else whole.narrow(axis, begin, extent)
    place.copy_(part)

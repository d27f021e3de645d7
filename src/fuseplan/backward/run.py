"""The plans of gradients, compiled."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuseplan.compile import CompiledPlan, compile
from fuseplan.errors import ArgumentError
from fuseplan.graph.graph import Graph
from fuseplan.graph.layer import Planned
from fuseplan.graph.node import Node
from fuseplan.graph.ops import Flip, Pad, Permute, Reshape, Slice


class CompiledBackward:
    """The kernels of a plan and of its gradients.

    Attributes:
        forward: the forward plan, compiled; its results are values that the gradients read.
        reads: the inputs of a call besides `grad`: src, operands and results of `forward`.
        kernels: the plans of the gradients, compiled, in the order in which they run.

    A call takes the gradient of the output and the tensors of `reads` by name, NumPy arrays or torch tensors,
    and gives a named tuple of the gradients by the names of `wrt`. Equal tensors give equal bits.
    """

    def __init__(self, graph: Graph, gradients: dict[str, str], how: dict[str, Any]) -> None:
        first, *self._nodes = graph.nodes
        built: dict[str, CompiledPlan] = {}
        for node in graph.nodes:
            if isinstance(node.op, Planned) and node.op.written not in built:
                built[node.op.written] = compile(node.op.plan, **how)
        plans = [node.op.written for node in graph.nodes if isinstance(node.op, Planned)]
        self.forward, *self.kernels = (built[each] for each in plans)
        self._built, self._gradients = built, gradients
        self._made = namedtuple("Gradients", gradients)  # type: ignore[misc]
        read = {name for node in self._nodes for name in node.inputs} | set(gradients.values())
        given = (*graph.inputs, *first.outputs)
        self.reads = tuple(name for name in given if name in read and name != "grad")
        last = {name: place for place, node in enumerate(self._nodes) for name in node.inputs}
        kept = set(gradients.values())
        self._dropped = [
            [name for name, at in last.items() if at == place and name not in kept]
            for place in range(len(self._nodes))
        ]

    def __call__(self, grad: Any, **given: Any) -> Any:
        """The gradients.

        Args:
            grad: the gradient of the output, a tensor like it.
            **given: the tensors of `reads`, as the forward plan takes or gives them.

        Raises:
            ArgumentError: one is missing or unknown, or a plan does not take it.
        """
        wrong = sorted(set(self.reads) ^ given.keys())
        if wrong:
            problem = "is missing" if wrong[0] in self.reads else "is read by no gradient"
            raise ArgumentError(f"`{wrong[0]}` {problem}\n  want grad, {', '.join(self.reads)}")
        live = {"grad": grad, **given}
        for node, dropped in zip(self._nodes, self._dropped, strict=True):
            live |= zip(node.outputs, self._run(node, [live[name] for name in node.inputs]), strict=True)
            for name in dropped:
                del live[name]
        return self._made(*(live[name] for name in self._gradients.values()))

    def _run(self, node: Node, given: Sequence[Any]) -> Sequence[Any]:
        """The results of a node."""
        if not isinstance(node.op, Planned):
            return [viewed(node.op, given[0])]
        src, *operands = given
        plan = node.op.plan
        keys = [each.key for each in plan.operands]
        try:
            made = self._built[node.op.written](src, **dict(zip(keys, operands, strict=True)))
        except ArgumentError as error:  # of the plan's names, which the caller has not given
            names = ", ".join(
                f"{key} is {name}" for key, name in zip(("src", *keys), node.inputs, strict=True)
            )
            raise ArgumentError(f"{error}\n  in {plan}\n  where {names}") from error
        return tuple(made) if plan.results else (made,)


def viewed(op: Any, tensor: Any) -> Any:
    """A tensor's elements in another order or shape, in its own library."""
    if isinstance(tensor, np.ndarray) or isinstance(op, Slice):
        return op.evaluate([tensor])[0]
    if isinstance(op, Reshape):
        return tensor.reshape(op.shape)
    if isinstance(op, Permute | Flip):
        return tensor.permute(op.order) if isinstance(op, Permute) else tensor.flip(op.axes)
    assert isinstance(op, Pad)  # the last of the operators that the walk makes
    around = list(zip(tensor.shape, op.padding, strict=True))
    made = tensor.new_full([low + extent + high for extent, (low, high) in around], op.value)
    made[tuple(slice(low, low + extent) for extent, (low, _) in around)] = tensor
    return made

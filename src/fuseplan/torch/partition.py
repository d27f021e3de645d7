"""What a step of training keeps between its passes, and what the backward pass makes again."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
ANGLES = (aten.cos.default, aten.sin.default)


def partitioned(joint: fx.GraphModule, inputs: Any, **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of both passes: what elementwise operators make of values that are kept is made again.

    Torch keeps such a value where a product reads it in the backward pass, which has to write it then: the
    gradient's kernels read the same values, and write it beside their own results. A layer of a Llama
    (2048 features, 8192 inner ones, 8192 tokens) keeps 421 MB in place of 622. Tables of cosines and sines
    are kept: Inductor would compute one for each element that reads them.
    """
    _leak_by_results(joint.graph)
    for node in joint.graph.nodes:
        if (node.target in ANGLES and _is_table(node)) or _is_convolved(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    with config.patch(ban_recompute_materialized_backward=False):
        made: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(
            joint, inputs, **how
        )
    return made


def _leak_by_results(graph: fx.Graph) -> None:
    """Reads the results of leaky_relu for its gradient, whose signs are those of its inputs.

    These need not be kept then: a convolution and the activation behind it are one plan.
    """
    made = {
        each.args[:2]: each
        for each in graph.find_nodes(op="call_function", target=aten.leaky_relu.default)
        if len(each.args) == 2 and each.args[1] > 0 and not each.kwargs
    }
    for node in graph.find_nodes(op="call_function", target=aten.leaky_relu_backward.default):
        grad, src, slope, _ = node.args
        if (src, slope) in made:
            node.args = (grad, made[src, slope], slope, True)


def _is_convolved(node: fx.Node) -> bool:
    """Whether a convolution on a CPU reads a value, as its weight's gradient does: no kernel makes both.

    Not of values that the caller's checkpoints make again.
    """
    value = node.meta.get("val")
    is_here = isinstance(value, torch.Tensor) and value.device.type == "cpu" and node.op == "call_function"
    readers = [each for each in node.users if each.target is aten.convolution.default]
    return is_here and "recompute" not in node.meta and any(each.args[0] is node for each in readers)


def _is_table(node: fx.Node) -> bool:
    """Whether a value, or another one of as many elements that is made of it, is read for more elements."""
    seen, ahead = {node}, [node]
    while ahead:
        for user in ahead.pop().users:
            more = _count(user) - _count(node)
            if more > 0:
                return True
            if more == 0 and user not in seen:
                seen.add(user)
                ahead.append(user)
    return False


def _count(node: fx.Node) -> int:
    """The elements of a node's value; 0 of several tensors, or of open extents."""
    value = node.meta.get("val")
    count = value.numel() if isinstance(value, torch.Tensor) else 0
    return count if isinstance(count, int) else 0

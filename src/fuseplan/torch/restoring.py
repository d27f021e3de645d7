"""Values that lie as torch's own do, for those that see how: callers, and some operators of torch's.

A plan's result may have its axes in memory in another order than torch's, and so may all that torch's
operators and views make of it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from fuseplan.language.layouts import dense
from fuseplan.torch.described import Described
from fuseplan.torch.lying import ORDER, is_dense, is_in_order, laid_out, order_of, tells_views

aten = torch.ops.aten
COUNTED = ("as_strided", "as_strided_copy")  # views by places in memory
# Operators within torch's own that read tensors in any order. Of the others, `native_group_norm_backward`
# gives wrong gradients for those in another order than torch's functions hand it, without a word. Batch norm
# on a CPU sums channels that lie last in f32: of 6272 elements each, the result is 1.6e-6 from float64, not
# 0.07e-6, and gradients of small residual networks were up to 2.8 times as far as torch's.
EASY = re.compile(
    r"_to_copy|_unsafe_\w+|_(log_)?softmax(_backward_data)?|_?native_(layer|batch)_norm\w*|_fused_rms_norm"
    r"|(avg_pool2d|max_pool2d_with_indices)_backward|cudnn_batch_norm\w*|convolution_backward|native_dropout\w*|embedding_dense_backward"
)


def restore(graph: fx.Graph, saved: Collection[int] = ()) -> None:
    """Lays out anew what a caller, or an operator that reads memory by places, would see lie otherwise.

    Args:
        graph: with plans.
        saved: the places of outputs that may lie in any order, where `Lying` knows it.
    """
    unlike, made = set[fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if _is_unlike(node, unlike):
            unlike.add(node)
    lying = Lying()
    for node in list(graph.nodes):
        seen = node.all_input_nodes if node.op == "output" else []
        if saved and seen:
            outputs = enumerate(node.args[0])
            seen = [each for place, each in outputs if place not in saved or lying.of(each) is None]
            seen = [each for each in dict.fromkeys(seen) if isinstance(each, fx.Node)]
        seen = [each for each in node.all_input_nodes if each in unlike] if _is_particular(node) else seen
        for each in seen:
            node.replace_input_with(each, _restored(each, unlike, made))


class Lying:
    """The values of a graph with plans, without elements, as they lie when it runs."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def of(self, node: Any) -> Any:
        """The value of a node: dense, or several of an operator; None where it is not known how it lies."""
        if isinstance(node, fx.Node) and node not in self._known:
            made = self._made(node)
            has_gaps = isinstance(made, torch.Tensor) and not is_dense(made, order_of(made))
            self._known[node] = None if has_gaps or isinstance(made, Described) else made
        return self._known.get(node)

    def _made(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if ORDER in node.meta or node.target is laid_out:
            shaped = value if ORDER in node.meta else self.of(node.args[0])
            order = node.meta.get(ORDER, node.args[1:2] and node.args[1])
            is_plain = shaped is not None and not isinstance(shaped, Described)
            is_known = is_plain and len(order) == len(shaped.shape)
            return shaped.new_empty_strided(shaped.shape, dense(shaped.shape, order)) if is_known else None
        if node.op != "call_function":
            return value
        read = {each: self.of(each) for each in node.all_input_nodes}
        is_op = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        if not is_op or any(each is None for each in read.values()):
            return None
        if all(each is other.meta.get("val") for other, each in read.items()):
            return value
        args, kwargs = fx.map_arg((node.args, node.kwargs), read.__getitem__)
        try:
            return node.target(*args, **kwargs)
        except RuntimeError:  # no view of a tensor that lies so
            return None


def _is_unlike(node: fx.Node, unlike: set[fx.Node]) -> bool:
    """Whether a value may lie otherwise than torch's own."""
    if ORDER in node.meta:
        shape, order = node.meta["val"].shape, node.meta[ORDER]
        return len(order) != len(shape) or not is_in_order(shape, order, order_of(node.meta["val"]))
    if node.target is aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format:
        return False
    is_plan = node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload)
    return (is_plan and node.target is not operator.getitem) or not unlike.isdisjoint(node.all_input_nodes)


def _restored(node: fx.Node, unlike: set[fx.Node], made: dict[fx.Node, fx.Node]) -> fx.Node:
    """The value as torch has it, one for all that read it; a tensor with gaps or repeats is left.

    A view is one of the restored value: it shares memory with what it shares memory with in torch.
    """
    if node not in made:
        made[node] = node
        if _is_view(node):
            made[node] = _view(node, unlike, made) if node in unlike else node
        elif node.op != "output" and isinstance(value := node.meta.get("val"), torch.Tensor):
            made[node] = _laid(node, value) if node.op == "call_function" or ORDER in node.meta else node
    return made[node]


def _view(node: fx.Node, unlike: set[fx.Node], made: dict[fx.Node, fx.Node]) -> fx.Node:
    inputs = {each: _restored(each, unlike, made) for each in node.all_input_nodes}
    if all(other is each for each, other in inputs.items()):
        return node
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node, inputs.__getitem__)


def _laid(node: fx.Node, value: torch.Tensor) -> fx.Node:
    counts = (each for each in (*value.shape, *value.stride()) if isinstance(each, torch.SymInt))
    if not all(each.node.has_hint() for each in counts):  # by the elements of a tensor: no plan's
        return node
    order = order_of(value)
    # No operator leaves gaps on the one axis of a new tensor.
    if len(order) < 2 or not is_dense(value, order):
        return node
    inputs = node.graph.find_nodes(op="placeholder")  # which stand first
    with node.graph.inserting_after(inputs[-1] if node.op == "placeholder" else node):
        return node.graph.call_function(laid_out, (node, tuple(order)))


def _is_view(node: fx.Node) -> bool:
    """Whether a value, or one of several, has memory of what its operator reads."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])
    return node.op == "call_function" and tells_views(node)


def _is_particular(node: fx.Node) -> bool:
    """Whether an operator may read memory by places: of another library, or of those within torch's own."""
    called = node.target
    if not isinstance(called, torch._ops.OpOverload) or torch.Tag.pointwise in called.tags:
        return False
    name = called._opname
    if called.namespace != "aten":
        return torch.Tag.flexible_layout not in called.tags
    is_inner = name.startswith(("_", "native_")) or "backward" in name
    is_easy = EASY.fullmatch(name) and not ("batch_norm" in name and node.meta["val"][0].is_cpu)
    return name in COUNTED or (is_inner and not is_easy and not tells_views(node))

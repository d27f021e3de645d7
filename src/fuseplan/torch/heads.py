"""The cross-entropy of a linear layer in a step of training: its logits are in memory once, and no longer.

A step that keeps logits for the backward pass has them in memory twice there, beside their gradient. Where
their mean loss alone is wanted, its gradients follow in the forward pass, up to a factor: the gradient of
logits comes in their place, is multiplied by both factors of the layer, and is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from fuseplan.ops.losses import IGNORED, CrossEntropyGradient
from fuseplan.plans.text import operator_text
from fuseplan.torch.intact import WITH_GRADIENTS, is_plain
from fuseplan.torch.kernels import kernel_on

NAME = "fuseplan::linear_cross_entropy"
LINEAR_FIELDS = ("input", "weight", "bias")
LINEAR, LOSS = nn.functional.linear, nn.functional.cross_entropy
LOSS_FIELDS = {
    "input": None, "target": None, "weight": None, "size_average": None, "ignore_index": IGNORED,
    "reduce": None, "reduction": "mean", "label_smoothing": 0.0,
}  # fmt: skip
SAME_ROWS = ("view", "reshape", "contiguous", "float", "to")  # methods that keep each place's logits
FEWEST = 1 << 20  # logits: fewer are as fast in a graph's other kernels
ALIGNED = 8  # features: where rows of two-byte logits begin elsewhere, cuBLAS takes three times the time

torch.library.define(
    NAME,
    "(Tensor src, Tensor weight, Tensor? bias, Tensor target, int ignore_index, float label_smoothing) "
    "-> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _computed(
    src: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> list[torch.Tensor]:
    """The sum of the losses of rows, and its gradients by src, weight and bias."""
    features = len(weight)
    wide, added = weight, bias
    more = -features % ALIGNED if src.is_cuda and not label_smoothing else 0
    if more:  # further logits of -inf change no sum of exponentials
        wide = nn.functional.pad(weight, (0, 0, 0, more))
        added = nn.functional.pad(
            src.new_zeros(features) if bias is None else bias, (0, more), value=-torch.inf
        )
    logits = src @ wide.t() if added is None else torch.addmm(added, src, wide.t())
    kernel = kernel_on(operator_text(CrossEntropyGradient(label_smoothing, ignore_index, 0.0, "i64")), logits)
    _, _, losses = kernel.held([target]).plan(logits, logits, target=target)
    made = [losses.sum(), logits @ wide, (logits.t() @ src)[:features]]
    return made if bias is None else [*made, logits.sum(0)[:features]]


torch.library.impl(NAME, ("CPU", "CUDA"), _computed)


@torch.library.register_fake(NAME)  # type: ignore[untyped-decorator]
def _described(
    src: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any
) -> list[torch.Tensor]:
    held = (src, weight) if bias is None else (src, weight, bias)
    return [src.new_empty((), dtype=torch.float32), *(each.new_empty(each.shape) for each in held)]


def _saved(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    made = [(each.float() * gradients[0]).to(each.dtype) for each in ctx.saved_tensors]
    return *made, *[None] * (6 - len(made))


torch.library.register_autograd(NAME, _gradients, setup_context=_saved)


def loss(
    src: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    is_mean: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The mean or the sum of the cross-entropies of places, whose classes are `target`."""
    rows = src.reshape(-1, src.shape[-1])
    total, *_ = torch.ops.fuseplan.linear_cross_entropy(
        rows, weight, bias, target, ignore_index, label_smoothing
    )
    return (total / (target != ignore_index).sum() if is_mean else total).to(dtype)


def join_losses(given: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Puts `loss` in the place of linear layers and their cross-entropy, in a graph of Dynamo's.

    The logits are wanted by the loss alone, and gradients by all tensors. Products of f16 stay as they are:
    gradients without the factor of a mean may be too large for them.
    """
    if not torch.is_grad_enabled() or not is_plain(given, inputs, WITH_GRADIENTS):
        return
    for node in given.graph.find_nodes(op="call_function", target=LOSS):
        told = {**LOSS_FIELDS, **dict(zip(LOSS_FIELDS, node.args, strict=False)), **node.kwargs}
        linear = _linear_of(told["input"])
        if linear is None or not _is_taken(told, linear):
            continue
        layer = {**dict(zip(LINEAR_FIELDS, linear.args, strict=False)), **linear.kwargs}
        options = told["ignore_index"], told["label_smoothing"], told["reduction"] == "mean"
        tensors = [*map(layer.get, LINEAR_FIELDS), told["target"]]
        node.args = (*tensors, *options, _value(node).dtype)
        node.target, node.kwargs = loss, {}
    given.recompile()


def _linear_of(node: Any) -> fx.Node | None:
    """The layer that makes a loss's logits, each of which is at its place; None where something else is."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        if node.op == "call_function" and node.target is LINEAR:
            return node
        if node.op != "call_method" or node.target not in SAME_ROWS:
            return None
        before = node.args[0]
        if _value(node).shape[-1:] != _value(before).shape[-1:] or not _value(node).is_floating_point():
            return None
        node = before
    return None


def _is_taken(told: dict[str, Any], linear: fx.Node) -> bool:
    """Whether the operator computes this loss of this layer."""
    target, logits = told["target"], _value(linear)
    is_usual = all(told[name] is None for name in ("weight", "size_average", "reduce"))
    is_indices = (
        isinstance(target, fx.Node) and _value(target).dtype == torch.int64 and _value(target).ndim == 1
    )
    is_one = told["reduction"] in ("mean", "sum") and _value(told["input"]).ndim == 2
    is_wide = all(type(each) is int for each in logits.shape) and logits.numel() >= FEWEST
    is_precise = {_value(each).dtype for each in linear.all_input_nodes} in (
        {torch.bfloat16},
        {torch.float32},
    )
    wants = all(_value(each).requires_grad for each in linear.all_input_nodes)
    return is_usual and is_indices and is_one and is_wide and is_precise and wants


def _value(node: fx.Node) -> torch.Tensor:
    made: torch.Tensor = node.meta["example_value"]
    return made

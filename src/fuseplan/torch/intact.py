"""Torch's attention in one piece through AOT autograd, which takes it apart before a backend sees it.

By then torch has chosen a kernel for the mask that the model gives. A mask that hides nothing, which
`simplify_masks` leaves out, may have cost it the fast ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

NAME = "fuseplan::attention"
SDPA = nn.functional.scaled_dot_product_attention
DEFAULTS: Mapping[str, Any] = {
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False
}  # fmt: skip
FIELDS = ("query", "key", "value", *DEFAULTS)
KINDS = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
MODES = (
    "grad_enabled",
    "autocast",
    "functorch",
    "inference_mode",
)  # in names of what changes them in a graph

WITH_GRADIENTS = tuple(each for each in MODES if each != "grad_enabled")  # where values tell of gradients

torch.library.define(
    NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, bool is_causal, float? scale, "
    "bool enable_gqa) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    made: torch.Tensor = SDPA(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return made


torch.library.impl(NAME, ("CPU", "CUDA"), _computed)
torch.library.register_fake(NAME, _computed)
KEPT = torch.ops.fuseplan.attention.default


def keep_attention(given: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Puts an operator in the place of attention without dropout, in a graph of calls without gradients.

    Graphs that change torch's modes, and tensors of other kinds, stay as they are: it knows neither.
    """
    if torch.is_grad_enabled() or not is_plain(given, inputs):
        return
    for node in given.graph.find_nodes(op="call_function", target=SDPA):
        told = arguments_of(node)
        if told is not None:
            node.target, node.kwargs = KEPT, {}
            node.args = tuple(told[name] for name in FIELDS if name != "dropout_p")
    given.recompile()


def arguments_of(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of attention by their names; None with dropout, or where a flag is no constant."""
    told = {**DEFAULTS, **dict(zip(FIELDS, node.args, strict=False)), **node.kwargs}
    flags = [told[name] for name in ("is_causal", "enable_gqa")]
    is_known = all(isinstance(each, bool) for each in flags) and not isinstance(told["scale"], fx.Node)
    return told if is_known and told["dropout_p"] == 0 else None


def is_plain(given: fx.GraphModule, inputs: Sequence[Any], modes: Sequence[str] = MODES) -> bool:
    """Whether the graph's tensors are torch's own, and it changes none of these modes of torch's."""
    is_mixed = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    kinds = {type(each) for each in inputs if isinstance(each, torch.Tensor)}
    is_changed = any(mode in name_of(node) for node in given.graph.nodes for mode in modes)
    return not is_mixed and kinds <= {*KINDS} and not is_changed


def name_of(node: fx.Node) -> str:
    """The module and the name of the function that a node calls; empty for another node."""
    target = node.target
    return f"{getattr(target, '__module__', '')}.{target}" if node.op == "call_function" else ""


def restore_attention(given: fx.GraphModule) -> None:
    """Puts torch's own operator back."""
    for node in given.graph.find_nodes(op="call_function", target=KEPT):
        *tensors, is_causal, scale, enable_gqa = node.args
        node.target = torch.ops.aten.scaled_dot_product_attention.default
        node.args = (*tensors, 0.0, is_causal)
        node.kwargs = {"scale": scale, "enable_gqa": enable_gqa}
    given.recompile()

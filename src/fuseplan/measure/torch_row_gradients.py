"""What PyTorch calls for gradients of row norms, and what its forward passes leave for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuseplan.measure.layers import Layer

Tensor = Any
Call = Callable[..., Any]
aten = torch.ops.aten

# What torch's forward pass leaves for the backward pass of an operator, beside its input.
STATISTICS = {"layer_norm_backward": ("mean", "inverse"), "rms_norm_backward": ("inverse",)}


def saved(layer: Layer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The statistics that a backward pass reads, by their keys."""
    if layer.name not in STATISTICS or "epsilon" not in layer.parameters:
        return {}
    key, epsilon = layer.keys["input"], layer.parameters["epsilon"]
    made = [(tensors[key].float().square().mean(-1, keepdim=True) + epsilon).rsqrt()]
    if layer.name == "layer_norm_backward":
        _, *made = torch.native_layer_norm(tensors[key], tensors[key].shape[-1:], None, None, epsilon)
    return dict(zip((f"{key}_{name}" for name in STATISTICS[layer.name]), made, strict=True))


def layer_norm_backward(layer: Layer) -> Call:
    """Torch's own operator: the gradient of src, and those of scale and shift where they are results."""
    more = bool(layer.step.results)

    def call(x: Tensor, mean: Tensor, inverse: Tensor, **given: Tensor) -> Any:
        each, scale = (*x.shape[:-1], 1), given.get("scale")
        of = (x, given["input"], x.shape[-1:], mean.reshape(each), inverse.reshape(each), scale)
        made = aten.native_layer_norm_backward(*of, scale if more else None, [True, more, more])
        return made if more else made[0]

    return call


def rms_norm_backward(layer: Layer) -> Call:
    """The kernel of torch's own backward pass; for a CPU it has none, and its autograd takes this formula."""
    more = bool(layer.step.results)

    def call(x: Tensor, inverse: Tensor, **given: Tensor) -> Any:
        at, scale, inverse = given["input"], given.get("scale"), inverse.reshape(*x.shape[:-1], 1)
        if x.is_cuda:
            made = aten._fused_rms_norm_backward(x, at, x.shape[-1:], inverse, scale, [True, more])
            return made if more else made[0]
        normal, behind = at.float() * inverse, (x if scale is None else x * scale).float()
        dx = (inverse * (behind - normal * (behind * normal).mean(-1, keepdim=True))).to(x.dtype)
        return (dx, (x.float() * normal).flatten(0, -2).sum(0)) if more else dx

    return call

"""Operators on rows as PyTorch computes them: norms, softmax, losses, gates, rotary, quantization, gradients.

A function is given the operator, its src, and its operands by the operator's own names; it gives the output,
and the operator's results behind it. The module imports torch: `torch_stages` imports it when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from fuseplan.language.declarations import aligned, lined_up
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.layers import CannotRunError, Layer, is_usual
from fuseplan.measure.spaces import torch_dtype
from fuseplan.measure.torch_activations import BACKWARD, Stage, activation_of
from fuseplan.ops.dynamic import LEAST

Tensor = Any

# What torch's forward pass leaves for the backward pass of an operator, beside its input.
STATISTICS = {"layer_norm_backward": ("mean", "inverse"), "rms_norm_backward": ("inverse",)}


def row_stage(layer: Layer) -> Stage:
    """What torch calls for an operator of `ROWS`.

    Raises:
        CannotRunError: torch has no such option.
    """
    function, results = ROWS[layer.name], [each.key for each in layer.step.results]
    lacking = next(_lacking(layer), None)
    if lacking is not None:
        raise CannotRunError(f"torch's {layer.name} is not measured {lacking}")
    names = [*layer.keys.items()]
    names += [(name, f"{layer.keys['input']}_{name}") for name in STATISTICS.get(layer.name, ())]

    def stage(x: Tensor, held: dict[str, Tensor]) -> Tensor:
        made = function(layer, x, **{name: held[key] for name, key in names})
        if results:
            made, *more = made
            held |= zip(results, more, strict=True)
        return made

    return stage


def saved(layer: Layer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The statistics that a backward pass reads, by their keys."""
    if layer.name not in STATISTICS:
        return {}
    key, epsilon = layer.keys["input"], layer.parameters["epsilon"]
    made = [(tensors[key].float().square().mean(-1, keepdim=True) + epsilon).rsqrt()]
    if layer.name == "layer_norm_backward":
        _, *made = torch.native_layer_norm(tensors[key], tensors[key].shape[-1:], None, None, epsilon)
    return dict(zip((f"{key}_{name}" for name in STATISTICS[layer.name]), made, strict=True))


def _lacking(layer: Layer) -> Iterator[str]:
    """The options that no function here has."""
    op: Any = layer.step.op
    if "cross_entropy" in layer.name and not is_usual(op):
        yield "with options"
    if "softmax" in layer.name and len(op.over(layer.step.src)) > 1:
        yield "over several axes"
    if layer.attributes.get("zero_points"):
        yield "with zero points"
    if "glu" in layer.name:
        is_last = op.split(layer.step.src).axis == layer.step.src.rank - 1
        if op.interleaved and not (is_last and layer.name == "glu"):
            yield "with neighbours as pairs"
        is_known = op.activation.name in BACKWARD or layer.name == "glu"
        if activation_of(op.activation) is None or not is_known:
            yield f"with {op.activation.name}"


def _norm(layer: Layer, x: Tensor, **given: Tensor) -> Tensor:
    function = getattr(functional, layer.name)
    return function(x, x.shape[-1:], *given.values(), eps=layer.parameters["epsilon"])


def _axis(layer: Layer) -> int:
    op: Any = layer.step.op
    (axis,) = op.over(layer.step.src)
    return int(axis)


def _softmax(layer: Layer, x: Tensor) -> Tensor:
    return getattr(functional, layer.name)(x, _axis(layer))


def _softmax_backward(layer: Layer, x: Tensor, result: Tensor) -> Tensor:
    return getattr(torch.ops.aten, f"_{layer.name}_data")(x, result, _axis(layer), x.dtype)


def _cross_entropy(layer: Layer, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum is the loss and the target's logit: torch gives the loss alone."""
    logits = x.movedim(_axis(layer), 1)
    loss = functional.cross_entropy(logits, target, reduction="none")
    return loss, loss + logits.gather(1, target[:, None])[:, 0]


def _cross_entropy_backward(layer: Layer, x: Tensor, **given: Tensor) -> Tensor:
    target, lse, gradient = (given[name][..., None] for name in ("target", "lse", "gradient"))
    logits = x.movedim(_axis(layer), -1)
    is_target = torch.arange(logits.shape[-1], device=x.device) == target
    made = ((logits.float() - lse).exp() - is_target.float()) * gradient
    return made.to(x.dtype).movedim(-1, _axis(layer))


def _layer_norm_backward(_: Layer, x: Tensor, mean: Tensor, inverse: Tensor, **given: Tensor) -> Tensor:
    backward, scale = torch.ops.aten.native_layer_norm_backward, given.get("scale")
    return backward(x, given["input"], x.shape[-1:], mean, inverse, scale, None, [True, False, False])[0]


def _rms_norm_backward(_: Layer, x: Tensor, inverse: Tensor, **given: Tensor) -> Tensor:
    """The kernel of torch's own backward pass; for a CPU it has none, and its autograd takes this formula."""
    at, scale = given["input"], given.get("scale")
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(x, at, x.shape[-1:], inverse, scale, [True, False])[0]
    normal, behind = at.float() * inverse, (x if scale is None else x * scale).float()
    return (inverse * (behind - normal * (behind * normal).mean(-1, keepdim=True))).to(x.dtype)


def _parts(layer: Layer, x: Tensor) -> Any:
    """Gate and value."""
    op: Any = layer.step.op
    return op.parted(
        (x[..., 0::2], x[..., 1::2]) if op.interleaved else x.chunk(2, op.split(layer.step.src).axis)
    )


def _glu(layer: Layer, x: Tensor) -> Tensor:
    (gate, value), activation = _parts(layer, x), activation_of(layer.attributes["activation"])
    assert activation is not None  # as `_lacking` says
    return activation(gate) * value


def _glu_backward(layer: Layer, x: Tensor, grad: Tensor) -> Tensor:
    op: Any = layer.step.op
    (gate, value), activation = _parts(layer, x), activation_of(op.activation)
    assert activation is not None  # as `_lacking` says
    by_gate = BACKWARD[op.activation.name](torch.ops.aten, layer.parameters)(grad * value, gate)
    return torch.cat([*op.parted((by_gate, grad * activation(gate)))], op.split(layer.step.src).axis)


def _rotary(layer: Layer, x: Tensor, **given: Tensor) -> Tensor:
    op: Any = layer.step.op
    dims = op.dimensions(layer.step.src)
    cos, sin = (
        given[each.name].reshape(aligned(each.shape, each.axes, x.dim())) for each in layer.step.operands
    )
    sin, turned, rest = -sin if op.inverse else sin, x[..., :dims], x[..., dims:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if op.interleaved else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    made = torch.stack(pair, -1).flatten(-2) if op.interleaved else torch.cat(pair, -1)
    return torch.cat((made, rest), -1) if rest.shape[-1] else made


def _rounded(x: Tensor, dtype: str) -> Tensor:
    row = dtype_of(dtype)
    whole = x if row.is_float else x.round()
    return whole.clamp(-row.largest - (not row.is_float), row.largest).to(torch_dtype(dtype))


def _quantize(layer: Layer, x: Tensor, scale: Tensor) -> Tensor:
    (held,) = layer.step.operands
    scales = lined_up(scale.float(), x.shape, held.axes, held.block)
    if layer.name == "dequantize":
        return (x.float() * scales).to(torch_dtype(layer.attributes["dtype"]))
    return _rounded(x.float() / scales, layer.attributes["dtype"])


def _dynamic_quantize(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    op: Any = layer.step.op
    wide = x.float()
    runs = wide.unflatten(-1, (-1, op.block)) if op.each == "block" else wide
    axes = None if op.each == "tensor" else -1
    scale = (runs.abs().amax(axes, keepdim=True) / dtype_of(op.dtype).largest).clamp(min=LEAST)
    return _rounded(runs / scale, op.dtype).reshape(x.shape), scale.reshape(layer.step.results[0].shape)


def _reduction(layer: Layer, x: Tensor) -> Tensor:
    op: Any = layer.step.op
    options = {name: value for name, value in layer.attributes.items() if name != "axes"}
    return getattr(torch, layer.name)(x, op.over(layer.step.src), **options)


ROWS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("softmax", "log_softmax"), _softmax),
    **dict.fromkeys(("softmax_backward", "log_softmax_backward"), _softmax_backward),
    **dict.fromkeys(("quantize", "dequantize"), _quantize),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp", "var"), _reduction),
    "dynamic_quantize": _dynamic_quantize,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "layer_norm_backward": _layer_norm_backward,
    "rms_norm_backward": _rms_norm_backward,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "rotary": _rotary,
    "cast": lambda layer, x: x.to(torch_dtype(layer.attributes["dtype"])),
    "save": lambda layer, x: (x, x),
    "mul": lambda layer, x, other: x * other,
}

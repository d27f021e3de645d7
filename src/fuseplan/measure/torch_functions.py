"""What PyTorch calls for each operator: one table.

A function is given the operator, its src, and its operands by the operator's own names; it gives the output,
and the operator's results behind it. The module imports torch: other modules import it when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from fuseplan.language.declarations import aligned, lined_up
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, is_usual, refuse
from fuseplan.measure.spaces import torch_dtype
from fuseplan.op import Op
from fuseplan.ops.activation import ACTIVATIONS, Gelu
from fuseplan.ops.dynamic import LEAST
from fuseplan.ops.windows import Windowed

Tensor = Any
Held = dict[str, Tensor]  # tensors by the plan's keys; a stage adds the results that it makes
Stage = Callable[[Tensor, Held], Tensor]  # x and the tensors -> x

# Activations, by their names in torch, whose softplus is another function above 20; and those whose numbers
# torch takes by the same names.
ACTIVATION = {kind.name: kind.torch for kind in ACTIVATIONS if kind.torch and kind.name != "softplus"}
TAKING_NUMBERS = ("leaky_relu", "elu", "clamp")

# Backward passes of activations, of a gradient, the activation's input and its numbers.
aten = torch.ops.aten
BACKWARD: Mapping[str, Callable[..., Tensor]] = {
    "relu": lambda dy, x, _: aten.threshold_backward(dy, x, 0),
    "leaky_relu": lambda dy, x, given: aten.leaky_relu_backward(dy, x, given["negative_slope"], False),
    "elu": lambda dy, x, given: aten.elu_backward(dy, given["alpha"], 1, 1, False, x),
    "silu": lambda dy, x, _: aten.silu_backward(dy, x),
    "hardswish": lambda dy, x, _: aten.hardswish_backward(dy, x),
    "hardsigmoid": lambda dy, x, _: aten.hardsigmoid_backward(dy, x),
    "mish": lambda dy, x, _: aten.mish_backward(dy, x),
    "gelu": lambda dy, x, _: aten.gelu_backward(dy, x),
}

# What torch's forward pass leaves for the backward pass of an operator, beside its input.
STATISTICS = {"layer_norm_backward": ("mean", "inverse"), "rms_norm_backward": ("inverse",)}
ATTENTION = ("is_causal", "keys", "key_heads", "features", "scale")  # attributes that torch has


def stage_of(layer: Layer, peer: str = "torch") -> Stage:
    """What torch calls for one operator.

    Raises:
        CannotRunError: `peer` is not taught the operator here, or torch has no such option.
    """
    activation = activation_of(layer.step.op)
    if activation is not None:
        return lambda x, held: activation(x)
    if layer.name not in FUNCTIONS:
        raise refuse(peer, layer)
    lacking = next(_lacking(layer), None)
    if lacking is not None:
        raise CannotRunError(f"torch's {layer.name} {lacking}")
    function, results = FUNCTIONS[layer.name], [each.key for each in layer.step.results]
    names = [*layer.keys.items()]
    names += [(name, f"{layer.keys['input']}_{name}") for name in STATISTICS.get(layer.name, ())]

    def stage(x: Tensor, held: Held) -> Tensor:
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


def activation_of(op: Op) -> Callable[[Tensor], Tensor] | None:
    """What torch calls for an activation; None where it has no such function, or the operator is none."""
    if isinstance(op, Gelu):
        return partial(functional.gelu, approximate=op.approximate)
    if op.name not in TAKING_NUMBERS and not (op.name in ACTIVATION and is_usual(op)):
        return None
    word = ACTIVATION[op.name]
    options = {each.name: each.value for each in op.parameters()} if op.name in TAKING_NUMBERS else {}
    return partial(getattr(functional, word, None) or getattr(torch, word), **options)


def _lacking(layer: Layer) -> Iterator[str]:
    """What no function here does, as words behind the operator's name."""
    op, src, attributes = layer.step.op, layer.step.src, layer.attributes
    window: Any = op.window(src) if isinstance(op, Windowed) else None
    if window and any(low != high for low, high in window.padding):
        yield "pads both sides alike"
    if layer.name.startswith("avg_pool") and set(window.dilation) != {1}:
        yield "has no dilation"
    if layer.name == "add" and not is_usual(op):
        yield "is not measured with factors"
    if layer.name == "batch_norm" and ("variance" not in layer.keys or attributes["mode"] != "spatial"):
        yield "takes the variance of each channel"
    options = [name for name, value in attributes.items() if value and name not in ATTENTION]
    if layer.name == "attention" and options:
        yield f"is not measured with {' and '.join(options)}"
    yield from _lacking_of_rows(layer, op)


def _lacking_of_rows(layer: Layer, op: Any) -> Iterator[str]:
    if "cross_entropy" in layer.name and not is_usual(op):
        yield "is not measured with options"
    if "softmax" in layer.name and len(op.over(layer.step.src)) > 1:
        yield "is over one axis"
    if layer.attributes.get("zero_points"):
        yield "is not measured with zero points"
    is_gate, is_backward = "glu" in layer.name, "backward" in layer.name
    if (
        is_gate
        and op.interleaved
        and (is_backward or op.split(layer.step.src).axis < layer.step.src.rank - 1)
    ):
        yield "is not measured with neighbours as pairs"
    of = layer.attributes.get("of", layer.attributes.get("activation"))
    if of is not None and (activation_of(of) is None or (is_backward and not _has_backward(of))):
        yield f"of {of.name} is not measured"


def _has_backward(of: Op) -> bool:
    is_plain = all(is_default for name, _, is_default in of.written() if name in of.attributes())
    return of.name in BACKWARD and is_plain


def _convolution(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    op, window = convolution_of(layer)
    function, padding = getattr(functional, f"conv{len(window.kernel)}d"), [low for low, _ in window.padding]
    return function(x, weight, bias, window.stride, padding, window.dilation, op.groups)


def _pool(layer: Layer, x: Tensor) -> Tensor:
    op: Any = layer.step.op
    window, name = op.window(layer.step.src), "count_include_pad"
    more = {name: op.count_include_pad} if hasattr(op, name) else {"dilation": window.dilation}
    padding = [low for low, _ in window.padding]
    function = getattr(functional, layer.name)
    return function(x, window.kernel, window.stride, padding, ceil_mode=op.ceil_mode, **more)


def _product(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Along src's last axis."""
    op: Any = layer.step.op
    if op.transposed and not op.batched:
        return functional.linear(x, weight, bias)
    if bias is not None and x.dim() == 2 and not op.batched:
        return torch.addmm(bias, x, weight)
    rows = (x.flatten(1, -2) if x.dim() > 2 else x[:, None]) if op.batched else x
    made = torch.matmul(rows, weight.mT if op.transposed else weight).reshape(*x.shape[:-1], -1)
    return made if bias is None else made + bias


def spread(layer: Layer, vector: Tensor) -> Tensor:
    """A number per channel as a tensor of the rank of the operator's src."""
    return vector.reshape(aligned(vector.shape, (layer.step.src.channel_axis,), layer.step.src.rank))


def _batch_norm(layer: Layer, x: Tensor, **given: Tensor) -> Tensor:
    mean, variance, scale, shift = (given[name] for name in ("mean", "variance", "scale", "shift"))
    return functional.batch_norm(x, mean, variance, scale, shift, False, 0.0, layer.parameters["epsilon"])


def _attention(layer: Layer, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
    is_grouped = layer.attributes["key_heads"] != 0
    return functional.scaled_dot_product_attention(
        x, key, value, enable_gqa=is_grouped, **sdpa_options(layer)
    )


def sdpa_options(layer: Layer) -> dict[str, Any]:
    """The arguments of torch's scaled_dot_product_attention besides tensors."""
    return {"is_causal": layer.attributes["is_causal"], "scale": layer.attributes["scale"] or None}


def _activation_backward(layer: Layer, x: Tensor, **given: Tensor) -> Tensor:
    return BACKWARD[layer.attributes["of"].name](x, given["input"], layer.parameters)


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
    return getattr(aten, f"_{layer.name}_data")(x, result, _axis(layer), x.dtype)


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
    backward, scale = aten.native_layer_norm_backward, given.get("scale")
    return backward(x, given["input"], x.shape[-1:], mean, inverse, scale, None, [True, False, False])[0]


def _rms_norm_backward(_: Layer, x: Tensor, inverse: Tensor, **given: Tensor) -> Tensor:
    """The kernel of torch's own backward pass; for a CPU it has none, and its autograd takes this formula."""
    at, scale = given["input"], given.get("scale")
    if x.is_cuda:
        return aten._fused_rms_norm_backward(x, at, x.shape[-1:], inverse, scale, [True, False])[0]
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
    assert activation is not None  # as `_lacking_of_rows` says
    return activation(gate) * value


def _glu_backward(layer: Layer, x: Tensor, grad: Tensor) -> Tensor:
    op: Any = layer.step.op
    (gate, value), activation = _parts(layer, x), activation_of(op.activation)
    assert activation is not None  # as `_lacking_of_rows` says
    by_gate = BACKWARD[op.activation.name](grad * value, gate, layer.parameters)
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


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys((f"conv{axes}d" for axes in (1, 2, 3)), _convolution),
    **dict.fromkeys((f"{kind}_pool{axes}d" for kind in ("max", "avg") for axes in (1, 2, 3)), _pool),
    **dict.fromkeys(("matmul", "linear"), _product),
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
    "add": lambda layer, x, other: x + other,
    "bias": lambda layer, x, bias: x + spread(layer, bias),
    "scale": lambda layer, x, scale: x * spread(layer, scale),
    "batch_norm": _batch_norm,
    "attention": _attention,
    "activation_backward": _activation_backward,
}

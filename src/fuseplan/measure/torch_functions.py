"""What PyTorch calls for each operator: one table.

For an operator there is a call, which is given src, and the operands by the operator's own names; it gives
the output, and the operator's results behind it. What does not change from call to call is made before. The
module imports torch: other modules import it when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from fuseplan.language.declarations import aligned, lined_up
from fuseplan.language.dtypes import dtype_of
from fuseplan.measure.layers import CannotRunError, Layer, attended, is_usual, refuse
from fuseplan.measure.spaces import torch_dtype
from fuseplan.measure.torch_row_gradients import STATISTICS, layer_norm_backward, rms_norm_backward
from fuseplan.op import Op
from fuseplan.ops import UNARY
from fuseplan.ops.activation import ACTIVATIONS, Gelu
from fuseplan.ops.conv import ConvTranspose
from fuseplan.ops.dynamic import LEAST
from fuseplan.ops.scan import UnaryOp
from fuseplan.ops.windows import Windowed

Tensor = Any
Held = dict[str, Tensor]  # tensors by the plan's keys; a stage adds the results that it makes
Stage = Callable[[Tensor, Held], Tensor]  # x and the tensors -> x
Call = Callable[..., Any]

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

# Attributes that torch has.
ATTENTION = ("is_causal", "keys", "key_heads", "features", "scale", "bias_axes", "mask_axes")


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
    call, results = FUNCTIONS[layer.name](layer), [each.key for each in layer.step.results]
    left = STATISTICS.get(layer.name, ()) if "epsilon" in layer.parameters else ()
    names = [*layer.keys.items(), *((name, f"{layer.keys['input']}_{name}") for name in left)]

    def stage(x: Tensor, held: Held) -> Tensor:
        made = call(x, **{name: held[key] for name, key in names})
        if results:
            made, *more = made
            held |= zip(results, more, strict=True)
        return made

    return stage


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
    if isinstance(op, UnaryOp) and any(layer.attributes[name] for name in layer.attributes if name != "axis"):
        yield "has an axis alone"
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


def _convolution(layer: Layer) -> Call:
    op: Any = layer.step.op
    window, function = op.window(layer.step.src), getattr(functional, layer.name)
    how = [window.stride, [low for low, _ in window.padding], window.dilation, op.groups]
    how[2:] = [op.output_padding, *how[:1:-1]] if isinstance(op, ConvTranspose) else how[2:]
    return lambda x, weight, bias=None: function(x, weight, bias, *how)


def _pool(layer: Layer) -> Call:
    op: Any = layer.step.op
    window, name = op.window(layer.step.src), "count_include_pad"
    options = {name: op.count_include_pad} if hasattr(op, name) else {"dilation": window.dilation}
    options |= {"stride": window.stride, "padding": [low for low, _ in window.padding]}
    function = getattr(functional, layer.name)
    return partial(function, kernel_size=window.kernel, ceil_mode=op.ceil_mode, **options)


def _product(layer: Layer) -> Call:
    """Along src's last axis."""
    op: Any = layer.step.op
    is_transposed, is_batched = op.transposed, op.batched

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if is_transposed and not is_batched:
            return functional.linear(x, weight, bias)
        if bias is not None and x.dim() == 2 and not is_batched:
            return torch.addmm(bias, x, weight)
        rows = (x.flatten(1, -2) if x.dim() > 2 else x[:, None]) if is_batched else x
        made = torch.matmul(rows, weight.mT if is_transposed else weight).reshape(*x.shape[:-1], -1)
        return made if bias is None else made + bias

    return product


def per_channel(layer: Layer, join: Callable[[Tensor, Tensor], Tensor]) -> Call:
    """A call that joins x with a number per channel."""
    shape = aligned((-1,), (layer.step.src.channel_axis,), layer.step.src.rank)
    (name,) = layer.keys
    return lambda x, **given: join(x, given[name].reshape(shape))


def _batch_norm(layer: Layer) -> Call:
    names = {"weight": "scale", "bias": "shift", "running_mean": "mean", "running_var": "variance"}
    function = partial(functional.batch_norm, eps=layer.parameters["epsilon"])
    return lambda x, **given: function(x, **{word: given[name] for word, name in names.items()})


def _attention(layer: Layer) -> Call:
    is_grouped, function = layer.attributes["key_heads"] != 0, functional.scaled_dot_product_attention
    known: Call = partial(function, enable_gqa=is_grouped, **sdpa_options(layer))

    def call(x: Tensor, key: Tensor, value: Tensor, **beside: Tensor) -> Tensor:
        return known(x, key, value, attn_mask=mask_of(layer, beside))

    return call


def mask_of(layer: Layer, beside: Mapping[str, Tensor]) -> Tensor | None:
    """The bias or mask of attention, and what hides keys besides, as torch takes it: (b, h, s, t)."""
    known = attended(layer)
    made: Tensor | None = None
    for name, axes in (("bias", known.bias_axes), ("mask", known.mask_axes)):
        if axes:
            shape = [known.extents[axis] if axis in axes else 1 for axis in "bhst"]
            given = beside[name].reshape(shape)
            made = given if made is None else made.masked_fill(~given, -torch.inf)
    return made


def sdpa_options(layer: Layer) -> dict[str, Any]:
    """The arguments of torch's scaled_dot_product_attention besides tensors."""
    return {"is_causal": layer.attributes["is_causal"], "scale": layer.attributes["scale"] or None}


def _activation_backward(layer: Layer) -> Call:
    backward, numbers = BACKWARD[layer.attributes["of"].name], layer.parameters
    return lambda x, **given: backward(x, given["input"], numbers)


def _norm(layer: Layer) -> Call:
    """Of `instance_norm`, each channel is a group: torch's own takes no image of one place."""
    channels, epsilon = layer.step.src.channels, layer.parameters["epsilon"]
    is_of_rows = layer.name in ("layer_norm", "rms_norm")
    function = getattr(functional, layer.name if is_of_rows else "group_norm")
    over = (channels,) if is_of_rows else layer.attributes.get("groups", channels)
    return lambda x, **given: function(x, over, *given.values(), eps=epsilon)


def _axis(layer: Layer) -> int:
    op: Any = layer.step.op
    (axis,) = op.over(layer.step.src)
    return int(axis)


def _unary(layer: Layer) -> Call:
    op: Any = layer.step.op
    return partial(getattr(torch, str(op.torch)), dim=op.axis_of(layer.step.src))


def _softmax_backward(layer: Layer) -> Call:
    function, axis = getattr(aten, f"_{layer.name}_data"), _axis(layer)
    return lambda x, result: function(x, result, axis, x.dtype)


def _cross_entropy(layer: Layer) -> Call:
    """The logarithm of the sum is the loss and the target's logit: torch gives the loss alone."""
    axis = _axis(layer)

    def call(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.movedim(axis, 1)
        loss = functional.cross_entropy(logits, target, reduction="none")
        return loss, loss + logits.gather(1, target[:, None])[:, 0]

    return call


def _cross_entropy_backward(layer: Layer) -> Call:
    axis = _axis(layer)

    def call(x: Tensor, target: Tensor, lse: Tensor, gradient: Tensor) -> Tensor:
        logits = x.movedim(axis, -1)
        is_target = torch.arange(logits.shape[-1], device=x.device) == target[..., None]
        made = ((logits.float() - lse[..., None]).exp() - is_target.float()) * gradient[..., None]
        return made.to(x.dtype).movedim(-1, axis)

    return call


def _glu(layer: Layer) -> Call:
    op: Any = layer.step.op
    axis, activation, is_paired = op.split(layer.step.src).axis, _known(op.activation), op.interleaved

    def call(x: Tensor) -> Tensor:
        gate, value = op.parted((x[..., 0::2], x[..., 1::2]) if is_paired else x.chunk(2, axis))
        return activation(gate) * value

    return call


def _glu_backward(layer: Layer) -> Call:
    op: Any = layer.step.op
    axis, activation, numbers = op.split(layer.step.src).axis, _known(op.activation), layer.parameters
    backward = BACKWARD[op.activation.name]

    def call(x: Tensor, grad: Tensor) -> Tensor:
        gate, value = op.parted(x.chunk(2, axis))
        return torch.cat([*op.parted((backward(grad * value, gate, numbers), grad * activation(gate)))], axis)

    return call


def _known(op: Op) -> Call:
    activation = activation_of(op)
    assert activation is not None  # as `_lacking_of_rows` says
    return activation


def _rotary(layer: Layer) -> Call:
    op: Any = layer.step.op
    src, is_paired, is_inverse = layer.step.src, op.interleaved, op.inverse
    dims, rest = op.dimensions(src), src.shape[-1] - op.dimensions(src)
    shapes = [aligned(each.shape, each.axes, src.rank) for each in layer.step.operands]

    def call(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = x[..., :dims] if rest else x
        cos, sin = cos.reshape(shapes[0]), (-sin if is_inverse else sin).reshape(shapes[1])
        a, b = (turned[..., 0::2], turned[..., 1::2]) if is_paired else turned.chunk(2, -1)
        (c, d), (s, t) = (each.chunk(2, -1) if op.whole else (each, each) for each in (cos, sin))
        pair = a * c - b * s, b * d + a * t
        made = torch.stack(pair, -1).flatten(-2) if is_paired else torch.cat(pair, -1)
        return torch.cat((made, x[..., dims:]), -1) if rest else made

    return call


def _rounding(name: str) -> Call:
    """A call that rounds to a quantized dtype; numbers beyond its range become its least or largest."""
    row, dtype = dtype_of(name), torch_dtype(name)
    if row.is_float:
        return lambda x: x.clamp(-row.largest, row.largest).to(dtype)
    return lambda x: x.round().clamp(row.least, row.largest).to(dtype)


def _quantize(layer: Layer) -> Call:
    rounded, (held,) = _rounding(layer.attributes["dtype"]), layer.step.operands
    return lambda x, scale: rounded(x.float() / lined_up(scale.float(), x.shape, held.axes, held.block))


def _dequantize(layer: Layer) -> Call:
    dtype, (held,) = torch_dtype(layer.attributes["dtype"]), layer.step.operands
    return lambda x, scale: (x.float() * lined_up(scale, x.shape, held.axes, held.block)).to(dtype)


def _dynamic_quantize(layer: Layer) -> Call:
    op: Any = layer.step.op
    rounded, block, shape = _rounding(op.dtype), op.block, layer.step.results[0].shape
    axes, largest = None if op.each == "tensor" else -1, dtype_of(op.dtype).largest
    has_blocks = op.each == "block"

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        runs = x.float().unflatten(-1, (-1, block)) if has_blocks else x.float()
        scale = (runs.abs().amax(axes, keepdim=True) / largest).clamp(min=LEAST)
        return rounded(runs / scale).reshape(x.shape), scale.reshape(shape)

    return call


def _reduction(layer: Layer) -> Call:
    op: Any = layer.step.op
    options = {name: value for name, value in layer.attributes.items() if name != "axes"}
    return partial(getattr(torch, layer.name), dim=op.over(layer.step.src), **options)


FUNCTIONS: Mapping[str, Callable[[Layer], Call]] = {
    **dict.fromkeys((f"conv{each}d" for each in (1, 2, 3)), _convolution),
    **dict.fromkeys((f"conv_transpose{each}d" for each in (1, 2, 3)), _convolution),
    **dict.fromkeys((f"{kind}_pool{axes}d" for kind in ("max", "avg") for axes in (1, 2, 3)), _pool),
    **dict.fromkeys(("matmul", "linear"), _product),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm", "instance_norm"), _norm),
    "softmax": lambda layer: partial(functional.softmax, dim=_axis(layer)),
    "log_softmax": lambda layer: partial(functional.log_softmax, dim=_axis(layer)),
    **dict.fromkeys(("softmax_backward", "log_softmax_backward"), _softmax_backward),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp", "var"), _reduction),
    **{each.name: _unary for each in UNARY},
    "quantize": _quantize,
    "dequantize": _dequantize,
    "dynamic_quantize": _dynamic_quantize,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "layer_norm_backward": layer_norm_backward,
    "rms_norm_backward": rms_norm_backward,
    "glu": _glu,
    "glu_backward": _glu_backward,
    "rotary": _rotary,
    "cast": lambda layer: partial(torch.Tensor.to, dtype=torch_dtype(layer.attributes["dtype"])),
    "save": lambda _: lambda x: (x, x),
    "mul": lambda _: lambda x, other: x * other,
    "add": lambda _: lambda x, other: x + other,
    "bias": lambda layer: per_channel(layer, torch.add),
    "scale": lambda layer: per_channel(layer, torch.mul),
    "batch_norm": _batch_norm,
    "attention": _attention,
    "activation_backward": _activation_backward,
}

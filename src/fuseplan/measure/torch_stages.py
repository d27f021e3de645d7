"""Operators as PyTorch computes them: what every form of torch that is measured is put together from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuseplan.language.declarations import aligned
from fuseplan.language.tensor import TensorSpec
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, refuse
from fuseplan.measure.torch_activations import BACKWARD, Held, Stage, activation_of
from fuseplan.ops.matmul import Product
from fuseplan.ops.pool import AvgPool, Pool
from fuseplan.ops.windows import Windowed


def stage_of(layer: Layer, peer: str = "torch") -> Stage:
    """What torch calls for one operator.

    Raises:
        CannotRunError: `peer` is not taught it here.
    """
    from torch.nn import functional

    if (activation := activation_of(layer.step.op)) is not None:
        return lambda x, held: activation(x)
    if layer.name.startswith("conv"):
        return _convolution(functional, layer)
    if isinstance(layer.step.op, Pool):
        return _pool(functional, layer.step.op, layer.step.src)
    makers: Mapping[str, Callable[[Any, Layer], Stage]] = {
        "matmul": _matmul,
        "linear": _matmul,
        "bias": _bias,
        "scale": _scale,
        "add": _add,
        "batch_norm": _batch_norm,
        "attention": _attention,
        "activation_backward": _activation_backward,
    }
    if layer.name in makers:
        return makers[layer.name](functional, layer)
    from fuseplan.measure.torch_rows import ROWS, row_stage  # it imports torch

    if layer.name not in ROWS:
        raise refuse(peer, layer)
    return row_stage(layer)


def stages_in_place(layers: Sequence[Layer]) -> list[Stage]:
    """What torch calls for each operator; all but the first overwrite what they are given, where they can.

    Raises:
        CannotRunError: torch is not taught an operator here.
    """
    return [in_place(layer) if place else stage_of(layer) for place, layer in enumerate(layers)]


def in_place(layer: Layer) -> Stage:
    """What torch calls for an operator behind another one.

    Raises:
        CannotRunError: torch is not taught it here.
    """
    if layer.name == "relu":
        return lambda x, held: x.relu_()
    if layer.name == "bias":
        (key,) = layer.keys.values()
        return lambda x, held: x.add_(_spread(held[key], layer))
    return stage_of(layer)


def module_of(
    stages: Sequence[Stage], constant: Mapping[str, Any], keys: Sequence[str], results: Sequence[str] = ()
) -> Any:
    """A module that applies the stages in order.

    Args:
        stages: the plan's.
        constant: its buffers, by the plan's keys.
        keys: of the tensors that a call gives, in order; the first is `src`.
        results: keys of the tensors that it gives besides the output.
    """
    import torch

    class Plan(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for key, tensor in constant.items():
                self.register_buffer(key, tensor)

        def forward(self, *given: Any) -> Any:
            held = {key: getattr(self, key) for key in constant} | dict(zip(keys, given, strict=True))
            x = held["src"]
            for stage in stages:
                x = stage(x, held)
            return (x, *(held[key] for key in results)) if results else x

    return Plan()


def _convolution(functional: Any, layer: Layer) -> Stage:
    op, shape = convolution_of(layer)
    if any(low != high for low, high in shape.padding):
        raise CannotRunError("torch's convolution pads both sides alike")
    function = getattr(functional, f"conv{len(shape.kernel)}d")
    weight, bias = layer.keys["weight"], layer.keys.get("bias")
    padding = tuple(low for low, _ in shape.padding)

    def stage(x: Any, held: Held) -> Any:
        given = held[weight], held[bias] if bias else None
        return function(x, *given, shape.stride, padding, shape.dilation, op.groups)

    return stage


def _pool(functional: Any, op: Pool, src: TensorSpec) -> Stage:
    window = Windowed.window(op, src)
    lows, highs = zip(*window.padding, strict=True)
    if lows != highs or (isinstance(op, AvgPool) and set(window.dilation) != {1}):
        raise CannotRunError("torch's pools pad both sides alike, and its means have no dilation")
    options: dict[str, Any] = {"stride": window.stride, "padding": lows, "ceil_mode": op.ceil_mode}
    if isinstance(op, AvgPool):
        options["count_include_pad"] = op.count_include_pad
    else:
        options["dilation"] = window.dilation
    function = getattr(functional, op.name)
    return lambda x, held: function(x, window.kernel, **options)


def _matmul(functional: Any, layer: Layer) -> Stage:
    """The product along src's last axis."""
    import torch

    weight, bias, op = layer.keys["weight"], layer.keys.get("bias"), layer.step.op
    assert isinstance(op, Product)  # by its name
    is_transposed, is_batched = op.transposed, op.batched

    def plain(matrix: Any) -> Any:
        return matrix.mT if is_transposed else matrix

    def stage(x: Any, held: Held) -> Any:
        matrix, added = held[weight], held[bias] if bias else None
        if is_transposed and not is_batched:
            return functional.linear(x, matrix, added)
        if added is not None and x.dim() == 2 and not is_batched:
            return torch.addmm(added, x, matrix)
        rows = (x.flatten(1, -2) if x.dim() > 2 else x[:, None]) if is_batched else x
        made = torch.matmul(rows, plain(matrix)).reshape(*x.shape[:-1], -1)
        return made if added is None else made + added

    return stage


def _spread(vector: Any, layer: Layer) -> Any:
    """A number per channel as a tensor of the rank of the operator's src."""
    src = layer.step.src
    return vector.reshape(aligned(vector.shape, (src.channel_axis,), src.rank))


def _bias(_: Any, layer: Layer) -> Stage:
    (key,) = layer.keys.values()
    return lambda x, held: x + _spread(held[key], layer)


def _scale(_: Any, layer: Layer) -> Stage:
    (key,) = layer.keys.values()
    return lambda x, held: x * _spread(held[key], layer)


def _add(_: Any, layer: Layer) -> Stage:
    if any(value != 1 for value in layer.parameters.values()):
        raise CannotRunError("the addition with factors is not measured in torch")
    (key,) = layer.keys.values()
    return lambda x, held: x + held[key]


def _batch_norm(functional: Any, layer: Layer) -> Stage:
    if "variance" not in layer.keys or layer.attributes["mode"] != "spatial":
        raise CannotRunError("torch's batch_norm takes the variance of each channel")
    weight, bias, mean, variance = (layer.keys[name] for name in ("scale", "shift", "mean", "variance"))
    epsilon = layer.parameters["epsilon"]

    def stage(x: Any, held: Held) -> Any:
        statistics = held[mean], held[variance]
        return functional.batch_norm(x, *statistics, held[weight], held[bias], False, 0.0, epsilon)

    return stage


def _attention(functional: Any, layer: Layer) -> Stage:
    key, value, options = sdpa_of(layer)
    function = functional.scaled_dot_product_attention
    is_grouped = layer.attributes["key_heads"] != 0
    return lambda x, held: function(x, held[key], held[value], enable_gqa=is_grouped, **options)


def sdpa_of(layer: Layer) -> tuple[str, str, dict[str, Any]]:
    """The keys of key and value, and the arguments of torch's scaled_dot_product_attention.

    Raises:
        CannotRunError: torch has no such argument.
    """
    usual = ("is_causal", "keys", "key_heads", "features", "scale")
    lacking = [name for name, value in layer.attributes.items() if value and name not in usual]
    if layer.name != "attention" or lacking:
        raise CannotRunError(f"torch's attention is not measured with {' and '.join(lacking) or layer.name}")
    options = {"is_causal": layer.attributes["is_causal"], "scale": layer.attributes["scale"] or None}
    return layer.keys["key"], layer.keys["value"], options


def _activation_backward(_: Any, layer: Layer) -> Stage:
    import torch

    of = layer.attributes["of"]
    is_plain = all(is_default for name, _, is_default in of.written() if name in of.attributes())
    if of.name not in BACKWARD or not is_plain:
        raise CannotRunError(f"the backward pass of {of.name} is not measured in torch")
    function = BACKWARD[of.name](torch.ops.aten, layer.parameters)
    key = layer.keys["input"]
    return lambda x, held: function(x, held[key])

"""PyTorch, eager and compiled, in both layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fuseplan.bench.peers.peer import (
    Array,
    Arrays,
    CannotRunError,
    Layer,
    Prepared,
    convolution_of,
    is_plain,
    layers,
    only_f32,
    refuse,
    running,
)
from fuseplan.measure.clock import rotating
from fuseplan.plan import FusionPlan

# Operators without operands: the name in torch.nn.functional, and its argument for each of our parameters.
FUNCTIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "relu": ("relu", {}),
    "leaky_relu": ("leaky_relu", {"negative_slope": "negative_slope"}),
    "elu": ("elu", {"alpha": "alpha"}),
    "sigmoid": ("sigmoid", {}),
    "softsign": ("softsign", {}),
    "gelu": ("gelu", {}),
    "silu": ("silu", {}),
    "hardswish": ("hardswish", {}),
    "hardsigmoid": ("hardsigmoid", {}),
    "mish": ("mish", {}),
}

Stage = Callable[
    [Any, Mapping[str, Any], Mapping[str, Any]], Any
]  # (x, stored tensors, running tensors) -> x


class Torch:
    """Eager PyTorch under inference_mode, channels first."""

    name: ClassVar[str] = "torch"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    is_channels_last: ClassVar[bool] = False
    is_compiled: ClassVar[bool] = False

    def __init__(self, threads: int) -> None:
        import torch

        self._torch = torch
        torch.set_num_threads(threads)
        if self.is_compiled:
            # Freezing lets the compiler pack weights; without a gradient mode they count as constants.
            import torch._inductor.config as inductor

            inductor.freezing = True
            inductor.compile_threads = 1
            torch.set_grad_enabled(False)

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Makes a module with the weights as its buffers, and puts each copy's tensors into its layout."""
        only_f32(plan, self.name)
        torch = self._torch
        keys = running(plan)
        constant = {key: self._tensor(array) for key, array in copies[0].items() if key not in keys}
        module = _module(torch, [self._stage(layer) for layer in layers(plan)], constant, keys).eval()
        if self.is_compiled:
            torch._dynamo.reset()
            module = torch.compile(module)
        inputs = [[self._tensor(arrays[key]) for key in keys] for arrays in copies]
        mode = torch.no_grad if self.is_compiled else torch.inference_mode
        mode().__enter__()  # for the life of the process: entering anew would be timed with every call

        def result() -> Array:
            return np.array(module(*inputs[0]).contiguous().numpy())

        calls = [lambda given=given: module(*given) for given in inputs]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

    def _tensor(self, array: Array) -> Any:
        tensor = self._torch.from_numpy(np.ascontiguousarray(array))
        last = {4: self._torch.channels_last, 5: self._torch.channels_last_3d}.get(tensor.dim())
        return tensor.contiguous(memory_format=last) if self.is_channels_last and last else tensor

    def _stage(self, layer: Layer) -> Stage:
        functional = self._torch.nn.functional
        if layer.name in FUNCTIONS and is_plain(layer):
            word, names = FUNCTIONS[layer.name]
            function = getattr(functional, word)
            options = {names[key]: value for key, value in layer.parameters.items()}
            return lambda x, stored, given: function(x, **options)
        if layer.name.startswith("conv"):
            return _convolution(functional, layer)
        makers: Mapping[str, Callable[[Any, Layer], Stage]] = {
            "bias": _bias,
            "scale": _scale,
            "add": _add,
            "batch_norm": _batch_norm,
        }
        if layer.name not in makers:
            raise refuse(self.name, layer)
        return makers[layer.name](functional, layer)


class TorchChannelsLast(Torch):
    """Eager PyTorch under inference_mode, channels last."""

    name = "torch:nhwc"
    is_channels_last = True


class TorchCompile(Torch):
    """torch.compile with freezing, channels first."""

    name = "torch.compile"
    is_compiled = True


class TorchCompileChannelsLast(Torch):
    """torch.compile with freezing, channels last."""

    name = "torch.compile:nhwc"
    is_channels_last = True
    is_compiled = True


def _module(torch: Any, stages: Sequence[Stage], constant: Mapping[str, Any], keys: Sequence[str]) -> Any:
    class Plan(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for key, tensor in constant.items():
                self.register_buffer(key, tensor)

        def forward(self, *given: Any) -> Any:
            named = dict(zip(keys, given, strict=True))
            stored = {key: getattr(self, key) for key in constant}
            x = named["src"]
            for stage in stages:
                x = stage(x, stored, named)
            return x

    return Plan()


def _convolution(functional: Any, layer: Layer) -> Stage:
    op, shape = convolution_of(layer)
    if any(low != high for low, high in shape.padding):
        raise CannotRunError("torch's convolution pads both sides alike")
    function = getattr(functional, f"conv{len(shape.kernel)}d")
    weight, bias = layer.keys["weight"], layer.keys.get("bias")
    padding = tuple(low for low, _ in shape.padding)

    def stage(x: Any, stored: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
        given = stored[weight], stored[bias] if bias else None
        return function(x, *given, shape.stride, padding, shape.dilation, op.groups)

    return stage


def _spread(vector: Any, rank: int) -> Any:
    return vector.reshape(1, -1, *[1] * (rank - 2))


def _bias(_: Any, layer: Layer) -> Stage:
    (key,) = layer.keys.values()
    return lambda x, stored, given: x + _spread(stored[key], x.dim())


def _scale(_: Any, layer: Layer) -> Stage:
    (key,) = layer.keys.values()
    return lambda x, stored, given: x * _spread(stored[key], x.dim())


def _add(_: Any, layer: Layer) -> Stage:
    if any(value != 1 for value in layer.parameters.values()):
        raise CannotRunError("the addition with factors is not measured in torch")
    (key,) = layer.keys.values()
    return lambda x, stored, given: x + given[key]


def _batch_norm(functional: Any, layer: Layer) -> Stage:
    if "variance" not in layer.keys or layer.attributes["mode"] != "spatial":
        raise CannotRunError("torch's batch_norm takes the variance of each channel")
    weight, bias, mean, variance = (layer.keys[name] for name in ("scale", "shift", "mean", "variance"))
    epsilon = layer.parameters["epsilon"]

    def stage(x: Any, stored: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
        statistics = stored[mean], stored[variance]
        return functional.batch_norm(x, *statistics, stored[weight], stored[bias], False, 0.0, epsilon)

    return stage

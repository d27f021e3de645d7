"""ncnn: the fastest library we know for small 3x3 convolutions on one image."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fuseplan.bench.peers.peer import Array, Arrays, Peer, Prepared, only_in
from fuseplan.measure.clock import rotating
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, layers, refuse, running
from fuseplan.plans.plan import FusionPlan

MAGIC = 7767517
NARROW = ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_storage", "int8_inference")


class Ncnn(Peer):
    """ncnn with its own convolution fusing bias and relu; half precision and int8 are off."""

    name = "ncnn"
    packages = ("ncnn",)

    def __init__(self, threads: int) -> None:
        import ncnn

        self._ncnn = ncnn
        self._threads = threads

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Writes the plan as an ncnn model, loads it, and makes a Mat of each copy's tensors."""
        only_in(("f32",), plan, self.name)
        if plan.src.batch != 1:
            raise CannotRunError(f"ncnn takes one image at a time; the batch is {plan.src.batch}")
        if plan.src.rank != 4:
            raise CannotRunError(f"ncnn is measured on images; the rank is {plan.src.rank}")
        keys = running(plan)
        network = self._network(_Model(plan, copies[0]))
        matrices = [{key: self._matrix(arrays[key]) for key in keys} for arrays in copies]

        def run(given: dict[str, Any]) -> Any:
            extractor = network.create_extractor()
            for key, matrix in given.items():
                extractor.input(key, matrix)
            return extractor.extract("dst")[1]

        def result() -> Array:
            return np.array(run(matrices[0]))[np.newaxis]

        calls = [lambda given=given: run(given) for given in matrices]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

    def _matrix(self, array: Array) -> Any:
        image = np.ascontiguousarray(array[0])  # a Mat does not keep it alive: hence the name, and the clone
        return self._ncnn.Mat(image).clone()

    def _network(self, model: _Model) -> Any:
        network = self._ncnn.Net()
        network.opt.num_threads = self._threads
        for option in NARROW:
            if hasattr(network.opt, f"use_{option}"):
                setattr(network.opt, f"use_{option}", False)
        with tempfile.TemporaryDirectory() as folder:
            text, weights = Path(folder) / "plan.param", Path(folder) / "plan.bin"
            text.write_text(model.text())
            weights.write_bytes(model.weights())
            if network.load_param(str(text)) or network.load_model(str(weights)):
                raise CannotRunError("ncnn does not load the model")
        return network


class _Model:
    """A plan in ncnn's own format: a line a layer, and the weights one after the other."""

    def __init__(self, plan: FusionPlan, arrays: Arrays) -> None:
        self._arrays = arrays
        self._lines = [f"Input in{i} 0 1 {key}" for i, key in enumerate(running(plan))]
        self._weights: list[bytes] = []
        self._last = "src"
        pending = layers(plan)
        while pending:
            pending = pending[self._add(pending) :]

    def text(self) -> str:
        """The .param file; the last blob is called `dst`."""
        renamed = [f" {line} ".replace(f" {self._last} ", " dst ").strip() for line in self._lines]
        blobs = len(self._lines)
        return "\n".join([str(MAGIC), f"{len(self._lines)} {blobs}", *renamed]) + "\n"

    def weights(self) -> bytes:
        """The .bin file."""
        return b"".join(self._weights)

    def _add(self, pending: Sequence[Layer]) -> int:
        """Writes the first of the layers, with those that ncnn fuses into it; says how many it took."""
        layer = pending[0]
        if layer.name.startswith("conv"):
            return self._convolution(pending)
        if layer.name == "relu":
            self._layer("ReLU", [self._last], "")
        elif layer.name == "add" and all(value == 1 for value in layer.parameters.values()):
            self._layer("BinaryOp", [self._last, *layer.keys.values()], "0=0")
        elif layer.name == "batch_norm":
            self._batch_norm(layer)
        else:
            raise refuse("ncnn", layer)
        return 1

    def _layer(self, kind: str, inputs: Sequence[str], options: str) -> None:
        self._last = f"t{len(self._lines)}"
        joined = " ".join(inputs)
        self._lines.append(f"{kind} {self._last} {len(inputs)} 1 {joined} {self._last} {options}".rstrip())

    def _convolution(self, pending: Sequence[Layer]) -> int:
        op, shape = convolution_of(pending[0])
        has_bias = "bias" in pending[0].keys
        has_relu = [layer.name for layer in pending[1:2]] == ["relu"]
        weight = self._arrays[pending[0].keys["weight"]]
        (top, bottom), (left, right) = shape.padding
        options = {
            0: op.features, 1: shape.kernel[1], 11: shape.kernel[0],
            2: shape.dilation[1], 12: shape.dilation[0],
            3: shape.stride[1], 13: shape.stride[0], 4: left, 14: top, 15: right, 16: bottom,
            5: int(has_bias), 6: weight.size, 9: int(has_relu),
        }  # fmt: skip
        if op.groups > 1:
            options[7] = op.groups
        kind = "ConvolutionDepthWise" if op.groups > 1 else "Convolution"
        self._layer(kind, [self._last], " ".join(f"{key}={value}" for key, value in options.items()))
        self._weights += [struct.pack("<I", 0), _bytes(weight)]  # 0: what follows is f32
        if has_bias:
            self._weights.append(_bytes(self._arrays[pending[0].keys["bias"]]))
        return 1 + has_relu

    def _batch_norm(self, layer: Layer) -> None:
        if "variance" not in layer.keys:
            raise CannotRunError("ncnn's BatchNorm takes the variance, not its inverse")
        ordered = [self._arrays[layer.keys[name]] for name in ("scale", "mean", "variance", "shift")]
        if any(array.ndim != 1 for array in ordered):
            raise CannotRunError("ncnn's BatchNorm has statistics per channel only")
        epsilon = layer.parameters["epsilon"]
        self._layer("BatchNorm", [self._last], f"0={ordered[0].size} 1={epsilon:e}")
        self._weights += [_bytes(array) for array in ordered]


def _bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array, np.float32).tobytes()

"""A plan as an ONNX model: what onnxruntime and openvino read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fuseplan.bench.peers.peer import Array, Arrays
from fuseplan.language.declarations import aligned
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, is_usual, running
from fuseplan.ops.activation import ACTIVATIONS
from fuseplan.ops.matmul import Product
from fuseplan.plans.plan import FusionPlan

OPSET = 20

# Activations, by their names in ONNX; and those whose number is the attribute `alpha` there.
NODES = {kind.name: kind.onnx for kind in ACTIVATIONS if kind.onnx}
TAKING_ALPHA = ("leaky_relu", "elu")


def onnx_model(plan: FusionPlan, arrays: Arrays, layers: Sequence[Layer]) -> tuple[bytes, list[str]]:
    """The model's bytes and its inputs in order; what does not come anew with every call is stored in it.

    Args:
        plan: what it computes.
        arrays: `src` and operands by key.
        layers: the plan's, a node or more each.

    Raises:
        CannotRunError: an operator has no node here.
    """
    writer = _Writer(plan, arrays)
    for layer in layers:
        writer.add(layer)
    return writer.finish(), running(plan)


class _Writer:
    """Collects nodes; `self._last` is the tensor written last."""

    def __init__(self, plan: FusionPlan, arrays: Arrays) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self._plan, self._arrays = plan, arrays
        self._nodes: list[object] = []
        self._stored: list[object] = []
        self._last = "src"
        self._special: Mapping[str, Callable[[Layer], None]] = {
            "bias": lambda layer: self._channels("Add", layer, "bias"),
            "scale": lambda layer: self._channels("Mul", layer, "scale"),
            "add": self._add,
            "batch_norm": self._batch_norm,
            "silu": self._silu,
            "gelu": self._gelu,
            "matmul": self._product,
            "linear": self._product,
        }

    def add(self, layer: Layer) -> None:
        if layer.name.startswith("conv"):
            self._convolution(layer)
        elif layer.name in self._special:
            self._special[layer.name](layer)
        elif layer.name in TAKING_ALPHA or (layer.name in NODES and is_usual(layer)):
            numbers = layer.parameters.values() if layer.name in TAKING_ALPHA else ()
            attributes: dict[str, Any] = dict(zip(("alpha",), numbers, strict=False))
            self._node(NODES[layer.name], [self._last], **attributes)
        else:
            raise CannotRunError(f"no ONNX node stands for {layer.name!r} here")

    def finish(self) -> bytes:
        from onnx import TensorProto

        def told(name: str, shape: tuple[int, ...]) -> object:
            return self._helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))

        self._node("Identity", [self._last], output="dst") if not self._nodes else self._rename()
        inputs = [told(key, self._arrays[key].shape) for key in running(self._plan)]
        outputs = [told("dst", self._plan.output.shape)]
        graph = self._helper.make_graph(self._nodes, "plan", inputs, outputs, self._stored)
        model = self._helper.make_model(graph, opset_imports=[self._helper.make_opsetid("", OPSET)])
        model.ir_version = 10
        return bytes(model.SerializeToString())

    def _rename(self) -> None:
        self._nodes[-1].output[0] = "dst"  # type: ignore[attr-defined]

    def _node(self, kind: str, inputs: list[str], *, output: str = "", **attributes: object) -> None:
        self._last = output or f"t{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(kind, inputs, [self._last], **attributes))

    def _store(self, name: str, array: Array) -> str:
        self._stored.append(self._numpy.from_array(np.ascontiguousarray(array, np.float32), name))
        return name

    def _convolution(self, layer: Layer) -> None:
        op, shape = convolution_of(layer)
        self._node(
            "Conv",
            [self._last, *(self._store(key, self._arrays[key]) for key in layer.keys.values())],
            kernel_shape=list(shape.kernel),
            strides=list(shape.stride),
            dilations=list(shape.dilation),
            pads=[low for low, _ in shape.padding] + [high for _, high in shape.padding],
            group=op.groups,
        )

    def _product(self, layer: Layer) -> None:
        """Gemm of a matrix, else MatMul; with a weight for each image, its rows are one axis."""
        op, src, dst = layer.step.op, layer.step.src, layer.step.dst
        assert isinstance(op, Product)  # by its name
        weight, bias = layer.keys["weight"], layer.keys.get("bias")
        if src.rank == 2 and not op.batched:
            stored = [self._store(key, self._arrays[key]) for key in layer.keys.values()]
            self._node("Gemm", [self._last, *stored], transB=int(op.transposed))
            return
        matrix = self._arrays[weight]
        columns = matrix.swapaxes(-2, -1) if op.transposed else matrix
        is_folded = op.batched and src.rank != 3
        if is_folded:
            self._reshape(f"{weight}_src", (src.batch, prod(src.spatial), src.channels))
        self._node("MatMul", [self._last, self._store(weight, columns)])
        if is_folded:
            self._reshape(f"{weight}_dst", dst.shape)
        if bias is not None:
            self._channels("Add", layer, "bias")

    def _reshape(self, name: str, shape: tuple[int, ...]) -> None:
        self._stored.append(self._numpy.from_array(np.array(shape, np.int64), name))
        self._node("Reshape", [self._last, name])

    def _channels(self, kind: str, layer: Layer, name: str) -> None:
        key = layer.keys[name]
        dst = layer.step.dst
        spread = self._arrays[key].reshape(aligned((dst.channels,), (dst.channel_axis,), dst.rank))
        self._node(kind, [self._last, self._store(key, spread)])

    def _add(self, layer: Layer) -> None:
        if any(value != 1 for value in layer.parameters.values()):
            raise CannotRunError("the ONNX model has no node for add with factors")
        (key,) = layer.keys.values()
        self._node("Add", [self._last, key])

    def _batch_norm(self, layer: Layer) -> None:
        if "variance" not in layer.keys:
            raise CannotRunError("ONNX's BatchNormalization takes the variance, not its inverse")
        ordered = [layer.keys[name] for name in ("scale", "shift", "mean", "variance")]
        if any(self._arrays[key].ndim != 1 for key in ordered):
            raise CannotRunError("ONNX's BatchNormalization has statistics per channel only")
        stored = [self._store(key, self._arrays[key]) for key in ordered]
        self._node("BatchNormalization", [self._last, *stored], epsilon=layer.parameters["epsilon"])

    def _gelu(self, layer: Layer) -> None:
        self._node("Gelu", [self._last], approximate=layer.attributes["approximate"])

    def _silu(self, _: Layer) -> None:
        before = self._last
        self._node("Sigmoid", [before])
        self._node("Mul", [before, self._last])

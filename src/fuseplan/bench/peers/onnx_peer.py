"""onnxruntime, which reads an ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from fuseplan.bench.peers.peer import Array, Arrays, Peer, Prepared, only_in
from fuseplan.language.declarations import aligned
from fuseplan.measure.clock import rotating
from fuseplan.measure.layers import CannotRunError, Layer, convolution_of, is_usual, layers, running
from fuseplan.op import Op
from fuseplan.ops import UNARY
from fuseplan.ops.activation import ACTIVATIONS, Gelu
from fuseplan.ops.conv import ConvTranspose
from fuseplan.ops.matmul import Product
from fuseplan.ops.parts import Rotary
from fuseplan.plans.plan import FusionPlan

OPSET = 20  # optimizers know the nodes of an old one best
NEWER = {"RMSNormalization": 23, "RotaryEmbedding": 23}

# Activations, by their names in ONNX; and those whose number is the attribute `alpha` there.
NODES = {kind.name: kind.onnx for kind in ACTIVATIONS if kind.onnx}
TAKING_ALPHA = ("leaky_relu", "elu")


def onnx_model(plan: FusionPlan, arrays: Arrays, layers: Sequence[Layer]) -> tuple[bytes, list[str]]:
    """The model's bytes and its inputs in order; what does not come anew with every call is stored in it.

    Raises:
        CannotRunError: an operator has no node here.
    """
    writer = Writer(plan, arrays)
    for layer in layers:
        writer.add(layer)
    return writer.finish(), running(plan)


class Writer:
    """Writes a plan's operators as nodes; `_last` is the tensor written last."""

    def __init__(self, plan: FusionPlan, arrays: Arrays) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self._plan, self._arrays = plan, arrays
        self._nodes: list[Any] = []
        self._stored: list[object] = []
        self._last, self._opset = "src", OPSET
        self._made: dict[str, str] = {}  # the plan's results, and values that are read again, by key
        self._special: Mapping[str, Callable[[Layer], None]] = {
            "bias": lambda layer: self._channels("Add", layer, "bias"),
            "scale": lambda layer: self._channels("Mul", layer, "scale"),
            "add": self._add,
            "batch_norm": self._batch_norm,
            "matmul": self._product,
            "linear": self._product,
            **dict.fromkeys(
                ("mul", "maximum", "minimum"), lambda layer: self._joined(str(layer.step.op.onnx), layer)
            ),
            "save": lambda layer: self._made.update({layer.attributes["key"]: self._last}),
            "layer_norm": self._row_norm,
            "rms_norm": self._row_norm,
            "softmax": self._softmax,
            "log_softmax": self._softmax,
            "cross_entropy": self._cross_entropy,
            "glu": self._glu,
            "rotary": self._rotary,
            **{each.name: self._unary for each in UNARY},
        }

    def add(self, layer: Layer) -> None:
        """Adds an operator's nodes; a CannotRunError where it has none."""
        if layer.name.startswith("conv"):
            self._convolution(layer)
        elif layer.name in self._special:
            self._special[layer.name](layer)
        else:
            self._activation(layer.step.op)

    def finish(self) -> bytes:
        """The model's bytes."""

        def told(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> object:
            kind = self._helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            return self._helper.make_tensor_value_info(name, kind, list(shape))

        self._name_outputs({"dst": self._last, **self._made})
        inputs = [told(key, self._arrays[key].shape, self._arrays[key].dtype) for key in running(self._plan)]
        outputs = [
            told("dst", self._plan.output.shape),
            *(told(each.key, each.shape) for each in self._plan.results),
        ]
        graph = self._helper.make_graph(self._nodes, "plan", inputs, outputs, self._stored)
        model = self._helper.make_model(graph, opset_imports=[self._helper.make_opsetid("", self._opset)])
        model.ir_version = 10
        return bytes(model.SerializeToString())

    def _name_outputs(self, wanted: Mapping[str, str]) -> None:
        """Gives the tensors that are outputs the plan's names; a copy where a tensor is two, or an input."""
        renamed: dict[str, str] = {}
        made = {name for node in self._nodes for name in node.output}
        for key, name in wanted.items():
            if name in made and name not in renamed:
                renamed[name] = key
            else:
                self._node("Identity", [name], output=key)
        for node in self._nodes:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]

    def _node(self, kind: str, inputs: list[str], *, output: str = "", **attributes: object) -> str:
        self._last = output or f"t{len(self._nodes)}"
        self._opset = max(self._opset, NEWER.get(kind, OPSET))
        self._nodes.append(self._helper.make_node(kind, inputs, [self._last], **attributes))
        return self._last

    def _store(self, name: str, array: Array) -> str:
        self._stored.append(self._numpy.from_array(np.ascontiguousarray(array, np.float32), name))
        return name

    def _convolution(self, layer: Layer) -> None:
        op: Any = layer.step.op
        more: dict[str, Any] = {}
        if isinstance(op, ConvTranspose):
            shape, more = op.window(layer.step.src), {"output_padding": list(op.per_axis(op.output_padding))}
        else:
            op, shape = convolution_of(layer)
        self._node(
            str(op.onnx),
            [self._last, *(self._store(key, self._arrays[key]) for key in layer.keys.values())],
            kernel_shape=list(shape.kernel),
            strides=list(shape.stride),
            dilations=list(shape.dilation),
            pads=[low for low, _ in shape.padding] + [high for _, high in shape.padding],
            group=op.groups,
            **more,
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
        self._node("Reshape", [self._last, self._numbers(name, shape)])

    def _numbers(self, name: str, numbers: Sequence[int]) -> str:
        self._stored.append(self._numpy.from_array(np.array(numbers, np.int64), name))
        return name

    def _channels(self, kind: str, layer: Layer, name: str) -> None:
        key = layer.keys[name]
        dst = layer.step.dst
        spread = self._arrays[key].reshape(aligned((dst.channels,), (dst.channel_axis,), dst.rank))
        self._node(kind, [self._last, self._store(key, spread)])

    def _add(self, layer: Layer) -> None:
        if any(value != 1 for value in layer.parameters.values()):
            raise CannotRunError("the ONNX model has no node for add with factors")
        self._joined("Add", layer)

    def _joined(self, kind: str, layer: Layer) -> None:
        (key,) = layer.keys.values()
        self._node(kind, [self._last, self._made.get(key, key)])

    def _row_norm(self, layer: Layer) -> None:
        count = 2 - (layer.name == "rms_norm")
        numbers = [self._arrays[key] for key in layer.keys.values()] or [np.ones(layer.step.src.channels)]
        stored = [self._store(f"{self._last}_{place}", each) for place, each in enumerate(numbers[:count])]
        kind, epsilon = str(layer.step.op.onnx), layer.parameters["epsilon"]
        self._node(kind, [self._last, *stored], axis=-1, epsilon=epsilon)

    def _softmax(self, layer: Layer) -> None:
        op: Any = layer.step.op
        axes = op.over(layer.step.src)
        if len(axes) > 1:
            raise CannotRunError(f"ONNX's {op.onnx} is over one axis")
        self._node(str(op.onnx), [self._last], axis=axes[0])

    def _unary(self, layer: Layer) -> None:
        """The axis is an input, other fields are attributes."""
        op: Any = layer.step.op
        axis = self._numbers(f"{self._last}_axis", [op.axis_of(layer.step.src)])
        others: dict[str, Any] = {
            name: int(value) for name, value in layer.attributes.items() if name != "axis"
        }
        self._node(str(op.onnx), [self._last, axis], **others)

    def _cross_entropy(self, layer: Layer) -> None:
        """The logarithm of the sum is the loss and the target's logit: the node gives the loss alone."""
        if not is_usual(layer.step.op) or layer.step.src.rank != 2:
            raise CannotRunError("cross_entropy is measured in ONNX on rows, without options")
        logits, target, (lse,) = self._last, layer.keys["target"], layer.step.results
        loss = self._node("SoftmaxCrossEntropyLoss", [logits, target], reduction="none")
        axis = self._numbers("class_axis", [1])
        places = self._node("Unsqueeze", [target, axis])
        picked = self._node("GatherElements", [logits, places], axis=1)
        self._made[lse.key] = self._node("Add", [loss, self._node("Squeeze", [picked, axis])])
        self._last = loss

    def _glu(self, layer: Layer) -> None:
        op: Any = layer.step.op
        if op.interleaved:
            raise CannotRunError("the ONNX model has no node for pairs of neighbours")
        parts = [f"{self._last}_{part}" for part in range(2)]
        axis = op.split(layer.step.src).axis
        self._nodes.append(self._helper.make_node("Split", [self._last], parts, axis=axis, num_outputs=2))
        self._last, value = op.parted(parts)
        self._activation(op.activation)
        self._node("Mul", [self._last, value])

    def _rotary(self, layer: Layer) -> None:
        op, src = layer.step.op, layer.step.src
        assert isinstance(op, Rotary)  # by its name
        if src.names.find("s") != 2 or src.rank != 4 or op.whole:
            raise CannotRunError("ONNX's RotaryEmbedding is measured in the order bhsd, each angle once")
        stored = []
        for name, key in layer.keys.items():
            angles = self._arrays[key] * (-1 if op.inverse and name == "sin" else 1)
            stored.append(self._store(key, np.broadcast_to(angles, (src.batch, *angles.shape[-2:]))))
        dims = op.dimensions(src)
        self._node(
            "RotaryEmbedding",
            [self._last, *stored],
            interleaved=int(op.interleaved),
            rotary_embedding_dim=dims,
        )

    def _batch_norm(self, layer: Layer) -> None:
        if "variance" not in layer.keys:
            raise CannotRunError("ONNX's BatchNormalization takes the variance, not its inverse")
        ordered = [layer.keys[name] for name in ("scale", "shift", "mean", "variance")]
        if any(self._arrays[key].ndim != 1 for key in ordered):
            raise CannotRunError("ONNX's BatchNormalization has statistics per channel only")
        stored = [self._store(key, self._arrays[key]) for key in ordered]
        self._node("BatchNormalization", [self._last, *stored], epsilon=layer.parameters["epsilon"])

    def _activation(self, op: Op) -> None:
        before = self._last
        if isinstance(op, Gelu):
            self._node("Gelu", [before], approximate=op.approximate)
        elif op.name == "silu":
            self._node("Mul", [before, self._node("Sigmoid", [before])])
        elif op.name in TAKING_ALPHA or (op.name in NODES and is_usual(op)):
            numbers = [each.value for each in op.parameters()] if op.name in TAKING_ALPHA else []
            attributes: dict[str, Any] = dict(zip(("alpha",), numbers, strict=False))
            self._node(NODES[op.name], [before], **attributes)
        else:
            raise CannotRunError(f"no ONNX node stands for {op.name!r} here")


class OnnxRuntime(Peer):
    """onnxruntime with all graph optimizations, its inputs and output bound to buffers allocated before."""

    name = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def __init__(self, threads: int) -> None:
        import onnx  # noqa: F401 (a missing package is told here)
        import onnxruntime

        self._runtime = onnxruntime
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = threads
        self._options.inter_op_num_threads = 1
        self._options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        self._options.log_severity_level = 3

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Opens a session, and binds each copy's tensors once."""
        only_in(("f32",), plan, self.name)
        model, inputs = self._model(plan, copies[0])
        session = self._runtime.InferenceSession(model, self._options, providers=["CPUExecutionProvider"])
        bindings, made = [], {"dst": plan.output.shape} | {each.key: each.shape for each in plan.results}
        for arrays in copies:
            binding = session.io_binding()
            for key in inputs:
                value = self._runtime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(arrays[key]))
                binding.bind_ortvalue_input(key, value)
            outputs = []
            for key, shape in made.items():
                outputs.append(self._runtime.OrtValue.ortvalue_from_shape_and_type(list(shape), np.float32))
                binding.bind_ortvalue_output(key, outputs[-1])
            bindings.append((binding, outputs))

        def run(binding: Any) -> object:
            return session.run_with_iobinding(binding)

        def result() -> Array | tuple[Array, ...]:
            run(bindings[0][0])
            arrays = tuple(np.array(each.numpy()) for each in bindings[0][1])
            return arrays if plan.results else arrays[0]

        calls = [lambda binding=binding: run(binding) for binding, _ in bindings]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

    def _model(self, plan: FusionPlan, arrays: Arrays) -> tuple[bytes, list[str]]:
        """The model's bytes, and its inputs in order."""
        return onnx_model(plan, arrays, layers(plan))

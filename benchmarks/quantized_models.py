"""Quantized models on this CPU: fuseplan beside ONNX Runtime, and both with the model in f32.

    fuseplan bench quantized_models --threads 1,2

ONNX Runtime's own tool quantizes them, as its users do: scales and zero points of values from one random
input, weights of i8 with a scale for each channel. `dynamic` takes scales from the values of a run.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fuseplan.onnx
from benchmarks.models import PROTOCOL, cpu_seconds, onnxruntime, sum_of_plans
from benchmarks.networks import NETWORKS, Network
from fuseplan.measure.clock import HostClock

TOKENS, WIDTH, HEADS, LAYERS = 128, 768, 12, 4
IMAGE = (1, 3, 224, 224)
# Of the norm of the results, beside the same model in f32 with its roundings. A number that lies between two
# integers becomes either, and the layers behind it follow.
TOLERANCE = 0.1


class _Encoder:
    """BERT-base's layers, as a model that is being written."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._stored: list[Any] = []
        self._rng = np.random.default_rng(0)

    def add(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node's result."""
        name = f"{kind.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def keep(self, array: Any) -> str:
        """A constant."""
        self._stored.append(numpy_helper.from_array(np.asarray(array), f"c{len(self._stored)}"))
        return str(self._stored[-1].name)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """A product with a bias behind it."""
        weight = self._rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        made = self.add("MatMul", x, self.keep(weight.astype(np.float32)))
        return self.add("Add", made, self.keep((self._rng.standard_normal(outputs) / 9).astype(np.float32)))

    def norm(self, x: str, y: str) -> str:
        """A residual and a layer norm."""
        ends = (self.keep(np.full(WIDTH, value, np.float32)) for value in (1, 0))
        return self.add("LayerNormalization", self.add("Add", x, y), *ends, axis=-1)

    def heads(self, x: str, order: tuple[int, ...]) -> str:
        """The heads of a projection, in an order of axes."""
        shape = self.keep(np.array([1, TOKENS, HEADS, WIDTH // HEADS]))
        return self.add("Transpose", self.add("Reshape", self.linear(x, WIDTH, WIDTH), shape), perm=order)

    def layer(self, x: str) -> str:
        """Attention and the layers behind it."""
        orders = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
        query, key, value = (self.heads(x, order) for order in orders)
        scores = self.add("Mul", self.add("MatMul", query, key), self.keep(np.float32(0.125)))
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), value)
        turned = self.add("Transpose", mixed, perm=orders[0])
        rows = self.add("Reshape", turned, self.keep(np.array([1, TOKENS, WIDTH])))
        inner = self.norm(self.linear(rows, WIDTH, WIDTH), x)
        wide = self.add("Gelu", self.linear(inner, WIDTH, 4 * WIDTH))
        return self.norm(self.linear(wide, 4 * WIDTH, WIDTH), inner)

    def finish(self, y: str) -> Any:
        """The model."""
        shape = [1, TOKENS, WIDTH]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", y)]
        graph = helper.make_graph(self._nodes, "encoder", ends[:1], ends[1:], self._stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def encoder() -> Any:
    """Four layers of BERT-base on 128 tokens."""
    made, x = _Encoder(), "x"
    for _ in range(LAYERS):
        x = made.layer(x)
    return made.finish(x)


MODELS: Mapping[str, tuple[Callable[[], Any], tuple[int, ...], tuple[str, ...]]] = {
    "resnet50": (lambda: NETWORKS["resnet50"](Network()), IMAGE, ("u8", "i8")),
    "mobilenet_v2": (lambda: NETWORKS["mobilenet_v2"](Network()), IMAGE, ("u8", "i8")),
    "bert_4x768": (encoder, (1, TOKENS, WIDTH), ("u8", "i8", "dynamic")),
}


def quantized(proto: Any, form: str, x: Any) -> Any:
    """A model with values of u8 or i8, or `dynamic`, by ONNX Runtime's tool."""
    from onnxruntime import quantization  # noqa: PLC0415 - a peer's package

    logging.getLogger().setLevel(logging.ERROR)  # it advises to prepare the model
    kinds = quantization.QuantType
    with tempfile.TemporaryDirectory(prefix="fuseplan-quantized-") as folder:
        place = Path(folder) / "model.onnx"
        if form == "dynamic":
            quantization.quantize_dynamic(proto, place, per_channel=True, weight_type=kinds.QInt8)
        else:
            of_values = kinds.QInt8 if form == "i8" else kinds.QUInt8
            quantization.quantize_static(
                proto, place, _given(x), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
                activation_type=of_values, weight_type=kinds.QInt8,
                extra_options={"ActivationSymmetric": form == "i8"},
            )  # fmt: skip
        return onnx.load(place)


def _given(x: Any) -> Any:
    """What the tool reads its inputs from."""
    from onnxruntime.quantization import CalibrationDataReader  # noqa: PLC0415

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._ahead: Iterator[dict[str, Any]] = iter([{"x": x}])

        def get_next(self) -> dict[str, Any] | None:
            return next(self._ahead, None)

    return Reader()


def names() -> list[str]:
    """The models with their forms: `resnet50 u8`."""
    return [f"{name} {form}" for name, (*_, forms) in MODELS.items() for form in forms]


def measured(name: str, threads: int) -> dict[str, Any]:
    """A model's row."""
    model, form = name.split()
    make, shape, _ = MODELS[model]
    wide, rng = make(), np.random.default_rng(1)
    proto = quantized(make(), form, rng.standard_normal(shape, np.float32))
    x = rng.standard_normal(shape, np.float32)
    ours, before = (fuseplan.onnx.load(each, threads=threads) for each in (proto, wide))
    calls: dict[str, Callable[[Any], Any]] = {
        "fuseplan": lambda x: ours.run(None, {"x": x})[0],
        "onnxruntime": onnxruntime(proto, threads),
        "fuseplan f32": lambda x: before.run(None, {"x": x})[0],
        "onnxruntime f32": onnxruntime(wide, threads),
    }
    want = rounded(proto, x)
    errors = {each: _distance(calls[each](x), want) for each in ("fuseplan", "onnxruntime")}
    assert errors["fuseplan"] <= TOLERANCE, errors
    timings = HostClock(PROTOCOL).interleave({each: partial(call, x) for each, call in calls.items()})
    return {
        "model": name,
        "threads": threads,
        "errors": errors | {"f32": _distance(calls["fuseplan f32"](x), want)},
        "seconds": {each: timing.median for each, timing in timings.items()},
        "least": {each: timing.minimum for each, timing in timings.items()},
        "cpu": {each: cpu_seconds(partial(call, x)) for each, call in calls.items()},
        "sum": sum_of_plans(ours.prepare().session.compiled),
    }


def rounded(proto: Any, x: Any) -> Any:
    """The model's result in f32 with its roundings: no sum of integers, which may saturate."""
    import onnxruntime as runtime  # noqa: PLC0415

    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def _distance(made: Any, want: Any) -> float:
    return float(np.linalg.norm(made - want) / np.linalg.norm(want))


def told(row: Mapping[str, Any]) -> str:
    """A row for people, in milliseconds."""
    times = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in row["least"].items())
    errors = ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
    return f"{row['model']} {row['threads']}t: {times}; plans {1e3 * row['sum']:.2f}; errors {errors}"

"""onnxruntime without fusing, and openvino: libraries that read an ONNX model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fuseplan.bench.peers.onnx_peer import OnnxRuntime, onnx_model
from fuseplan.bench.peers.peer import Array, Arrays, Peer, Prepared, aligned, only_in
from fuseplan.measure.clock import rotating
from fuseplan.measure.layers import layers, plain_layers
from fuseplan.plans.plan import FusionPlan


class UnfusedOnnxRuntime(OnnxRuntime):
    """onnxruntime without graph optimizations: every operator of the plan a node, the bias too."""

    name = "unfused:onnxruntime"

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL

    def _model(self, plan: FusionPlan, arrays: Arrays) -> tuple[bytes, list[str]]:
        return onnx_model(plan, arrays, plain_layers(plan))


class OpenVino(Peer):
    """openvino with the LATENCY hint, f32 arithmetic, and tensors set before."""

    name = "openvino"
    packages = ("openvino", "onnx")

    def __init__(self, threads: int) -> None:
        import onnx  # noqa: F401 (a missing package is told here)
        import openvino

        self._openvino = openvino
        self._core = openvino.Core()
        self._configuration = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,
        }

    def prepare(self, plan: FusionPlan, copies: Sequence[Arrays]) -> Prepared:
        """Compiles the model, and makes a request with its own tensors for each copy."""
        only_in(("f32",), plan, self.name)
        model, inputs = onnx_model(plan, copies[0], layers(plan))
        compiled = self._core.compile_model(self._core.read_model(model), "CPU", self._configuration)
        requests, kept = [], []
        shapes = [plan.output.shape, *(each.shape for each in plan.results)]
        for arrays in copies:
            request = compiled.create_infer_request()
            outputs = [aligned(np.zeros(shape, np.float32)) for shape in shapes]
            tensors = [self._openvino.Tensor(aligned(arrays[key]), shared_memory=True) for key in inputs]
            for position, tensor in enumerate(tensors):
                request.set_input_tensor(position, tensor)
            targets = [self._openvino.Tensor(each, shared_memory=True) for each in outputs]
            for position, target in enumerate(targets):
                request.set_output_tensor(position, target)
            requests.append(request)
            kept.append((tensors, targets, outputs))

        def result() -> Array | tuple[Array, ...]:
            requests[0].infer()
            arrays = tuple(np.array(each) for each in kept[0][2])
            return arrays if plan.results else arrays[0]

        calls = [request.infer for request in requests]
        return Prepared(rotating(calls) if len(calls) > 1 else calls[0], result)

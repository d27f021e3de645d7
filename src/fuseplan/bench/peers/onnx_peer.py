"""onnxruntime, which reads an ONNX model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fuseplan.bench.peers.onnx_model import onnx_model
from fuseplan.bench.peers.peer import Array, Arrays, Peer, Prepared, only_in
from fuseplan.measure.clock import rotating
from fuseplan.measure.layers import layers
from fuseplan.plans.plan import FusionPlan


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

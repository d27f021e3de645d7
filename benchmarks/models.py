"""Whole models on this CPU: fuseplan beside ONNX Runtime and, where it is installed, OpenVINO.

    fuseplan bench models --threads 1,2

Each model has random weights, and all libraries take turns. `sum` is the time of the model's plans, each
alone, added up: the rest of fuseplan's time is lost between plans. A row has medians and the least times,
and the CPU time of a call, since other programs may share the machine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fuseplan.onnx
from benchmarks.networks import NETWORKS, Network
from fuseplan.measure.clock import HostClock, Protocol
from fuseplan.measure.data import random_arrays

PROTOCOL = Protocol(rounds=9, block_seconds=0.1)
PLAN = Protocol(rounds=5, block_seconds=0.004)
CALLS = 40  # of a measurement of CPU time
TOLERANCE = 1e-4  # of the largest output: sums of thousands of f32 products, layer after layer


def onnxruntime(proto: Any, threads: int) -> Callable[[Any], Any]:
    """The model in ONNX Runtime."""
    import onnxruntime as runtime  # noqa: PLC0415 - each peer is optional

    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x})[0]


def openvino(proto: Any, threads: int) -> Callable[[Any], Any]:
    """The model in OpenVINO, for the least latency in f32."""
    import openvino as library  # noqa: PLC0415

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
    }
    core = library.Core()
    compiled = core.compile_model(core.read_model(proto.SerializeToString(), b""), "CPU", options)
    request = compiled.create_infer_request()
    return lambda x: request.infer({0: x})[0]


PEERS = {"onnxruntime": onnxruntime, "openvino": openvino}


def measured(name: str, threads: int) -> dict[str, Any]:
    """A model's row."""
    proto = NETWORKS[name](Network())
    x = np.random.default_rng(1).standard_normal((1, 3, 224, 224)).astype(np.float32)
    ours = fuseplan.onnx.load(proto, threads=threads)
    calls: dict[str, Callable[[Any], Any]] = {"fuseplan": lambda x: ours.run(None, {"x": x})[0]}
    for peer, make in PEERS.items():
        try:
            calls[peer] = make(proto, threads)
        except ImportError:
            continue
    outputs = {library: call(x) for library, call in calls.items()}
    want = outputs["onnxruntime"]
    errors = {
        library: float(np.abs(made - want).max() / np.abs(want).max()) for library, made in outputs.items()
    }
    assert max(errors.values()) <= TOLERANCE, errors
    timings = HostClock(PROTOCOL).interleave({each: partial(call, x) for each, call in calls.items()})
    session = ours.prepare().session
    kinds = Counter(type(step).__name__.lower() for step in session.placement.steps)
    return {
        "model": name,
        "threads": threads,
        "error": errors["fuseplan"],
        "seconds": {each: timing.median for each, timing in timings.items()},
        "least": {each: timing.minimum for each, timing in timings.items()},
        "cpu": {each: cpu_seconds(partial(call, x)) for each, call in calls.items()},
        "sum": sum_of_plans(session.compiled),
        "steps": dict(kinds),
    }


def cpu_seconds(call: Callable[[], Any]) -> float:
    """The least time that the process's threads take for a call, whatever else the machine does."""
    taken = []
    for _ in range(CALLS):
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return min(taken)


def sum_of_plans(compiled: list[Any]) -> float:
    """The least time of each plan alone, added up."""
    known: dict[int, float] = {}
    for each in compiled:
        if id(each) not in known:
            arrays = random_arrays(each.plan, 1)
            src = arrays.pop("src")
            call, dst = each.bind(**arrays), fuseplan.empty(each.plan.output)
            timing = HostClock(PLAN).interleave({"plan": partial(call, src, dst)})["plan"]
            known[id(each)] = timing.minimum
    return sum(known[id(each)] for each in compiled)


def told(row: dict[str, Any]) -> str:
    """A row for people, in milliseconds."""
    times = ", ".join(
        f"{name} {1e3 * row['seconds'][name]:.2f} ({1e3 * row['least'][name]:.2f})" for name in row["least"]
    )
    lost = row["cpu"]["fuseplan"] / row["threads"] / row["sum"]
    cpu = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in row["cpu"].items())
    steps = ", ".join(f"{count} {kind}" for kind, count in row["steps"].items())
    plans = f"sum {1e3 * row['sum']:.2f}, {lost:.2f} of it"
    return f"{row['model']} {row['threads']}t: {times}; CPU {cpu}; {plans}; {steps}"

"""The time of each operator of a model, as ONNX Runtime runs it with all of its fusions turned off."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from fuseplan.errors import BuildError, FuseplanError
from fuseplan.onnx.runtime import RUNTIME, session_of
from fuseplan.system import limits
from fuseplan.system.reading import bytes_of, json_of

RUNS = 9  # and one before them that is not counted
TIMED = "_kernel_time"  # behind the node's name in ONNX Runtime's file


def seconds_of(
    model: Any, protos: Mapping[str, Any], given: Mapping[str, Any], threads: int
) -> dict[str, float]:
    """The median time of each operator.

    Operators that ONNX Runtime writes in others, such as HardSwish, are run once more, alone.

    Raises:
        BuildError: ONNX Runtime is not installed, or does not run the model.
    """
    try:
        return _seconds(_named(model, protos), protos, given, threads)
    except FuseplanError:
        raise
    except Exception as error:  # ONNX Runtime raises errors of many kinds
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BuildError(f"onnxruntime does not run the model: {said}") from error


def _seconds(
    model: Any, protos: Mapping[str, Any], given: Mapping[str, Any], threads: int
) -> dict[str, float]:
    found = _profiled(model, given, threads)
    hidden = [node for node in model.graph.node if node.name in protos and node.name not in found]
    if hidden:
        held = _held(model, hidden, given, threads)
        for node in hidden:
            inputs = {name: held[name] for name in node.input if name}
            found[node.name] = sum(_profiled(_alone(model, node, inputs), inputs, threads).values())
    return {name: seconds for name, seconds in found.items() if name in protos}


def _named(model: Any, protos: Mapping[str, Any]) -> Any:
    """The model with a name of its own for each node."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    names = {node.output[0]: name for name, node in protos.items()}
    for node in made.graph.node:
        node.name = names[node.output[0]]
    return made


def _profiled(model: Any, given: Mapping[str, Any], threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        session = session_of(model, threads, profiled=str(Path(folder) / RUNTIME))
        for _ in range(1 + RUNS):
            session.run(None, dict(given))
        events = json_of(bytes_of(Path(session.end_profiling()), limits.PROFILE_BYTES))
    taken: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(TIMED):
            taken[event["name"].removesuffix(TIMED)].append(event["dur"] * 1e-6)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def _held(model: Any, nodes: list[Any], given: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """The values that nodes read."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    wanted = list(dict.fromkeys(name for node in nodes for name in node.input if name))
    known = {each.name for each in (*made.graph.output, *made.graph.input)}
    made.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in known)
    outputs = [name for name in wanted if name not in given]
    values = session_of(made, threads).run(outputs, dict(given)) if outputs else []  # none means all to it
    return {**given, **dict(zip(outputs, values, strict=True))}


def _alone(model: Any, node: Any, given: Mapping[str, Any]) -> Any:
    """A model of one node."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(each.dtype), each.shape)
        for name, each in given.items()
    ]
    results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "alone", inputs, results)
    return helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)

"""What runs ONNX's operators that no plan computes: ONNX Runtime, else ONNX's reference evaluator."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fuseplan.errors import BuildError
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node, told
from fuseplan.graph.op import Tensor
from fuseplan.graph.schedule import Unit
from fuseplan.graph.type import Type
from fuseplan.onnx.protos import proto_of_node, proto_of_type

Run = Callable[[Sequence[Any]], Sequence[Any]]
RUNTIME, REFERENCE = "onnxruntime", "onnx's reference evaluator"
# Dtypes that ONNX Runtime's arrays have in Python.
KNOWN = ("f64", "f32", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "str")


class Onnx:
    """Runs ONNX's operators; `fuseplan.graph.session.Library` tells the methods.

    Args:
        model: whose opsets and functions the operators have.
        threads: of ONNX Runtime.
    """

    def __init__(self, model: Any, threads: int) -> None:
        self._model, self._threads = model, threads
        self._by: dict[int, str] = {}

    def prepare(self, graph: Graph, unit: Unit) -> Run:
        """A function of the unit's `reads` that gives its `writes`.

        Raises:
            BuildError: neither takes the operators.
        """
        model, inputs = _model_of(self._model, graph, unit.nodes, unit.reads, unit.writes)
        places = [unit.reads.index(name) for name in inputs]
        problems = []
        for name, make in ((RUNTIME, self._runtime), (REFERENCE, self._reference)):
            try:
                run = make(graph, unit, model, inputs)
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
                continue
            self._by[id(unit.nodes[0])] = name
            return lambda values: run([values[place] for place in places])
        raise BuildError("\n  ".join([f"nothing runs {', '.join(map(told, unit.nodes[:3]))}", *problems]))

    def ran(self, unit: Unit) -> str:
        """The name of what runs the unit."""
        return self._by[id(unit.nodes[0])]

    def _runtime(self, graph: Graph, unit: Unit, model: Any, inputs: Sequence[str]) -> Run:
        if importlib.util.find_spec("onnxruntime") is None:
            raise BuildError("onnxruntime is not installed")
        import onnxruntime

        for name in (*inputs, *unit.writes):
            if graph.types[name].dtype not in KNOWN:
                raise BuildError(f"it has no arrays of {graph.types[name]}")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self._threads, 1
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        wanted = list(unit.writes)
        return lambda values: session.run(wanted, dict(zip(inputs, values, strict=True)))

    def _reference(self, graph: Graph, unit: Unit, model: Any, inputs: Sequence[str]) -> Run:
        evaluator = ReferenceEvaluator(model)
        wanted = list(unit.writes)

        def run(values: Sequence[Any]) -> Sequence[Any]:
            with np.errstate(all="ignore"):
                return [
                    _array(each) for each in evaluator.run(wanted, dict(zip(inputs, values, strict=True)))
                ]

        return run


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


def _model_of(
    model: Any, graph: Graph, nodes: Sequence[Node], reads: Sequence[str], writes: Sequence[str]
) -> tuple[Any, list[str]]:
    """A model of some nodes, and its inputs; constants are initializers."""
    inputs = [name for name in reads if name not in graph.constants]
    stored = [
        numpy_helper.from_array(graph.constants[name], name) for name in reads if name in graph.constants
    ]
    values = [_told(name, graph.types[name]) for name in inputs]
    results = [onnx.ValueInfoProto(name=name) for name in writes]
    made = helper.make_graph([proto_of_node(node) for node in nodes], "left", values, results, stored)
    opsets = list(model.opset_import)
    return helper.make_model(made, opset_imports=opsets, ir_version=model.ir_version), inputs


def _told(name: str, made: Type) -> Any:
    found = proto_of_type(made)
    return onnx.ValueInfoProto(name=name) if found is None else helper.make_value_info(name, found)


def reference(model: Any, node: Any, given: Mapping[str, Tensor]) -> list[Any] | None:
    """The results of a node on constants, by ONNX's reference evaluator; None where it does not know it."""
    values = [onnx.ValueInfoProto(name=name) for name in node.input if name]
    results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], "constant", values, results)
    whole = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    renamed = dict(zip((name for name in node.input if name), given.values(), strict=True))
    try:
        with np.errstate(all="ignore"):
            made = iter(ReferenceEvaluator(whole).run(None, renamed))
    except Exception:
        return None
    return [_array(next(made)) if name else None for name in node.output]

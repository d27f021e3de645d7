"""What runs ONNX's operators that no plan computes: ONNX Runtime, else ONNX's reference evaluator."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from fuseplan.errors import BuildError
from fuseplan.graph.graph import Graph
from fuseplan.graph.node import Node, told
from fuseplan.graph.op import Tensor
from fuseplan.graph.schedule import Unit, unit_of
from fuseplan.graph.type import FLOATS, WORDS, Type, types_of, word_of
from fuseplan.onnx.protos import proto_of_node, proto_of_type, read_inside

Run = Callable[[Sequence[Any]], Sequence[Any]]
RUNTIME, REFERENCE, PARTS = "onnxruntime", "onnx's reference evaluator", "both"
# Dtypes that ONNX Runtime's arrays have in Python.
KNOWN = ("f64", "f32", "f16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool", "str")
# Operators of which ONNX Runtime 1.32 computes another result than ONNX's own tests have, and when.
DIFFERENT: dict[str, Callable[[Any], bool]] = {
    "Attention": lambda node: len(node.output) > 3,
    "MaxUnpool": lambda node: len(node.input) > 2,
}
# Rewriting of ONNX Runtime 1.32 that changes results by steps of a quantization: it quantizes weights of
# f32, as folded ones are, and leaves out the first of two quantizations of a value. And what adds such
# pairs: it makes of i8 what is refused, and ends the process where inner graphs read a view of such a value.
SPREADS = "QDQPropagationTransformer"
LOSSY = ("WeightBiasQuantization", "DoubleQDQPairsRemover", SPREADS)
# And those of which ONNX's reference evaluator of onnx 1.23 does, by node and opset.
UNLIKE: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("GlobalMaxPool", "Hardmax", "LpNormalization", "LRN"), lambda node, opset: True),
    **dict.fromkeys(("LogSoftmax", "Softmax"), lambda node, opset: opset < 13),
    "BatchNormalization": lambda node, opset: opset < 14,
    "Loop": lambda node, opset: not [*node.input, ""][1],  # no condition is false to it
    # Of scales, the length that it takes for the result's has a fraction.
    "Resize": lambda node, opset: any(each.s == b"align_corners" for each in node.attribute),
    **dict.fromkeys(
        ("AveragePool", "ConvTranspose", "LpPool", "MaxPool"),
        lambda node, _: any(
            each.s.startswith(b"SAME") or each.name == "ceil_mode" or (each.name == "group" and each.i > 1)
            for each in node.attribute
        ),
    ),
}


class Onnx:
    """Runs ONNX's operators; `fuseplan.graph.session.Library` tells the methods.

    Args:
        model: whose opsets and functions the operators have.
        threads: of ONNX Runtime.
    """

    def __init__(self, model: Any, threads: int) -> None:
        self._model, self._threads = model, threads
        self._runs: list[_Runs] = []

    def prepare(self, graph: Graph, unit: Unit) -> Run:
        """A function of the unit's `reads` that gives its `writes`.

        Where ONNX Runtime does not take all operators of the unit, it runs the neighbours that it takes.

        Raises:
            BuildError: neither takes the operators.
        """
        model, inputs = _model_of(self._model, graph, unit.nodes, unit.reads, unit.writes)
        places = [unit.reads.index(name) for name in inputs]
        ways = [
            (RUNTIME, partial(self._runtime, graph, unit, model, inputs)),
            (PARTS, partial(self._parts, graph, unit, places)),
            (REFERENCE, partial(_reference, unit, model, inputs)),
        ]
        runs = _Runs(graph, unit, [way for way in ways if way[0] != PARTS or len(unit.nodes) > 1])
        self._runs.append(runs)
        return lambda values: runs([values[place] for place in places])

    @property
    def names(self) -> dict[int, str]:
        """What runs each operator, by the identity of its node; the reason where ONNX Runtime does not."""
        return {id(node): runs.told for runs in self._runs if runs.name != PARTS for node in runs.unit.nodes}

    def _parts(self, graph: Graph, unit: Unit, places: Sequence[int]) -> Run:
        """The neighbours that ONNX Runtime takes, and the others, in turns."""
        singles = [unit_of(graph, (node,)) for node in unit.nodes]
        found = [[*part] for _, part in groupby(singles, partial(self.takes, graph))]
        if len(found) == 1:
            raise BuildError("it takes all of the operators, or none")
        parts = []
        for each in found:
            part = unit_of(graph, tuple(single.nodes[0] for single in each))
            made = {name for node in part.nodes for name in node.outputs}
            part = replace(part, writes=tuple(sorted({*part.writes, *made.intersection(unit.writes)})))
            parts.append((part, self.prepare(graph, part)))

        def run(values: Sequence[Any]) -> Sequence[Any]:
            live = {unit.reads[place]: value for place, value in zip(places, values, strict=True)}
            for part, call in parts:
                made = call([live.get(name) for name in part.reads])
                live.update(zip(part.writes, made, strict=True))
            return [live[name] for name in unit.writes]

        return run

    def takes(self, graph: Graph, unit: Unit) -> bool:
        """Whether ONNX Runtime runs the operators."""
        model, inputs = _model_of(self._model, graph, unit.nodes, unit.reads, unit.writes)
        try:
            self._runtime(graph, unit, model, inputs)
        except Exception:  # ONNX Runtime has errors of its own
            return False
        return True

    def _runtime(self, graph: Graph, unit: Unit, model: Any, inputs: Sequence[str]) -> Run:
        for name in (*inputs, *unit.writes):
            if graph.types[name].dtype not in KNOWN:
                raise BuildError(f"{name} has a type that it does not take, or that nothing tells")
        _check(model, _differs)
        run = runtime_of(model, self._threads)
        return lambda values: run(unit.writes, dict(zip(inputs, values, strict=True)))


def _check(model: Any, is_different: Callable[[Any], bool]) -> None:
    """Refuses operators whose results are others than ONNX defines; a BuildError."""
    for node in _nodes(model.graph):
        if is_different(node):
            raise BuildError(f"its {node.op_type} gives another result than ONNX defines")


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph and of its inner graphs."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _differs(node: Any) -> bool:
    return node.op_type in DIFFERENT and DIFFERENT[node.op_type](node)


def _reference_of(model: Any) -> ReferenceEvaluator:
    """ONNX's reference evaluator of a model."""
    opset = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=1)
    _check(model, lambda node: node.op_type in UNLIKE and UNLIKE[node.op_type](node, opset))
    return ReferenceEvaluator(model)


def runtime_of(
    model: Any, threads: int, left_out: Sequence[str] = LOSSY
) -> Callable[[Sequence[str], Mapping[str, Any]], Sequence[Any]]:
    """ONNX Runtime's run of a model on the CPU: a function of the outputs' names and of the inputs.

    `left_out` are rewritings that it does not make. A BuildError where it is not installed.
    """
    session = session_of(model, threads, left_out=left_out)
    return lambda wanted, given: session.run(list(wanted), dict(given))


def session_of(model: Any, threads: int, *, profiled: str = "", left_out: Sequence[str] = LOSSY) -> Any:
    """ONNX Runtime's session of a model on the CPU.

    Args:
        threads: the most that run an operator.
        profiled: where to write the times of single operators, which then are those of the model, unfused.
        left_out: rewritings that it does not make.

    Raises:
        BuildError: it is not installed.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise BuildError("onnxruntime is not installed: `pip install onnxruntime`")
    import onnxruntime

    if any(each.op_type == "Split" and "" in each.output for each in _nodes(model.graph)):  # 1.32 crashes
        raise BuildError("it ends the process at a Split without all of its results")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Threads that spin after a run take the cores from our kernels: BERT-base took 680 ms on two, now 124.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    if profiled:
        options.enable_profiling, options.profile_file_prefix = True, profiled
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    has_inner = len([*_nodes(model.graph)]) > len(model.graph.node)
    left = {*left_out, SPREADS} if has_inner else {*left_out}
    how = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": left}
    return onnxruntime.InferenceSession(model.SerializeToString(), options, **how)


def evaluator(model: Any) -> Callable[[Node, Sequence[Any]], Sequence[Any]]:
    """What evaluates a node in float64: ONNX Runtime, else ONNX's reference evaluator, else in float32."""

    def run(node: Node, given: Sequence[Any]) -> Sequence[Any]:
        values = {name: value for name, value in zip(node.inputs, given, strict=True) if name}
        narrow = {name: _cast(value, ("f64",), np.float32) for name, value in values.items()}
        proto, problems = proto_of_node(node), list[str]()
        ways = (
            (RUNTIME, _by_runtime, values),
            (REFERENCE, _by_reference, values),
            (RUNTIME, _by_runtime, narrow),
        )
        for name, way, taken in ways:
            try:
                made = way(_single(model, proto, taken), taken)
                return [_cast(each, FLOATS, np.float64) for each in made]
            except Exception as error:
                problems.append(problem(name, error))
        raise BuildError("\n  ".join([f"nothing evaluates {told(node)}", *problems]))

    return run


def _cast(value: Any, given: Sequence[str], wanted: Any) -> Any:
    """An array, in another dtype where it has one that is given."""
    return value.astype(wanted) if isinstance(value, np.ndarray) and word_of(value.dtype) in given else value


class _Runs:
    """The first way to run a unit that takes it; where a run fails, the next one takes its place."""

    def __init__(self, graph: Graph, unit: Unit, ways: list[tuple[str, Callable[[], Run]]]) -> None:
        self._types, self.unit = graph.types, unit
        self._ways, self._problems = ways, list[str]()
        self.name, self._run = self._next()

    @property
    def told(self) -> str:
        """The name, with the problem of the first way where that does not run the unit."""
        return f"{self.name} ({self._problems[0]})" if self._problems else self.name

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        while True:
            try:
                return self._run(values)
            except Exception as error:
                self._failed(self.name, error)
            self.name, self._run = self._next()

    def _next(self) -> tuple[str, Run]:
        while self._ways:
            name, make = self._ways.pop(0)
            try:
                return name, make()
            except Exception as error:
                self._failed(name, error)
        nodes = ", ".join(f"{told(node)}{self._given(node)}" for node in self.unit.nodes[:3])
        raise BuildError("\n  ".join([f"nothing runs {nodes}: replace it in the model", *self._problems]))

    def _given(self, node: Node) -> str:
        types = ", ".join(str(self._types[name]) for name in node.inputs if name)
        return f" of {types}" if types else ""

    def _failed(self, name: str, error: Exception) -> None:
        self._problems.append(problem(name, error))


def problem(name: str, error: Exception) -> str:
    """What an error of another library says, in a line."""
    said = str(error).strip().splitlines() or [""]
    return f"{name}: {type(error).__name__}: {said[0]}"


def _reference(unit: Unit, model: Any, inputs: Sequence[str]) -> Run:
    evaluator = _reference_of(model)
    wanted = list(unit.writes)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        with np.errstate(all="ignore"):
            made = evaluator.run(wanted, dict(zip(inputs, values, strict=True)))
        return [_array(each) for each in made]

    return run


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


def _model_of(
    model: Any, graph: Graph, nodes: Sequence[Node], reads: Sequence[str], writes: Sequence[str]
) -> tuple[Any, list[str]]:
    """A model of some nodes, and its inputs; constants are initializers."""
    inputs = [name for name in reads if name not in graph.constants]
    constants = (name for name in reads if name in graph.constants)
    stored = [numpy_helper.from_array(graph.constants[name], name) for name in constants]
    types, protos = {name: graph.types[name] for name in inputs}, [*map(proto_of_node, nodes)]
    return _part(model, protos, types, writes, *stored), inputs


def _part(model: Any, nodes: list[Any], given: Mapping[str, Any], writes: Sequence[str], *stored: Any) -> Any:
    """A model of some nodes, on these values or values of these types."""
    types = {name: proto_of_type(made) for name, made in types_of(given).items()}
    values = [onnx.ValueInfoProto(name=name, type=made) for name, made in types.items()]
    results = [onnx.ValueInfoProto(name=name) for name in writes]
    made = helper.make_graph(nodes, "part", values, results, stored)
    return helper.make_model(made, opset_imports=list(model.opset_import), ir_version=model.ir_version)


def computed(model: Any, node: Any, given: Sequence[Tensor], is_view: bool) -> list[Any] | None:
    """The results of a node on constants, by what would run it; a view's in no memory of their own.

    None where nothing runs it.
    """
    read = dict.fromkeys((*filter(None, node.input), *read_inside(node.attribute)))
    values = dict(zip(read, given, strict=True))
    single = _single(model, node, values)
    for way in (_by_reference,) if is_view else (_by_runtime, _by_reference):
        with contextlib.suppress(Exception):
            return way(single, values)
    return None


def types_told(model: Any, node: Any, given: Mapping[str, Type]) -> tuple[Type, ...]:
    """The types of a node's results as ONNX Runtime tells them, of operators that ONNX does not define."""
    found: dict[str, Type] = {}
    with contextlib.suppress(Exception):  # it is not installed, or does not take the node
        for each in session_of(_single(model, node, given), 1).get_outputs():
            name = each.type.removeprefix("tensor(").removesuffix(")")
            dtype = WORDS.get({"float": "float32", "double": "float64"}.get(name, name), "?")
            is_known = each.shape and all(isinstance(extent, int) for extent in each.shape)
            found[each.name] = Type(tuple(each.shape) if is_known else None, dtype)
    return tuple(found.get(name, Type(None, "?")) for name in node.output)


def _single(model: Any, node: Any, values: Mapping[str, Any]) -> Any:
    return _part(model, [node], values, [*filter(None, node.output)])


def _by_reference(single: Any, values: Mapping[str, Any]) -> list[Any]:
    with np.errstate(all="ignore"):
        return _placed(single, [*map(_array, _reference_of(single).run(None, dict(values)))])


def _by_runtime(single: Any, values: Mapping[str, Any]) -> list[Any]:
    _check(single, _differs)
    session = session_of(single, 1)
    if any("float8" in each.type for each in session.get_outputs()):
        raise BuildError("its arrays of fp8 are bits")
    return _placed(single, session.run(None, dict(values)))


def _placed(single: Any, made: Sequence[Any]) -> list[Any]:
    """The results of a model's only node, with None for those that have no name."""
    found = iter(made)
    return [next(found) if name else None for name in single.graph.node[0].output]

"""A model of ONNX as a graph, for given types of its inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import checker, defs, helper, numpy_helper, shape_inference

from fuseplan.errors import PlanError
from fuseplan.graph.attended import heads_apart
from fuseplan.graph.flattened import with_axes
from fuseplan.graph.graph import Graph
from fuseplan.graph.integers import each_apart
from fuseplan.graph.node import Node, Origin, Parts, line_of
from fuseplan.graph.op import Tensor
from fuseplan.graph.opened import OpenKernels
from fuseplan.graph.type import Type, type_of
from fuseplan.graph.why import LeftError, Reason, Why
from fuseplan.onnx.given import NODE, Given
from fuseplan.onnx.protos import foreign, proto_of_type, read_inside, type_of_proto
from fuseplan.onnx.quantized import stored_of
from fuseplan.onnx.rows import rounded_up
from fuseplan.onnx.runtime import computed, types_told
from fuseplan.onnx.stored import array_of
from fuseplan.onnx.table import OLDER, TABLE
from fuseplan.system import limits

OPSETS = (13, 24)  # the versions of ONNX's own operators that the table is written for
RANDOM = (
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli",
)  # fmt: skip
OWN = ("", "ai.onnx")
TRACE = "pkg.torch.onnx.stack_trace"  # PyTorch's exporter keeps the lines of source here
SHAPES = ("Shape", "Size")
VIEWS = ("Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # of constants, these take no memory
NOT_INFERRED = (
    defs.SchemaError, shape_inference.InferenceError, checker.ValidationError,
    RuntimeError, ValueError, KeyError,
)  # fmt: skip
SUMS = ("MatMulInteger", "ConvInteger")
# Operators that ONNX Runtime joins with these sums, each with a value that it reads, and its result: with the
# operators apart, a dynamically quantized MLP took 10.1 ms, beside 8.8.
JOINED = {
    ("Cast", "sum"): "number",
    ("Mul", "number"): "product",
    ("Mul", "scale"): "factor",
    ("Add", "product"): "done",
}
_DONE = Reason(Why.CONSUMER)  # the row's operators are added


@dataclass(frozen=True)
class ReadModel:
    """A model read for given types of its inputs.

    Attributes:
        outputs: the value of each of the model's outputs, by the output's name.
        protos: ONNX's messages of the nodes, by the names of their origins.
    """

    graph: Graph
    outputs: Mapping[str, str]
    protos: Mapping[str, Any]


Leave = Callable[[Origin], Reason | None]


def read(model: Any, types: Mapping[str, Type], leave: Leave = lambda _: None) -> ReadModel:
    """The graph of a model.

    Args:
        model: ONNX's message, its functions inlined.
        types: of the model's inputs that are no initializers.
        leave: why an operator of the table is to be ONNX's; None where it is not.

    Raises:
        PlanError: the model is no graph: a name is not made before it is used, or made twice.
    """
    for each in model.graph.sparse_initializer:
        raise PlanError(f"{each.values.name} is a sparse initializer", want="a dense one")
    reader = _Reader(model, leave)
    reader.parts.inputs.update(types)
    reader.types.update(types)
    for tensor in model.graph.initializer:
        if tensor.name not in types:
            reader.keep(tensor.name, array_of(tensor))
    for node in sorted_nodes(model.graph):
        reader.take(node)
    return reader.finish([each.name for each in model.graph.output])


def input_types(model: Any, extent: int | None = None, *, stored: bool = False) -> dict[str, Type]:
    """The types of the inputs, with `extent` for open extents; with `stored`, of those with a tensor too."""
    known = {each.name for each in model.graph.initializer if not stored}
    given = (each for each in model.graph.input if each.name not in known)
    return {each.name: type_of_proto(each.type, extent) for each in given}


def sorted_nodes(graph: Any) -> list[Any]:
    """The nodes, each after the makers of its inputs: as they stand, if they stand so.

    Raises:
        PlanError: a node reads a value that nothing makes, or its own result.
    """
    made = {each.name for each in (*graph.input, *graph.initializer)} | {""}
    ahead, found = list(graph.node), list[Any]()
    while ahead:
        waiting = []
        for node in ahead:
            needed = {*node.input, *read_inside(node.attribute)}
            if needed <= made:
                found.append(node)
                made |= set(node.output)
            else:
                waiting.append(node)
        if len(waiting) == len(ahead):
            node = waiting[0]
            missing = sorted({*node.input, *read_inside(node.attribute)} - made)
            raise PlanError(
                f"{node.name or node.op_type}: nothing makes its input {missing[0]}",
                want="an input of the model, an initializer, or the result of another node",
            )
        ahead = waiting
    return found


@dataclass
class _Reader:
    model: Any
    leave: Leave
    parts: Parts = field(default_factory=Parts)
    types: dict[str, Type] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)  # results that are other values
    protos: dict[str, Any] = field(default_factory=dict)
    calls: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # nodes by what they compute
    joined: dict[str, str] = field(default_factory=dict)  # values around sums: see `JOINED`
    opsets: dict[str, int] = field(init=False)
    taken: set[str] = field(init=False)  # the names of the model's values
    inside: set[str] = field(init=False)  # values that inner graphs read, by their names in the model

    def __post_init__(self) -> None:
        self.inside = {name for node in self.model.graph.node for name in read_inside(node.attribute)}
        graph = self.model.graph
        self.taken = {each.name for each in (*graph.input, *graph.initializer)}
        self.taken.update(*(node.output for node in graph.node))
        self.opsets = {each.domain: each.version for each in self.model.opset_import}
        self.opsets.setdefault("", self.opsets.get("ai.onnx", 1))

    def keep(self, name: str, array: Tensor) -> None:
        """Adds a constant."""
        self.parts.constants[name] = array
        self.types[name] = type_of(array)

    def finish(self, outputs: list[str]) -> ReadModel:
        """The graph, without operators and constants that nothing reads: ONNX Runtime runs none of them."""
        found = {name: self.same.get(name, name) for name in outputs}
        self.parts.outputs = list(dict.fromkeys(found.values()))
        needed, kept = {*self.parts.outputs}, list[Node]()
        for node in reversed(self.parts.nodes):
            if not needed.isdisjoint(filter(None, node.outputs)):
                kept.append(node)
                needed.update(node.inputs)
        for name in self.parts.constants.keys() - needed:
            del self.parts.constants[name]
        self.parts.nodes = [*each_apart([*heads_apart(kept[::-1])], self.parts.outputs)]
        self.parts.stored = {name: each for name, each in self.parts.stored.items() if name in needed}
        return ReadModel(with_axes(Graph(**vars(self.parts))), found, self.protos)

    def take(self, node: Any) -> None:
        """Adds a node: what the table says, a constant, or the node as ONNX's."""
        traced = [each.value for each in node.metadata_props if each.key == TRACE]
        name, *others = filter(None, (node.name, *node.output, "?"))
        if name in self.protos:
            name = f"{name}:{others[0]}"  # a model may repeat names of nodes; values have one maker
        origin = Origin(name, node.op_type, line_of("".join(traced)))
        self.protos[name] = node
        repeated = [name for name in node.output if name in self.types or name in self.same]
        if repeated:
            raise PlanError(f"{origin.name} ({origin.kind}): there is a value {repeated[0]} already")
        inside = dict.fromkeys(read_inside(node.attribute))
        inputs = [*(self.same.get(name, name) for name in node.input), *inside]
        if self._folded(node, origin, inputs) or self._is_repeated(node, origin, inputs):
            return
        reason = self.leave(origin) or self._joined(node, inputs)
        if reason is None and self._is_in_table(node):
            reason = self._by_table(node, origin, inputs)
        if reason is not _DONE:
            self._left(node, origin, [*inputs[: len(node.input)], *inside], reason)

    def _joined(self, node: Any, inputs: list[str]) -> Reason | None:
        """Why ONNX Runtime computes a node with a sum of integers that it makes a number of; else None."""
        read = [self.joined.get(name) for name in inputs]
        made = next(
            (end for (kind, each), end in JOINED.items() if kind == node.op_type and each in read), ""
        )
        if node.op_type in SUMS:
            self.joined[node.output[0]] = "sum"
        if node.op_type == "DynamicQuantizeLinear":
            self.joined[node.output[1]] = "scale"
        if not made:
            return None
        self.joined[node.output[0]] = made
        return Reason(Why.JOINED)

    def _is_repeated(self, node: Any, origin: Origin, inputs: list[str]) -> bool:
        """Takes the results of an earlier node for those of one that computes the same, without chance."""
        is_named = not self.inside.isdisjoint(node.output)
        has_graphs = any(each.HasField("g") or each.graphs for each in node.attribute)
        if is_named or has_graphs or node.domain not in OWN or node.op_type in (*RANDOM, "Dropout"):
            return False
        told = sorted(each.SerializeToString() for each in node.attribute)
        same = self.calls.setdefault((node.op_type, *inputs, *told, *map(bool, node.output)), node)
        if same is node:
            return False
        made = (self.same.get(each, each) for each in same.output)
        self.same.update(zip(node.output, made, strict=True))
        self.parts.folded.append(origin)
        return True

    def _is_in_table(self, node: Any) -> bool:
        """Whether the table has a row for this version of the operator."""
        if node.domain not in OWN or node.op_type not in TABLE:
            return False
        opset = self.opsets[""]
        versions = [
            defs.get_schema(node.op_type, version, "").since_version
            for version in (opset, min(max(opset, OPSETS[0]), OPSETS[1]))
            if defs.has(node.op_type, version, "")
        ]
        return len(versions) == 2 and OLDER.get(node.op_type, versions[1]) <= versions[0] <= OPSETS[1]

    def _by_table(self, node: Any, origin: Origin, inputs: list[str]) -> Reason | None:
        """Adds the operators of the table's row, or says why the row does not hold."""
        given = Given(node, self.parts, self.types, inputs, self.taken)
        try:
            result = TABLE[node.op_type](given)
        except (LeftError, PlanError) as error:
            return error.reason if isinstance(error, LeftError) else Reason(Why.REFUSED, error.what)
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # of numbers that make no sense
            return Reason(Why.UNREADABLE, f"{node.op_type}: {error}")
        results = (result,) if isinstance(result, str) else result
        if not given.added and node.output[0] in self.inside:
            return Reason(Why.NOT_IN_TABLE, f"{node.op_type}, whose result an inner graph reads by its name")
        if not given.added:
            self.same[node.output[0]] = results[0]
            self.parts.folded.append(origin)
            return _DONE
        for name, array in given.constants.items():
            self.keep(name, array)
        names = dict(zip(results, node.output, strict=False))
        for each in given.added:
            name = names.get(each.outputs[0], each.outputs[0])
            if name:  # a result that nobody wants has none
                own = origin if each.origin == NODE else each.origin
                self.parts.nodes.append(Node(each.op, each.inputs, (name,), own))
        self.types |= {names.get(name, name): made for name, made in given.made.items()}
        return _DONE

    def _folded(self, node: Any, origin: Origin, inputs: list[str]) -> bool:
        """Computes a node that depends on constants alone, or on a shape."""
        made = self._shape(node, inputs) if node.op_type in SHAPES else self._computed(node, inputs)
        if made is None or not all(each is None or isinstance(each, np.ndarray) for each in made):
            return False
        for name, array in zip(node.output, made, strict=False):
            if name:
                self.keep(name, array)
        stored = stored_of(node, [self.parts.constants.get(name) for name in inputs])
        self.parts.stored = {**self.parts.stored, **({node.output[0]: stored} if stored else {})}
        self.parts.folded.append(origin)
        return True

    def _shape(self, node: Any, inputs: list[str]) -> list[Any] | None:
        """The shape of a value, or its size; None where it is not known."""
        shape = self.types[inputs[0]].shape
        if shape is None or node.domain not in OWN:
            return None
        ends = {each.name: each.i for each in node.attribute}
        if node.op_type == "Size":
            return [np.array(math.prod(shape), np.int64)]
        return [np.array(shape[slice(ends.get("start"), ends.get("end"))], np.int64)]

    def _computed(self, node: Any, inputs: list[str]) -> list[Any] | None:
        """The results of a node on constants; None where it has other inputs, or makes too much."""
        constants = self.parts.constants
        distinct = dict(zip((*node.input, *inputs[len(node.input) :]), inputs, strict=True))
        if node.op_type in RANDOM or any(name and name not in constants for name in inputs):
            return None
        is_view = node.domain in OWN and node.op_type in VIEWS
        if not is_view and any(made.nbytes > limits.FOLDED_BYTES for made in self._inferred(node, inputs)):
            return None
        values = [constants[name] for name in distinct.values() if name]
        return computed(self.model, node, values, is_view)

    def _left(self, node: Any, origin: Origin, inputs: list[str], reason: Reason | None) -> None:
        """Adds a node as ONNX's."""
        results = self._inferred(node, inputs)
        is_readable = reason is None or reason.why is not Why.UNREADABLE
        if is_readable and any(each.name == "ceil_mode" and each.i for each in node.attribute):
            results = rounded_up(Given(node, self.parts, self.types, inputs), results)
        op = foreign(node, results)
        self.parts.nodes.append(Node(op, tuple(inputs), tuple(node.output), origin, reason))
        self.types |= {name: made for name, made in zip(node.output, results, strict=True) if name}

    def _inferred(self, node: Any, inputs: list[str]) -> tuple[Type, ...]:
        """The types of a node's results; of unknown shape, or no type, where ONNX does not tell."""
        unknown = tuple(Type(None, "?") for _ in node.output)
        domain = "" if node.domain in OWN else node.domain
        inside = inputs[len(node.input) :]  # inner graphs have no other names for them
        renamed = {name: each for name, each in zip((*node.input, *inside), inputs, strict=True) if name}
        given = {name: self.types[each] for name, each in renamed.items()}
        types, data = {name: proto_of_type(made) for name, made in given.items()}, {}
        if None in types.values():
            return unknown
        for name, each in renamed.items():
            array = self.parts.constants.get(each)
            if array is not None and array.size <= limits.SHAPE_ELEMENTS:
                data[name] = numpy_helper.from_array(array)
        opsets = [helper.make_opsetid(*each) for each in self.opsets.items()]
        found = {}
        with contextlib.suppress(*NOT_INFERRED):
            schema = defs.get_schema(node.op_type, self.opsets.get(domain, 1), domain)
            found = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=opsets, ir_version=self.model.ir_version or 8
            )
        if not found:  # ONNX does not define it, or calls it deprecated: GroupNormalization before opset 21
            return types_told(self.model, node, given)
        return tuple(
            type_of_proto(found[name]) if name in found else each
            for name, each in zip(node.output, unknown, strict=True)
        )


def open_kernels(model: Any, types: Mapping[str, Type]) -> OpenKernels:
    """The kernels for all batches of a model; none where it leaves no outermost extent of an input open."""
    other = {name: made for name, made in types.items() if made.shape is not None}
    for each in model.graph.input:
        extents = each.type.tensor_type.shape.dim
        if each.name in other and extents and not extents[0].HasField("dim_value"):
            shape = other[each.name].shape or ()
            other[each.name] = replace(types[each.name], shape=(shape[0] + 1, *shape[1:]))
    if all(types[name] == made for name, made in other.items()):
        return OpenKernels((), ())
    try:
        first, second = (read(model, each).graph.types for each in (types, {**types, **other}))
    except PlanError:  # the model does not take the other batch
        return OpenKernels((), ())
    varying = {name for name in first.keys() & second.keys() if first[name] != second[name]}
    return OpenKernels(varying, {name for name in varying if _is_outermost(first[name], second[name])})


def _is_outermost(one: Type, other: Type) -> bool:
    """Whether two types differ in their outermost extents alone."""
    return one.shape is not None and other.shape is not None and one.shape[1:] == other.shape[1:]

"""The text of a graph has a line a value.

    input x: f32[1x64x56x56]
    constant weight: f32[64x64x3x3]
    constant two: f32[] = 2.0
    y: f32[1x64x56x56, nchw] = conv2d(64, kernel=3, padding=1)(x, weight)  # Conv layer1/conv1
    z: f32[1x64x56x56, nchw] = map("a * b")(y, two)
    output z

A node is its operator's text, then its inputs in parentheses. Names stand bare or, where they hold other
characters than letters, digits and _ . /, quoted. The type of a result may be left out where the operator
tells it. Constants of up to four elements have them in the text; the others are given beside it. Behind #
stands the framework's operator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import numpy as np

from fuseplan.errors import PlanError, did_you_mean
from fuseplan.graph.layer import Layer, Planned
from fuseplan.graph.node import Node, Origin, Parts
from fuseplan.graph.op import GraphOp, Tensor, call_of
from fuseplan.graph.ops import BY_WORD, Foreign
from fuseplan.graph.type import Type, numpy_dtype, type_of
from fuseplan.language.syntax import check_length
from fuseplan.ops import BY_NAME
from fuseplan.plans.text import parse_operator
from fuseplan.system import limits

WRITTEN = 4  # elements of a constant that its text has
_BARE = re.compile(r"[A-Za-z_/.][\w/.]*")
_NAME = r'(?:"(?:[^"\\]|\\.)*"|[\w/.]+)'
_TYPE = r"(?:\?|\w+\[[^\]]*\])"
_TARGET = re.compile(rf"\s*({_NAME})\s*(?::\s*({_TYPE}))?\s*(?:,|$)")
_NODE = re.compile(rf"(.*?)\s*=\s*(.*)\(((?:\s*{_NAME}\s*,?)*)\)")
_HEAD = re.compile(rf"(input|constant|output)\s+({_NAME})\s*(?::\s*({_TYPE}))?\s*(?:=\s*(.+))?")
_COMMENT = re.compile(r"\s+#\s(?P<kind>\S*) (?P<name>.*)$|^#.*$")


def graph_text(graph: Parts, types: Mapping[str, Type]) -> str:
    """The text of a graph."""
    return "\n".join(_lines(graph, types))


def _lines(graph: Parts, types: Mapping[str, Type]) -> Iterator[str]:
    for name, made in graph.inputs.items():
        yield f"input {_name(name)}: {made}"
    for name, array in graph.constants.items():
        elements = f" = {_elements(array)}" if _is_written(array) else ""
        yield f"constant {_name(name)}: {type_of(array)}{elements}"
    for node in graph.nodes:
        targets = ", ".join(_target(name, types) for name in node.outputs)
        origin = f"  # {node.origin.kind} {node.origin.name}" if node.origin.kind else ""
        yield f"{targets} = {node.op.text}({', '.join(map(_name, node.inputs))}){origin}"
    for name in graph.outputs:
        yield f"output {_name(name)}"


def _target(name: str, types: Mapping[str, Type]) -> str:
    return f"{_name(name)}: {types[name]}" if name else '""'


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _is_written(array: Tensor) -> bool:
    return array.size <= WRITTEN and array.dtype.kind in "biuf"


def _elements(array: Tensor) -> str:
    listed = array.reshape(-1).tolist()
    return repr(listed[0]) if array.ndim == 0 else repr(listed)


def parse_graph(text: str, constants: Mapping[str, Tensor]) -> Parts:
    """The parts of the graph that a text writes.

    Raises:
        PlanError: it writes none; the message has the line.
    """
    check_length(text, "the text of a graph", limits.GRAPH_CHARACTERS)
    reader = _Reader(dict(constants))
    for line in text.splitlines():
        if line.strip():
            reader.take(line)
    return reader.parts


class _Reader:
    """Collects a graph's parts line by line."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        self.given, self.parts = given, Parts()

    def take(self, line: str) -> None:
        """Reads a line."""
        comment = _COMMENT.search(line)
        body = (line[: comment.start()] if comment else line).strip()
        try:
            head = _HEAD.fullmatch(body)
            if head is not None:
                self._head(head[1], _read_name(head[2]), head[3], head[4])
            elif body:
                origin = Origin(comment["name"], comment["kind"]) if comment else Origin("", "")
                self.parts.nodes.append(parse_node(body, origin))
        except PlanError as error:
            if error.text is None:
                raise error.located(line.strip(), span=(0, len(line.strip()))) from None
            raise

    def _head(self, kind: str, name: str, written: str | None, elements: str | None) -> None:
        if kind == "output":
            self.parts.outputs.append(name)
            return
        if written is None:
            raise PlanError(f"{kind} {name} has no type", want="such as f32[1x64]")
        made = Type.parse(written)
        if kind == "input":
            self.parts.inputs[name] = made
            return
        self.constant(name, made, elements)

    def constant(self, name: str, made: Type, elements: str | None) -> None:
        """Adds a constant whose elements are written, or given beside the text."""
        self.parts.constants[name] = _array(made, elements) if elements else self._given(name, made)

    def _given(self, name: str, made: Type) -> Tensor:
        if name not in self.given:
            raise PlanError(f"the elements of the constant {name} are missing", want=f"constants[{name!r}]")
        array = self.given[name]
        if type_of(array) != made:
            raise PlanError(f"the constant {name} is another", got=type_of(array), want=made)
        return array


def parse_node(line: str, origin: Origin) -> Node:
    """The node that a line writes; a PlanError where it writes none."""
    found = _NODE.fullmatch(line)
    if found is None:
        want = "such as y: f32[1x64] = relu(x)"
        raise PlanError("this is not a line of a graph", text=line, span=(0, len(line)), want=want)
    targets, place = [], 0
    while place < len(found[1]):
        target = _TARGET.match(found[1], place)
        if target is None:
            raise PlanError("these are not the names of results", text=line, span=found.span(1))
        targets.append((_read_name(target[1]), target[2]))
        place = target.end()
    results = tuple(Type.parse(written) if written else Type(None, "?") for _, written in targets)
    op = parse_op(found[2], results)
    inputs = tuple(map(_read_name, re.findall(_NAME, found[3])))
    return Node(op, inputs, tuple(name for name, _ in targets), origin)


def parse_op(text: str, results: tuple[Type, ...]) -> GraphOp:
    """The operator that a text writes.

    Raises:
        PlanError: there is none of that name, or its attributes are wrong.
    """
    if text.partition("(")[0].strip() in BY_NAME:
        return Layer(parse_operator(text))
    word, values, named = call_of(text, "an operator of a graph")
    known: dict[str, type[GraphOp]] = {**BY_WORD, Planned.name: Planned}
    if word in known:
        return known[word].read(values, named)
    if "." in word and not values:
        return Foreign(word, tuple(named.items()), results)
    remedy = did_you_mean(word, [*BY_NAME, *known])
    raise PlanError(f"there is no operator {word} in a graph", text=text, span=(0, len(word)), remedy=remedy)


def _read_name(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _array(made: Type, elements: str) -> Tensor:
    words = [word.strip() for word in elements.strip("[] ").split(",") if word.strip()]
    dtype = numpy_dtype(made.dtype)
    try:
        listed = (
            np.array([word == "True" for word in words])
            if dtype.kind == "b"
            else np.array(words).astype(dtype)
        )
        return listed.reshape(made.shape or ())
    except ValueError:
        raise PlanError("these are not the constant's elements", got=elements, want=str(made)) from None


def graph_json(graph: Parts, types: Mapping[str, Type]) -> str:
    """The graph as JSON: types and operators as their texts; elements as the text has them."""
    nodes = [
        {
            "op": node.op.text,
            "inputs": node.inputs,
            "outputs": [[name, str(types[name]) if name else "?"] for name in node.outputs],
            "origin": node.origin,
        }
        for node in graph.nodes
    ]
    constants = {
        name: [str(type_of(array)), _elements(array) if _is_written(array) else None]
        for name, array in graph.constants.items()
    }
    inputs = {name: str(made) for name, made in graph.inputs.items()}
    whole = {"inputs": inputs, "constants": constants, "nodes": nodes, "outputs": graph.outputs}
    return json.dumps({**whole, "folded": graph.folded})


def parse_json(text: str, constants: Mapping[str, Tensor]) -> Parts:
    """The parts of the graph that `graph_json` wrote; a PlanError where the text is something else."""
    check_length(text, "the JSON of a graph", limits.GRAPH_CHARACTERS)
    reader = _Reader(dict(constants))
    try:
        whole = json.loads(text)
        for name, written in whole["inputs"].items():
            reader.parts.inputs[name] = Type.parse(written)
        for name, (written, elements) in whole["constants"].items():
            reader.constant(name, Type.parse(written), elements)
        reader.parts.nodes = [_json_node(**each) for each in whole["nodes"]]
        reader.parts.outputs = list(map(str, whole["outputs"]))
        reader.parts.folded = [Origin(*each) for each in whole["folded"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PlanError(f"this is not a graph's JSON: {type(error).__name__}: {error}") from None
    return reader.parts


def _json_node(op: str, inputs: list[str], outputs: list[tuple[str, str]], origin: list[str]) -> Node:
    made = parse_op(op, tuple(Type.parse(written) for _, written in outputs))
    return Node(made, tuple(inputs), tuple(name for name, _ in outputs), Origin(*origin))

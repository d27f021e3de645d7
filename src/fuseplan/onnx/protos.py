"""ONNX's messages as values of ours: types, attributes, nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from fuseplan.graph.node import Node
from fuseplan.graph.ops import Foreign
from fuseplan.graph.type import Type, numpy_dtype, word_of

LIBRARY = "onnx"
GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def type_of_proto(proto: Any, extent: int | None = None) -> Type:
    """The type of a value; `extent` stands for extents that are no numbers, else the shape is unknown."""
    if proto.WhichOneof("value") != "tensor_type" or not proto.tensor_type.elem_type:
        return Type(None, "?")
    tensor = proto.tensor_type
    dtype = word_of_element(tensor.elem_type)
    open_extent = -1 if extent is None else extent
    dims = [each.dim_value if each.HasField("dim_value") else open_extent for each in tensor.shape.dim]
    is_known = tensor.HasField("shape") and all(each >= 0 for each in dims)
    return Type(tuple(dims) if is_known else None, dtype)


def word_of_element(element: int) -> str:
    """Our word for ONNX's number of a dtype; `?` for dtypes that NumPy lacks."""
    if element == onnx.TensorProto.STRING:
        return "str"
    try:
        return word_of(helper.tensor_dtype_to_np_dtype(element))
    except (KeyError, ValueError):
        return "?"


def proto_of_type(made: Type) -> Any:
    """ONNX's type of a tensor; None for values that are none."""
    if made.dtype == "?":
        return None
    is_text = made.dtype == "str"
    element = onnx.TensorProto.STRING if is_text else helper.np_dtype_to_tensor_dtype(numpy_dtype(made.dtype))
    return helper.make_tensor_type_proto(element, made.shape)


def foreign(node: Any, results: tuple[Type, ...]) -> Foreign:
    """An operator that ONNX runs, with its attributes; those that are no numbers and texts are bytes."""
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    attributes = tuple((each.name, _value(each)) for each in node.attribute)
    return Foreign(f"{LIBRARY}.{domain}{node.op_type}", attributes, results)


def _value(attribute: Any) -> Any:
    """The attribute's value where it can be written, else its message as bytes."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    kinds = {type(each) for each in value} if isinstance(value, list) and value else set()
    made = tuple(value) if len(kinds) == 1 and kinds <= {int, float} else value
    if isinstance(made, int | float | str | tuple) and _attribute(attribute.name, made) == attribute:
        return made
    return bytes(attribute.SerializeToString())


def _attribute(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return onnx.AttributeProto.FromString(value)
    return helper.make_attribute(name, value)


def proto_of_node(node: Node) -> Any:
    """ONNX's message of a node that it runs."""
    assert isinstance(node.op, Foreign)  # by the caller
    _, _, word = node.op.operator.partition(".")
    domain, _, name = word.rpartition(".")
    explicit = len(node.inputs) - implicit_count(node.op)
    made = helper.make_node(name, node.inputs[:explicit], node.outputs, node.origin.name, domain=domain)
    made.attribute.extend(_attribute(name, value) for name, value in node.op.attributes)
    return made


def implicit_count(op: Foreign) -> int:
    """How many of the operator's last inputs are values that its inner graphs read from outside."""
    attributes = (_attribute(name, value) for name, value in op.attributes if isinstance(value, bytes))
    return len(set(read_inside(attributes)))


def read_inside(attributes: Any) -> Iterator[str]:
    """The values that inner graphs read from outside of them."""
    for attribute in attributes:
        if attribute.type in GRAPHS:
            for graph in (attribute.g, *attribute.graphs):
                yield from _free(graph)


def _free(graph: Any) -> Iterator[str]:
    made = {each.name for each in (*graph.input, *graph.initializer)}
    for node in graph.node:
        yield from (name for name in (*node.input, *read_inside(node.attribute)) if name and name not in made)
        made |= set(node.output)
    yield from (each.name for each in graph.output if each.name not in made)

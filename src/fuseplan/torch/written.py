"""Graphs of torch's as text: operators of ATen by their names, and the descriptions of their tensors."""

from __future__ import annotations

import base64
import json
import operator
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fuseplan.torch.described import Described

NUMBERS = (int, float, bool)
SIMPLE = (*NUMBERS, str, type(None))
WORDS = (torch.dtype, torch.layout, torch.memory_format)  # values of torch's that have names in torch
LARGEST = 1 << 20  # bytes of a tensor that is written


class UnwrittenError(Exception):
    """The graph has a part without a text."""


def graph_text(graph: fx.Graph) -> list[Any]:
    """A graph of operators, their arguments, and what is known of their tensors, as values of JSON.

    Raises:
        UnwrittenError: it has other parts, or tensors with open extents.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    return [_node(node, places) for node in graph.nodes]


def _node(node: fx.Node, places: dict[fx.Node, int]) -> list[Any]:
    args, kwargs = (
        _value(tuple(node.args), places),
        {key: _value(each, places) for key, each in node.kwargs.items()},
    )
    described = tensors_text(node.meta.get("val"))
    return [node.op, node.name, _target(node), args, kwargs, described, node.meta.get("stack_trace")]


def _target(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise UnwrittenError(f"{node.op} {node.target}")
    return str(node.target)


def _value(value: Any, places: dict[fx.Node, int]) -> Any:
    """An argument; what JSON lacks is an object with one key, its kind."""
    if isinstance(value, fx.Node):
        return {"node": places[value]}
    if type(value) in SIMPLE:
        return value
    if isinstance(value, tuple | list):
        made = [_value(each, places) for each in value]
        return {"tuple": made} if isinstance(value, tuple) else made
    if isinstance(value, slice):
        return {"slice": [_value(each, places) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, WORDS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise UnwrittenError(type(value).__name__)


def tensors_text(value: Any) -> Any:
    """A tensor's shape, strides, dtype and device, those of several, or a number; None for another value.

    Raises:
        UnwrittenError: its extents are open, or its elements do not lie by strides.
    """
    if isinstance(value, list | tuple):
        return {"each": [tensors_text(each) for each in value]}
    if type(value) in NUMBERS:  # such as the longest sequence, which cuDNN's attention returns
        return {"number": value}
    if not isinstance(value, torch.Tensor):
        return None
    extents = (*value.shape, *value.stride())
    if not all(type(each) is int for each in extents) or value.layout is not torch.strided:
        raise UnwrittenError(str(value.shape))
    dtype = str(value.dtype).removeprefix("torch.")
    return [list(value.shape), list(value.stride()), dtype, str(value.device)]


def read_tensors(described: Any, kind: type[Described] = Described) -> Any:
    """The tensors that `tensors_text` describes, without elements."""
    if isinstance(described, dict):
        known = described.get("each")
        return described["number"] if known is None else tuple(read_tensors(each, kind) for each in known)
    if described is None:
        return None
    shape, strides, dtype, device = described
    return kind.of(shape, strides, getattr(torch, dtype), device)


def read_graph(nodes: list[Any]) -> fx.GraphModule:
    """The graph that `graph_text` wrote; its tensors are described, without elements."""
    made: fx.Graph = fx.Graph()
    known: list[fx.Node] = []
    for op, name, target, args, kwargs, described, trace in nodes:
        called = _called(target) if op == "call_function" else target
        named = {key: _read(each, known) for key, each in kwargs.items()}
        node = made.create_node(op, called, _read(args, known), named, name)
        node.meta["val"] = read_tensors(described)
        if trace:
            node.meta["stack_trace"] = trace
        known.append(node)
    return fx.GraphModule(torch.nn.Module(), made)


def _called(word: str) -> Callable[..., Any]:
    if word == "getitem":
        return operator.getitem
    library, name, overload = word.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, library), name), overload)
    return found


def _read(value: Any, known: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(each, known) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return known[inner]
    if kind in ("torch", "device"):
        return getattr(torch, inner) if kind == "torch" else torch.device(inner)
    parts = _read(inner, known)
    return tuple(parts) if kind == "tuple" else slice(*parts)


def tensor_text(tensor: torch.Tensor) -> list[Any]:
    """A dense tensor with its elements; an UnwrittenError where it is too large."""
    if not 0 < tensor.nbytes <= LARGEST:
        raise UnwrittenError(f"a constant of {tensor.nbytes} bytes")
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [*tensors_text(tensor), base64.b64encode(elements).decode()]


def read_tensor(told: list[Any]) -> torch.Tensor:
    """The tensor that `tensor_text` wrote."""
    shape, strides, dtype, device, elements = told
    flat = torch.frombuffer(bytearray(base64.b64decode(elements)), dtype=getattr(torch, dtype))
    made = torch.empty_strided(shape, strides, dtype=flat.dtype, device=device)
    return made.copy_(flat.reshape(shape))


def packed(value: Any) -> bytes:
    """Values of JSON in few bytes."""
    return zlib.compress(json.dumps(value).encode(), 1)


def unpacked(data: bytes) -> Any:
    """The values that `packed` packed."""
    return json.loads(zlib.decompress(data))

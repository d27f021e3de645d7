"""The meaning of a graph: every operator in float64, nothing rounded between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fuseplan.errors import ArgumentError
from fuseplan.graph.layer import Layer
from fuseplan.graph.node import Node, Parts
from fuseplan.graph.ops import Foreign
from fuseplan.graph.type import Type, numpy_dtype, type_of, word_of
from fuseplan.language.dtypes import DTYPES

# A library's way to run one of its operators: the node and its inputs (None where one is left out).
Run = Callable[[Node, Sequence[Any]], Sequence[Any]]


def evaluate(
    graph: Parts, given: Mapping[str, Any], run: Mapping[str, Run], types: Mapping[str, Type]
) -> dict[str, Any]:
    """The outputs by name; floats in float64; `Graph.evaluate` tells the arguments.

    `types` tells the names of the axes of the values that operators of plans read.

    Raises:
        ArgumentError: an input is missing, unknown, or of another shape.
        Unsupported: an operator of a library that `run` does not have.
    """
    check_inputs(graph, given)
    values: dict[str, Any] = {name: widened(each) for name, each in (graph.constants | dict(given)).items()}
    for node in graph.nodes:
        taken: list[Any] = [values[name] if name else None for name in node.inputs]
        if isinstance(node.op, Foreign) and node.op.library in run:
            made = run[node.op.library](
                node, [_stored(each, types.get(name)) for name, each in zip(node.inputs, taken, strict=True)]
            )
        elif isinstance(node.op, Layer):
            made = node.op.evaluate(taken, types[node.inputs[0]].names)
        else:
            made = node.op.evaluate(taken)
        values |= {name: each for name, each in zip(node.outputs, made, strict=False) if name}
    return {name: values[name] for name in graph.outputs}


def widened(value: Any) -> Any:
    """A tensor of a dtype of plans in float64; other values as they are."""
    row = DTYPES.get(word_of(value.dtype)) if isinstance(value, np.ndarray) else None
    return value.astype(np.float64) if row is not None and row.is_float else value


def _stored(value: Any, made: Type | None) -> Any:
    """A quantized value as the integers that it is; others as they are."""
    return value.astype(numpy_dtype(made.dtype)) if made is not None and made.is_quantized else value


def check_inputs(graph: Parts, given: Mapping[str, Any]) -> None:
    """Refuses inputs that are not the graph's.

    Raises:
        ArgumentError: one is missing, unknown, or of another shape or dtype.
    """
    missing = [name for name in graph.inputs if name not in given]
    unknown = [name for name in given if name not in graph.inputs]
    if missing or unknown:
        listed = ", ".join(f"{name}: {made}" for name, made in graph.inputs.items())
        problem = f"no input is named {unknown[0]!r}" if unknown else f"the input {missing[0]!r} is missing"
        raise ArgumentError(f"{problem}\n  want {listed or 'no inputs'}")
    for name, want in graph.inputs.items():
        got = given[name]
        if want.dtype == "?" or not hasattr(got, "shape"):
            continue
        found = type_of(got)
        if want.shape not in (None, found.shape) or want.dtype not in (found.dtype, "?"):
            raise ArgumentError(f"the input {name!r} is another tensor\n  got {found}; want {want}")

"""The values of a model that depend on its batch: the model is read for two batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fuseplan.errors import PlanError
from fuseplan.graph.opened import OpenKernels
from fuseplan.graph.type import Type
from fuseplan.onnx.reader import read


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

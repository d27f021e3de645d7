"""Files of ONNX models, and the data beside them."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper

from fuseplan.errors import ArgumentError, a_thing
from fuseplan.onnx.stored import is_plain, is_pointed, parsed, point
from fuseplan.system import limits


def model_of(model: str | PathLike[str] | Any) -> Any:
    """ONNX's message of a model; `fuseplan.onnx.stored` has the arrays of its large tensors.

    Raises:
        ArgumentError: it is no model, or its external data lies outside of the file's folder.
        OSError: the file cannot be read.
    """
    if isinstance(model, onnx.ModelProto):
        return model
    if not isinstance(model, str | PathLike):
        raise ArgumentError(f"want the path of an ONNX model, or an onnx.ModelProto; got {a_thing(model)}")
    path = Path(model)
    if path.stat().st_size > limits.MODEL_BYTES:
        raise ArgumentError(f"{path} has more than {limits.MODEL_BYTES} bytes, the most that a message has")
    try:
        found = parsed(path)
    except DecodeError as error:
        raise ArgumentError(f"{path} is no ONNX model: {error}") from None
    if not found.graph.node and not found.graph.output:
        raise ArgumentError(f"{path} is no ONNX model: it has no graph")
    _load_data(found, path)
    return found


def _load_data(model: Any, path: Path) -> None:
    """Finds tensors that are stored in other files.

    Raises:
        ArgumentError: such a file is outside of the model's folder, missing, or too short.
    """
    folder = path.resolve().parent
    inner = ((each, False) for each in external_data_helper._get_all_tensors(model))
    for tensor, is_initializer in (*((each, True) for each in model.graph.initializer), *inner):
        if not external_data_helper.uses_external_data(tensor) or is_pointed(tensor):
            continue
        told = external_data_helper.ExternalDataInfo(tensor)
        place = told.location
        data = Path(os.path.realpath(folder / place))
        if os.path.isabs(place) or not data.is_relative_to(folder):
            raise ArgumentError(
                f"{path}: the data of {tensor.name} is in {place!r}, outside of the model's folder"
            )
        if not data.is_file():
            raise ArgumentError(f"{path}: the file {place!r}, with the data of {tensor.name}, is missing")
        if is_initializer and is_plain(tensor):
            offset = told.offset or 0
            point(tensor, data, offset, told.length or data.stat().st_size - offset)
            continue
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (ValueError, onnx.checker.ValidationError) as error:
            raise ArgumentError(f"{path}: the data of {tensor.name} cannot be read: {error}") from None
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]

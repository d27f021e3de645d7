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
from fuseplan.system import limits


def model_of(model: str | PathLike[str] | Any) -> Any:
    """ONNX's message of a model, its external data loaded.

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
        found = onnx.load_model_from_string(path.read_bytes())
    except DecodeError as error:
        raise ArgumentError(f"{path} is no ONNX model: {error}") from None
    if not found.graph.node and not found.graph.output:
        raise ArgumentError(f"{path} is no ONNX model: it has no graph")
    _load_data(found, path)
    return found


def _load_data(model: Any, path: Path) -> None:
    """Loads tensors that are stored in other files.

    Raises:
        ArgumentError: such a file is outside of the model's folder, missing, or too short.
    """
    folder = path.resolve().parent
    for tensor in external_data_helper._get_all_tensors(model):
        if not external_data_helper.uses_external_data(tensor):
            continue
        place = external_data_helper.ExternalDataInfo(tensor).location
        data = Path(os.path.realpath(folder / place))
        if os.path.isabs(place) or not data.is_relative_to(folder):
            raise ArgumentError(
                f"{path}: the data of {tensor.name} is in {place!r}, outside of the model's folder"
            )
        if not data.is_file():
            raise ArgumentError(f"{path}: the file {place!r}, with the data of {tensor.name}, is missing")
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except (ValueError, onnx.checker.ValidationError) as error:
            raise ArgumentError(f"{path}: the data of {tensor.name} cannot be read: {error}") from None
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]

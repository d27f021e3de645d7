"""Tensors where a file stores them: a model's message without them, and arrays that are mapped.

A model's weights are most of its file, and are read once, when they are packed. The message that is parsed
has their places in the file instead, as ONNX's own external data; an array is mapped when it is asked for.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import external_data_helper, helper, numpy_helper

from fuseplan.errors import ArgumentError
from fuseplan.graph.op import Tensor

LEAST = 4096  # bytes: smaller tensors stay in the message
STAMP = "fuseplan.stamp"  # the file's size and time of change, when the message was read
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9  # numbers of fields: of a model, of a graph, of a tensor
DELIMITED, VARINT, BYTES_8, BYTES_4 = 2, 0, 1, 5  # kinds of fields
T = onnx.TensorProto
# The dtypes whose bytes in a file are those of an array.
PLAIN = (T.FLOAT, T.DOUBLE, T.FLOAT16, T.BFLOAT16, T.INT64, T.INT32, T.INT16, T.INT8, T.UINT8, T.BOOL)

_maps: weakref.WeakValueDictionary[tuple[str, str], mmap.mmap] = weakref.WeakValueDictionary()


def parsed(path: Path) -> Any:
    """The message of a model's file, its large initializers as data outside of it: in the file itself.

    Raises:
        DecodeError: the file holds no message.
        OSError: it cannot be read.
    """
    if path.stat().st_size < LEAST:
        return onnx.load_model_from_string(path.read_bytes())
    whole = path.resolve()
    with memoryview(_mapped(str(whole), _stamp(whole))) as data:
        return onnx.load_model_from_string(b"".join(_outer(data, whole)))


def is_plain(tensor: Any) -> bool:
    """Whether the bytes that store a tensor are those of its array."""
    return tensor.data_type in PLAIN and sys.byteorder == "little"


def is_pointed(tensor: Any) -> bool:
    """Whether a tensor's message says where its data is, as `point` does."""
    return any(each.key == STAMP for each in tensor.external_data)


def point(tensor: Any, place: Path, offset: int, length: int) -> None:
    """Lets a tensor's message say where its data is."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = T.EXTERNAL
    told = {"location": str(place), "offset": str(offset), "length": str(length), STAMP: _stamp(place)}
    for key, value in told.items():
        tensor.external_data.add(key=key, value=value)


def array_of(tensor: Any) -> Tensor:
    """The array of a tensor's message; read-only, and not aligned, where it is mapped.

    Raises:
        ArgumentError: the file with the data has changed, or ends before the data.
    """
    if tensor.data_location != T.EXTERNAL:
        made: Tensor = numpy_helper.to_array(tensor)
        return made
    told = {each.key: each.value for each in tensor.external_data}
    place, offset = told["location"], int(told["offset"])
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    shape = tuple(tensor.dims)
    if 0 in shape:
        return np.empty(shape, dtype)  # a length of 0 is the file's rest
    if int(told["length"]) != dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise ArgumentError(
            f"{place}: {tensor.name} has {told['length']} bytes, which are no {dtype}{list(shape)}"
        )
    if _stamp(Path(place)) != told[STAMP]:
        raise ArgumentError(f"{place} has changed since the model was loaded: load it again")
    data = _mapped(place, told[STAMP])
    if offset + int(told["length"]) > len(data):
        raise ArgumentError(f"{place} ends before the data of {tensor.name}")
    return np.ndarray(shape, dtype, data, offset)


def whole(model: Any) -> Any:
    """The message with its tensors in it; an ArgumentError as for `array_of`."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for tensor in external_data_helper._get_all_tensors(made):
        if tensor.data_location == T.EXTERNAL:
            tensor.raw_data = array_of(tensor).tobytes()
            tensor.data_location = T.DEFAULT
            del tensor.external_data[:]
    return made


def release() -> None:
    """Gives back the memory of what was read of mapped files; it is read again where it is needed."""
    for each in list(_maps.values()):
        if hasattr(mmap, "MADV_DONTNEED"):
            each.madvise(mmap.MADV_DONTNEED)


def _stamp(place: Path) -> str:
    found = os.stat(place)
    return f"{found.st_size}:{found.st_mtime_ns}"


def _mapped(place: str, stamp: str) -> mmap.mmap:
    found = _maps.get((place, stamp))
    if found is None:
        with open(place, "rb") as file:
            found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _maps[place, stamp] = found
    return found


def _outer(data: memoryview, place: Path) -> Iterator[bytes]:
    """The model's bytes, its graph without large tensors."""
    for number, begin, inner, end in _fields(data, 0, len(data)):
        yield (
            _delimited(GRAPH, b"".join(_graph(data, inner, end, place)))
            if number == GRAPH
            else bytes(data[begin:end])
        )


def _graph(data: memoryview, begin: int, end: int, place: Path) -> Iterator[bytes]:
    for number, first, inner, last in _fields(data, begin, end):
        is_large = number == INITIALIZER and last - inner >= LEAST
        yield (
            _delimited(INITIALIZER, _tensor(data, inner, last, place))
            if is_large
            else bytes(data[first:last])
        )


def _tensor(data: memoryview, begin: int, end: int, place: Path) -> bytes:
    """A tensor's bytes without its data, where these are plain."""
    fields = list(_fields(data, begin, end))
    raw = [(inner, last) for number, _, inner, last in fields if number == RAW_DATA]
    tensor = T.FromString(
        b"".join(bytes(data[at:last]) for number, at, _, last in fields if number != RAW_DATA)
    )
    if len(raw) != 1 or not is_plain(tensor) or tensor.data_location == T.EXTERNAL:
        return bytes(data[begin:end])
    ((inner, last),) = raw
    point(tensor, place, inner, last - inner)
    made: bytes = tensor.SerializeToString()
    return made


def _fields(data: memoryview, place: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Of each field of a message: its number, and where it, its content and the next one begin.

    Raises:
        DecodeError: the bytes are no message.
    """
    while place < end:
        begin = place
        key, place = _varint(data, place, end)
        kind, inner = key & 7, place
        if kind == DELIMITED:
            length, inner = _varint(data, place, end)
            place = inner + length
        elif kind == VARINT:
            _, place = _varint(data, place, end)
        elif kind in (BYTES_8, BYTES_4):
            place += 8 if kind == BYTES_8 else 4
        else:
            raise DecodeError(f"a field of kind {kind}")
        if place > end:
            raise DecodeError("a field ends behind its message")
        yield key >> 3, begin, inner, place


def _varint(data: memoryview, place: int, end: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next one begins."""
    made = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        made |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return made, place
    raise DecodeError("a number without an end")


def _delimited(number: int, content: bytes) -> bytes:
    """A field with its content."""
    made, length = bytearray([number << 3 | DELIMITED]), len(content)
    while length > 127:
        made.append(length & 127 | 128)
        length >>= 7
    return bytes(made) + bytes([length]) + content

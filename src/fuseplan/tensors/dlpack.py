"""Reads tensors of other packages: no copy, no import of the package.

Through DLPack's C structures, or `__cuda_array_interface__`, which is a dictionary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from fuseplan.errors import ArgumentError, a_thing
from fuseplan.language.dtypes import DTYPES, dtype_of
from fuseplan.language.tensor import Dense

# What a capsule holds: https://dmlc.github.io/dlpack/latest/c_api.html
CPU, PINNED = 1, 3  # device types whose memory the processor reads as its own
CUDA, MANAGED = 2, 13
DEVICES = {
    CUDA: "CUDA",
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    10: "ROCm",
    11: "ROCm host",
    MANAGED: "CUDA managed",
    14: "oneAPI",
}
CODES = {(each.dlpack, 8 * each.itemsize): each.name for each in DTYPES.values()}
# NumPy's array interface has no names for bf16 and fp8.
TYPES = {each.array.str: each.name for each in DTYPES.values() if each.numpy == each.package}
READ_ONLY, COPIED = 1, 2  # flags
IMMUTABLE = ("jax", "jaxlib", "tensorflow")  # nothing may write their arrays, and no capsule says so
STAND_INS = {  # classes by package and name, whose objects hold no elements
    ("jax", "Tracer"): (
        "a placeholder without numbers: jax.jit, jax.grad and jax.vmap trace a function with it; call the "
        "plan through jax.pure_callback"
    ),
    ("torch", "Proxy"): (
        "a placeholder without numbers: torch.fx traces a function with it; keep the plan in a module of "
        "its own, and make that a leaf of the tracer"
    ),
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)

View = tuple[int, tuple[int, ...], str, tuple[int, ...], bool]
Wrote = Callable[[Iterable[Any]], None]  # tells the owner of tensors that a kernel wrote them


def view_dlpack(
    tensor: Any, what: object, *, devices: tuple[int, ...] | None = (CPU, PINNED), stream: int | None = None
) -> View:
    """Address, shape, dtype, strides (elements) and read-only flag of a tensor with `__dlpack__`.

    `devices` are the device types that are taken, None for any. `stream` is the one that will read the
    tensor, as DLPack counts: its maker sees to it that the tensor is written by then.

    The capsule is read and let go, which tells its maker that nobody took the tensor: the caller keeps
    `tensor` itself.

    Raises:
        ArgumentError: it is not on such a device, its maker will not export it, or its dtype is none of ours.
    """
    device, _ = device_of(tensor, what)
    if devices is not None and device not in devices:
        name = DEVICES.get(device, f"DLPack device {device}")
        raise ArgumentError(
            what, f" is in {name} memory; this target reads host memory: pass a copy on the CPU"
        )
    capsule = _capsule(tensor, what, {} if stream is None else {"stream": stream})
    is_immutable = type(tensor).__module__.partition(".")[0] in IMMUTABLE
    if _is_valid(capsule, b"dltensor_versioned"):
        held = ctypes.cast(_pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned)).contents
        if held.major != 1:
            raise ArgumentError(what, f" speaks DLPack {held.major}.{held.minor}; want 1.x or 0.x")
        if held.flags & COPIED:  # nobody would see what is written, and the copy goes with the capsule
            raise ArgumentError(
                what, " is exported by DLPack as a copy: pass the tensor that owns the memory"
            )
        return _read(held.tensor, is_immutable or bool(held.flags & READ_ONLY), what)
    if _is_valid(capsule, b"dltensor"):
        plain = ctypes.cast(_pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
        return _read(plain, is_immutable, what)
    raise ArgumentError(what, f": {type(tensor).__name__}.__dlpack__ returned no DLPack capsule")


def device_of(tensor: Any, what: object) -> tuple[int, int]:
    """The device that a tensor with `__dlpack__` is on: DLPack's type, and which of that type.

    Raises:
        ArgumentError: it is on none, or stands for a tensor in a trace.
    """
    for base in type(tensor).__mro__:
        told = STAND_INS.get((base.__module__.partition(".")[0], base.__name__))
        if told is not None:
            raise ArgumentError(what, f" is {a_thing(tensor)}, {told}")
    try:
        kind, index = tensor.__dlpack_device__()
        return int(kind), int(index)
    except Exception as error:
        raise ArgumentError(what, f" is on a device that DLPack does not support: {_said(error)}") from error


def _capsule(tensor: Any, what: object, told: dict[str, int]) -> Any:
    try:
        try:
            return tensor.__dlpack__(max_version=(1, 0), **told)
        except TypeError:  # a maker of before DLPack 1.0
            return tensor.__dlpack__(**told)
    except Exception as error:
        raise ArgumentError(what, f" cannot be exported by DLPack: {_said(error)}") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _read(held: _Tensor, readonly: bool, what: object) -> View:
    dtype = CODES.get((held.code, held.bits)) if held.lanes == 1 else None
    if dtype is None:
        raise ArgumentError(
            what, f" has a dtype of DLPack code {held.code}, {held.bits} bits; want {', '.join(DTYPES)}"
        )
    if held.ndim < 0 or (held.ndim and not held.shape):
        raise ArgumentError(what, f" is exported by DLPack with {held.ndim} axes and without a shape")
    shape = tuple(held.shape[axis] for axis in range(held.ndim))
    if not held.data and 0 not in shape:
        raise ArgumentError(what, " has no memory: DLPack exports it with a null pointer")
    address = (held.data or 0) + held.byte_offset
    if address % dtype_of(dtype).itemsize:
        raise ArgumentError(what, " is not aligned to its elements: pass a copy")
    if held.strides:
        return address, shape, dtype, tuple(held.strides[axis] for axis in range(held.ndim)), readonly
    return address, shape, dtype, Dense(shape, dtype).element_strides, readonly


def view_array_interface(tensor: Any, what: object) -> View:
    """The same of a tensor with `__cuda_array_interface__`, on whichever device it lies.

    Raises:
        ArgumentError: it has a dtype that is none of ours, or a mask.
    """
    try:
        told = dict(tensor.__cuda_array_interface__)
        name, (address, readonly), shape = told["typestr"], told["data"], tuple(map(int, told["shape"]))
        steps = None if told.get("strides") is None else tuple(map(int, told["strides"]))
    except Exception as error:
        raise ArgumentError(what, f" has no __cuda_array_interface__ to read: {_said(error)}") from error
    dtype = TYPES.get(name)
    if dtype is None:
        raise ArgumentError(what, f" has type {name!r}; want {', '.join(TYPES)}: bf16 and fp8 need DLPack")
    if told.get("mask") is not None:
        raise ArgumentError(what, " is masked, and kernels do not support masks: fill it first")
    size = dtype_of(dtype).itemsize
    if (address or 0) % size or any(step % size for step in steps or ()):
        raise ArgumentError(what, " is not aligned to its elements: pass a copy")
    dense = Dense(shape, dtype).element_strides
    strides = dense if steps is None else tuple(step // size for step in steps)
    return int(address or 0), shape, dtype, strides, bool(readonly)

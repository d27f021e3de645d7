"""NVIDIA's driver through ctypes: modules, tensor maps, launches; no compiler and no extension module.

All is done in the device's primary context, which is the one that torch and CuPy use.
Tensor maps are encoded from a slot's TensorMap and the layout that the kernel expects.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fuseplan.backends.triton.artifact import Artifact, MapLayout
from fuseplan.errors import BuildError
from fuseplan.kernels.emit import TensorMap
from fuseplan.language.dtypes import dtype_of
from fuseplan.system.locks import Lock

ELEMENTS = {"i8": 0, "f16": 6, "f32": 7, "f64": 8, "bf16": 9}  # CUtensorMapDataType
ENCODED_BYTES = 128
ALIGNMENT = 64  # of an encoded map, which is an argument by value
MOST_AXES = 5
WIDEST_BOX = 256
WIDEST_STEP = 8
STRIDE_BYTES = 16  # every stride is a multiple of it
SWIZZLED = {1: 32, 2: 64, 3: 128}  # bytes of a box's rows, at most


class MapEncoding:
    """The arguments of cuTensorMapEncodeTiled but for the memory: innermost axis first, as the driver counts.

    A box's extents are what the copy spans, so that a step of 2 doubles them.
    """

    __slots__ = ("begin", "box", "dtype", "extents", "rank", "steps", "strides", "swizzle")

    def __init__(self, mapped: TensorMap, layout: MapLayout) -> None:
        size = dtype_of(mapped.dtype).itemsize
        spans = [extent * step for extent, step in zip(layout.box, mapped.steps, strict=True)]
        self.dtype, self.rank, self.swizzle = ELEMENTS[mapped.dtype], len(mapped.shape), layout.swizzle
        self.begin = mapped.begin
        self.extents = _reversed(ctypes.c_uint64, mapped.shape)
        self.strides = _reversed(ctypes.c_uint64, [stride * size for stride in mapped.strides[:-1]])
        self.box = _reversed(ctypes.c_uint32, spans)
        self.steps = _reversed(ctypes.c_uint32, mapped.steps)


def _reversed(kind: Any, values: Sequence[int]) -> Any:
    return (kind * max(1, len(values)))(*reversed(values))


def problems(mapped: TensorMap, layout: MapLayout) -> Iterator[str]:
    """Why the copy engine cannot have such a map; none if it can."""
    size, rank = dtype_of(mapped.dtype).itemsize, len(mapped.shape)
    if not 1 <= rank <= MOST_AXES or {len(each) for each in _axes(mapped, layout)} != {rank}:
        yield f"it has {rank} axes; want 1 to {MOST_AXES}, the same everywhere"
        return
    if mapped.strides[-1] != 1 or mapped.steps[-1] != 1:
        yield "its innermost axis is not contiguous"
    if any(stride * size % STRIDE_BYTES or not 0 < stride * size < 2**40 for stride in mapped.strides[:-1]):
        yield f"a stride is not a multiple of {STRIDE_BYTES} bytes"
    if any(not 1 <= step <= WIDEST_STEP for step in mapped.steps):
        yield f"a step is not 1 to {WIDEST_STEP}"
    if any(
        not 1 <= extent * step <= WIDEST_BOX for extent, step in zip(layout.box, mapped.steps, strict=True)
    ):
        yield f"a box spans more than {WIDEST_BOX} elements along an axis"
    row = layout.box[-1] * size
    if row % STRIDE_BYTES or row > SWIZZLED.get(layout.swizzle, row):
        yield f"a box has rows of {row} bytes"
    if any(not 1 <= extent <= 2**32 for extent in mapped.shape):
        yield "an extent is not 1 to 2^32"


def _axes(mapped: TensorMap, layout: MapLayout) -> tuple[tuple[int, ...], ...]:
    return mapped.shape, mapped.strides, mapped.steps, mapped.box, layout.box


FREE_SHARED_BYTES = 48 * 1024  # more must be asked for
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
WRONG_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
OF_AN_EARLIER_KERNEL = (700, 702, 714, 715, 716, 717, 718, 719)
PROMOTION_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: what it is, and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    )


class CudaDriver:
    """libcuda, as far as launches need it; calls that may fail give a status, 0 for success.

    Raises:
        BuildError: there is none, or it cannot be initialized.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BuildError(f"there is no NVIDIA driver on this machine: {error}") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._guard = Lock()
        self._modules: dict[tuple[int, int], ctypes.c_void_p] = {}  # by function and device
        self._dropped: deque[tuple[int, int]] = deque()
        self._launch = self._library.cuLaunchKernelEx
        self._encode = self._library.cuTensorMapEncodeTiled
        self._check("cuInit", 0)

    @property
    def launch(self) -> Callable[[Any, Any, Any, None], int]:
        """cuLaunchKernelEx: of a LaunchConfig by reference, a function, and the pointers to its arguments."""
        return self._launch

    def told(self, status: int) -> str:
        """`CUDA_ERROR_INVALID_VALUE: invalid argument`."""
        texts = []
        for function in (self._library.cuGetErrorName, self._library.cuGetErrorString):
            text = ctypes.c_char_p()
            function(status, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode())
        return ": ".join(texts)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise BuildError(f"{name} fails with status {status}, {self.told(status)}")

    def _context(self, device: int) -> ctypes.c_void_p:
        """The device's primary context, kept alive for as long as the process lives."""
        with self._guard:
            if device not in self._contexts:
                handle, context = ctypes.c_int(), ctypes.c_void_p()
                self._check("cuDeviceGet", ctypes.byref(handle), device)
                self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                self._contexts[device] = context
            return self._contexts[device]

    @contextmanager
    def current(self, device: int) -> Iterator[None]:
        """Pushes the device's primary context, and takes it away again."""
        self._check("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._check("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def load(self, artifact: Artifact, device: int) -> int:
        """Loads the cubin and asks for its shared memory; the module stays until the function is dropped.

        Raises:
            BuildError: the driver refuses it: it is of another generation, or too new for the driver.
        """
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with self.current(device):
            self._check("cuModuleLoadData", ctypes.byref(module), artifact.binary)
            self._check("cuModuleGetFunction", ctypes.byref(function), module, artifact.entry.encode())
            if artifact.shared_bytes > FREE_SHARED_BYTES:
                self._check("cuFuncSetCacheConfig", function, PREFER_SHARED)
                self._check("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, artifact.shared_bytes)
        handle = int(function.value or 0)
        self._modules[handle, device] = module
        return handle

    def drop(self, function: int, device: int) -> None:
        """Notes that a function will not be launched again; may be called at any moment, in any thread.

        A finalizer may not call the driver, which refuses calls while a stream records.
        """
        self._dropped.append((function, device))

    def unload(self, device: int) -> None:
        """cuModuleUnload of each module whose function was dropped, after cuCtxSynchronize.

        No stream may be recording.

        Raises:
            BuildError: the driver refuses, since an earlier kernel failed.
        """
        dropped = [each for each in tuple(self._dropped) if each[1] == device]
        if not dropped:
            return
        with self.current(device):
            self._check("cuCtxSynchronize")
            for each in dropped:
                self._dropped.remove(each)
                self._check("cuModuleUnload", self._modules.pop(each))

    def encode(self, storage: int, encoding: MapEncoding, address: int) -> int:
        """Writes the 128 bytes of a tensor map of the memory at an address: cuTensorMapEncodeTiled.

        There is no interleaving, and zeros lie outside of the tensor.
        """
        status: int = self._encode(
            ctypes.c_void_p(storage),
            encoding.dtype,
            encoding.rank,
            ctypes.c_void_p(address),
            encoding.extents,
            encoding.strides,
            encoding.box,
            encoding.steps,
            0,
            encoding.swizzle,
            PROMOTION_128B,
            0,
        )
        return status


@functools.cache
def driver_release() -> tuple[int, int] | None:
    """CUDA's release that this machine's driver came with, (13, 0); None where there is no driver."""
    told = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(told))
    except (OSError, AttributeError):
        return None
    return None if status else (told.value // 1000, told.value % 1000 // 10)


@functools.cache
def driver() -> CudaDriver:
    """This machine's driver, initialized once; a BuildError where there is none."""
    return CudaDriver()

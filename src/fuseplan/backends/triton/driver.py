"""NVIDIA's driver through ctypes: modules, tensor maps, launches; no compiler and no extension module.

All is done in the device's primary context, which is the one that torch and CuPy use.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from fuseplan.backends.triton.artifact import Artifact
from fuseplan.errors import BuildError
from fuseplan.system.locks import Lock

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


class Encoding(Protocol):
    """All but storage and pointer of a call of cuTensorMapEncodeTiled; `maps.MapEncoding` is one."""

    dtype: int
    rank: int
    swizzle: int
    extents: Any
    strides: Any
    box: Any
    steps: Any


class Driver(Protocol):
    """What a launch asks of a vendor's driver; calls that may fail give a status, 0 for success."""

    @property
    def launch(self) -> Callable[[Any, Any, Any, None], int]:
        """Of a LaunchConfig by reference, a function, and the pointers to its arguments."""

    def load(self, artifact: Artifact, device: int) -> int:
        """The artifact's function on a device, ready to be launched."""

    def drop(self, function: int, device: int) -> None:
        """Says that a function will not be launched again; may be called at any moment, in any thread."""

    def unload(self, device: int) -> None:
        """Waits until the device is idle and frees what was dropped; no stream may be recording."""

    def encode(self, storage: int, encoding: Encoding, address: int) -> int:
        """Writes the 128 bytes of a tensor map of the memory at an address."""

    def current(self, device: int) -> Any:
        """A context manager: the device's primary context is the thread's."""

    def told(self, status: int) -> str:
        """A status in the driver's own words."""


class CudaDriver:
    """libcuda.

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
        """The function cuLaunchKernelEx itself."""
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
        """Notes it: a finalizer may not call the driver, which refuses calls while a stream records."""
        self._dropped.append((function, device))

    def unload(self, device: int) -> None:
        """cuModuleUnload of each module whose function was dropped, after cuCtxSynchronize.

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

    def encode(self, storage: int, encoding: Encoding, address: int) -> int:
        """cuTensorMapEncodeTiled: no interleaving, zeros outside of the tensor."""
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
def driver() -> Driver:
    """This machine's driver, initialized once.

    Raises:
        BuildError: there is none.
    """
    return CudaDriver()

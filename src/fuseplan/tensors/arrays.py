"""Tensors of the caller: NumPy arrays and anything with DLPack, seen where they lie, never copied.

bf16 and fp8 have no NumPy dtypes of their own: an array of ml_dtypes' is taken where the caller has that
package, and an array of uint16 is always taken as the bit patterns of bf16, one of uint8 as those of the fp8
where the plan has one. New NumPy outputs follow the same rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

import numpy as np
from numpy.typing import NDArray

from fuseplan.errors import ArgumentError, PlanError, a_thing
from fuseplan.language.dtypes import DTYPES, HELD, STORED, dtype_of, widen
from fuseplan.language.tensor import Dense, TensorSpec
from fuseplan.system.locks import Lock

if TYPE_CHECKING:
    from fuseplan.tensors.torch_tensors import TorchForm

Array = NDArray[Any]

ALIGNMENT = 64
HUGE_PAGE = 1 << 21
REGION = 1 << 24  # bytes that small pieces share
WORK: Any = 10_000  # candidates NumPy may look at to tell whether two views share an element
_rest: list[NDArray[np.uint8]] = []  # what is left of the region begun last
_sharing = Lock()


@dataclass(frozen=True)
class Buffer:
    """A tensor where it lies.

    Attributes:
        address: of the element at index zero on every axis.
        dtype: one of `DTYPES`.
        strides: in elements and logical order; may be zero or negative.
        readonly: must not be written.
        owner: what keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    readonly: bool
    owner: Any

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte, and the one past the last."""
        reach = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        size = dtype_of(self.dtype).itemsize
        low = self.address + size * sum(step for step in reach if step < 0)
        return low, self.address + size * (1 + sum(step for step in reach if step > 0))

    @property
    def text(self) -> str:
        """The text for messages: `f32[1x3x8x8, nhwc]`, or with strides where no layout has them."""
        plain = Dense(self.shape, self.dtype)
        if plain.same_layout(self.strides):
            return str(plain)
        if 2 <= len(self.shape) <= 5 and min(self.strides) > 0 and min(self.shape) > 0:
            try:
                return str(TensorSpec(self.shape, self.dtype, strides=self.strides))
            except PlanError:  # elements that share storage have no text of their own
                pass
        return f"{self.dtype}[{'x'.join(map(str, self.shape))}, strides={':'.join(map(str, self.strides))}]"

    def matches(self, spec: TensorSpec | Dense) -> bool:
        """Whether every element lies where the spec has it."""
        return self.shape == spec.shape and self.dtype == spec.dtype and spec.same_layout(self.strides)

    def read_as(self, dtype: str) -> Buffer:
        """The tensor as one of `dtype`, where its elements are bits that may be of several dtypes."""
        row, bits = dtype_of(dtype), getattr(self.owner, "dtype", None)
        is_open = row.numpy != row.package and isinstance(bits, np.dtype) and bits == row.array
        return replace(self, dtype=dtype) if is_open else self

    def numpy(self) -> Array:
        """The tensor as a NumPy array over the same memory; bf16 and fp8 as their bits."""
        return self.reader()(self.address)

    def reader(self) -> Callable[[int], Array]:
        """Makes such arrays over the memory at other addresses, where tensors lie as this one does."""
        low, end = self.bounds
        dtype, shape, ahead = dtype_of(self.dtype).array, self.shape, self.address - low
        memory, steps = ctypes.c_char * (end - low), tuple(stride * dtype.itemsize for stride in self.strides)

        def read(address: int) -> Array:
            raw: Any = memory.from_address(address - ahead)
            return np.ndarray(shape, dtype, raw, ahead, steps)

        return read

    def widened(self) -> Array:
        """The tensor's elements as floats: itself for those that NumPy computes with, else an exact copy."""
        return widen(self.numpy(), self.dtype)


def is_torch(tensor: object) -> bool:
    """Whether it is a tensor of torch's; its caller has imported torch then, which is not done here."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def view(tensor: Any, what: object) -> Buffer:
    """The tensor as a buffer; `what` is what messages call it: a text, or the tensor as the plan has it.

    Raises:
        ArgumentError: it is no tensor, is not in host memory, or has a dtype or alignment that kernels do not
            take.
    """
    if isinstance(tensor, np.ma.MaskedArray):
        raise ArgumentError(
            what, " is a masked array, and kernels do not support masks: pass tensor.filled(...)"
        )
    if isinstance(tensor, np.ndarray):
        return _view_numpy(tensor, what)
    if is_torch(tensor):
        from fuseplan.tensors.torch_tensors import view_torch

        if not tensor.is_cpu:
            raise ArgumentError(
                what, f" is on {tensor.device}; this target reads host memory: pass a copy on the CPU"
            )
        return Buffer(*view_torch(tensor, what), tensor)
    if hasattr(tensor, "__dlpack__"):
        from fuseplan.tensors.dlpack import view_dlpack

        return Buffer(*view_dlpack(tensor, what), tensor)
    raise ArgumentError(
        what, f" is {a_thing(tensor)}; want a NumPy array, or a tensor that supports DLPack, such as torch's"
    )


def described(tensor: Any, what: object, *, in_place: bool = True) -> Buffer:
    """The tensor as a buffer, wherever it lies: what it looks like is known before where it is needed.

    Raises:
        ArgumentError: it is no tensor, or has a dtype that kernels do not take.
    """
    if is_torch(tensor):
        from fuseplan.tensors.torch_tensors import describe_torch

        return Buffer(*describe_torch(tensor, what), tensor)
    if isinstance(tensor, np.ndarray):
        return view(tensor, what)
    from fuseplan.tensors.dlpack import view_array_interface, view_dlpack

    if hasattr(tensor, "__dlpack__"):
        return Buffer(*view_dlpack(tensor, what, devices=None), tensor)
    if hasattr(tensor, "__cuda_array_interface__"):
        return Buffer(*view_array_interface(tensor, what), tensor)
    return view(tensor, what)


def _view_numpy(array: Array, what: object) -> Buffer:
    dtype = array.dtype
    name = HELD.get(dtype.name)
    if name is None or not dtype.isnative:
        raise ArgumentError(
            what,
            f" has dtype {dtype!s}; want {', '.join(STORED)} (of ml_dtypes where NumPy has none), or bf16 as "
            "uint16 and fp8 as uint8, in this machine's byte order: convert it with .astype(...)",
        )
    if not array.flags.aligned or any(step % dtype.itemsize for step in array.strides):
        raise ArgumentError(what, " is not aligned to its elements: copy it with numpy.copy(...)")
    strides = tuple(step // dtype.itemsize for step in array.strides)
    return Buffer(address_of(array), array.shape, name, strides, not array.flags.writeable, array)


def empty(spec: TensorSpec | Dense | str) -> Array:
    """A new NumPy array with the spec's shape and strides, aligned to 64 bytes, its elements arbitrary.

    Args:
        spec: the description, or its text: `f32[1x64x56x56, nhwc]`.

    Raises:
        PlanError: it is no description of a tensor.
    """
    if not isinstance(spec, TensorSpec | Dense):
        spec = TensorSpec.parse(spec)
    dtype = _numpy_dtype(spec.dtype)
    raw = aligned_bytes(spec.span * spec.itemsize)
    strides = [stride * spec.itemsize for stride in spec.element_strides]
    array: Array = np.ndarray(spec.shape, dtype, raw, 0, strides)
    return array


def _numpy_dtype(name: str) -> np.dtype[Any]:
    row = DTYPES[name]
    package = None if row.numpy == row.package else sys.modules.get("ml_dtypes")
    return np.dtype(getattr(package, row.package, row.array))  # the caller's own, where there is one


# An array's data pointer is the first word behind CPython's object head: NumPy's C interface has promised so
# since its first version. Reading it there takes 0.2 us, `array.ctypes.data` 1.1 us; where the probe fails,
# the latter.
_HEAD = object.__basicsize__


def _data_word(array: Array) -> int:
    return ctypes.c_void_p.from_address(id(array) + _HEAD).value or 0


def _probe() -> bool:
    probes = (np.zeros(3), np.zeros((2, 5), np.float32)[1:], np.zeros(1, np.uint16))
    return all(_data_word(probe) == probe.ctypes.data for probe in probes)


_reads_word = sys.implementation.name == "cpython" and _probe()


def address_of(array: Array) -> int:
    """Where the array's element at index zero lies."""
    return _data_word(array) if _reads_word else int(array.ctypes.data)


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """That many bytes, aligned to 64, arbitrary."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + nbytes]


def lasting_bytes(nbytes: int) -> NDArray[np.uint8]:
    """The same for memory that many calls read: in huge pages, where the system has them.

    With pages of 4 kB, a core of a Xeon reads weights out of memory with 10 GB/s, and with 15 otherwise.
    Small pieces share a region, which is freed with the last of them.
    """
    if nbytes >= REGION // 4:
        return _in_huge_pages(nbytes)
    size = -(-nbytes // ALIGNMENT) * ALIGNMENT
    with _sharing:
        rest = _rest.pop() if _rest and _rest[0].nbytes >= size else _in_huge_pages(REGION)
        _rest[:] = [rest[size:]]
    return rest[:nbytes]


def _in_huge_pages(nbytes: int) -> NDArray[np.uint8]:
    """Memory of its own: pages that were small before, as the heap's may be, stay small."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return aligned_bytes(nbytes)
    pages = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # Linux may be built without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(pages, np.uint8)
    start = -address_of(raw) % HUGE_PAGE
    return raw[start : start + nbytes]


def aligned_copy(array: Array, *, lasts: bool = False) -> Array:
    """The array, contiguous and aligned to 64 bytes."""
    memory = lasting_bytes(array.nbytes) if lasts else aligned_bytes(array.nbytes)
    copied: Array = np.ndarray(array.shape, array.dtype, memory)
    copied[...] = array
    return copied


def overlap(first: Buffer, second: Buffer) -> bool:
    """Whether the two share an element; views too tangled to tell count as sharing."""
    (low, end), (other_low, other_end) = first.bounds, second.bounds
    if end <= other_low or other_end <= low:
        return False
    try:
        return bool(np.shares_memory(first.numpy(), second.numpy(), max_work=WORK))
    except np.exceptions.TooHardError:
        return True


class NumpyForm:
    """What a NumPy array that was accepted looks like: others that look the same need no further check."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, array: Array) -> None:
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides

    def address(self, tensor: Any, writes: bool = False, /) -> int:
        """Where the array begins; 0 if it looks different."""
        if (
            type(tensor) is not np.ndarray
            or tensor.shape != self.shape
            or tensor.strides != self.strides
            or tensor.dtype != self.dtype
        ):
            return 0
        flags = tensor.flags
        if not flags.aligned or (writes and not flags.writeable):
            return 0
        return address_of(tensor)


Form = Union[NumpyForm, "TorchForm"]


def form_of(tensor: Any) -> Form | None:
    """The form of an accepted tensor; None for kinds that are checked anew each time."""
    if type(tensor) is np.ndarray:
        return NumpyForm(tensor)
    if not is_torch(tensor):
        return None
    from fuseplan.tensors.torch_tensors import torch_form

    return torch_form(tensor)


def mark_written(tensor: Any) -> None:
    """Lets autograd notice that a kernel wrote the tensor, if it is torch's."""
    if is_torch(tensor):
        from fuseplan.tensors.torch_tensors import count_write

        count_write(tensor)

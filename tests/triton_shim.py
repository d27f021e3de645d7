"""Triton's interpreter made to compute what a GPU computes, and to see what a GPU would not.

Imported by `triton_server` alone, in a process that has TRITON_INTERPRET=1. What is put right in Triton:

- bf16 is rounded to nearest even and products of it are products (they are of its bit patterns otherwise);
- f8e4m3 is rounded to nearest even and saturates, as by NVIDIA's instructions (it wraps around otherwise);
- `tl.dot` with tf32 inputs drops the bits that the hardware drops;
- loop bounds work with NumPy 2.4 and later;
- `minimum` and `maximum` that are asked to ignore NaN do;
- a tensor map may have steps.

What is added: memory is known, so that touching any other is an error, and so is writing what a kernel only
reads; what a masked load leaves open is NaN, not zero; and programs may run in threads, side by side, and
wait for each other by atomics, which give another thread its turn.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from fuseplan.language.dtypes import narrow, widen

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder
Array = NDArray[Any]

BF16_NAN = np.uint16(0x7FC0)
TF32_BITS = np.uint32(0xFFFFE000)  # sign, exponent, and ten bits of the significand
YIELD_SECONDS = 1e-5  # in which another thread takes the turn
WAITING_SECONDS = 60  # programs that still wait then have missed each other
_place = threading.local()  # which program a thread runs
_deadline = [0.0]
_turn = threading.Lock()  # one thread at a time: Triton's functions are patched while one is interpreted
_areas: list[tuple[int, int, bool]] = []  # first byte, one past the last, whether it may be written


class StrayAccessError(Exception):
    """The kernel touched memory that is not its own."""


@contextmanager
def memory(areas: list[tuple[int, int, bool]]) -> Iterator[None]:
    """These areas are all that may be touched: first byte, one past the last, whether it may be written."""
    _areas[:] = areas
    _deadline[0] = time.monotonic() + WAITING_SECONDS
    try:
        yield
    finally:
        _areas.clear()


@contextmanager
def turn() -> Iterator[None]:
    """This thread runs, and no other, except while `others_turn`."""
    _place.has_turn = True
    with _turn:
        yield
    _place.has_turn = False


@contextmanager
def others_turn() -> Iterator[None]:
    """Others may run meanwhile."""
    if not getattr(_place, "has_turn", False):
        yield
        return
    _turn.release()
    try:
        yield
    finally:
        _turn.acquire()


def stop() -> None:
    """Programs that wait for others fail at their next atomic."""
    _deadline[0] = 0.0


def _check(pointers: Array, mask: Array, itemsize: int, *, writes: bool) -> None:
    used = pointers[np.broadcast_to(mask, pointers.shape)].astype(np.uint64)
    inside = np.zeros(used.shape, bool)
    for low, end, writable in _areas:
        if writable or not writes:
            inside |= (used >= np.uint64(low)) & (used <= np.uint64(max(0, end - itemsize)))
    if not inside.all():
        stray = int(used[~inside][0])
        nearest = min(_areas, key=lambda area: min(abs(stray - area[0]), abs(stray - area[1])))
        verb = "written" if writes else "read"
        raise StrayAccessError(
            f"{np.count_nonzero(~inside)} elements {verb} outside of the kernel's memory; the first at byte "
            f"{stray - nearest[0]} of an area of {nearest[1] - nearest[0]} bytes"
        )


def widened(array: Array) -> Array:
    """Bit patterns of bf16 as float32."""
    wide: Array = (array.astype(np.uint32) << 16).view(np.float32)
    return wide


def rounded(array: Array) -> Array:
    """float32 as bit patterns of bf16, to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    near = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    chosen: Array = np.where(np.isnan(array), BF16_NAN, near)
    return chosen


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        before, after = src.dtype.scalar, dst_type.scalar
        if before == after:
            return Handle(src.data, after)
        if before == tl.bfloat16:
            return original(self, Handle(widened(src.data), tl.float32), dst_type)
        if after == tl.bfloat16:
            return Handle(rounded(src.data.astype(np.float32)), tl.bfloat16)
        return original(self, src, dst_type)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        before, after = src.dtype.scalar, dst_type.scalar
        if before == tl.float8e4nv:
            return Handle(widen(src.data, "f8e4m3").astype(np.float32), tl.float32)
        if after == tl.float8e4nv:
            return Handle(narrow(src.data.astype(np.float64), "f8e4m3"), after)
        return original(self, src, dst_type, rounding_mode)

    return create_fp_to_fp


def _tf32(array: Array) -> Array:
    kept: Array = (np.ascontiguousarray(array, np.float32).view(np.uint32) & TF32_BITS).view(np.float32)
    return kept


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    x, y = (widened(each.data) if each.dtype.scalar == tl.bfloat16 else each.data for each in (a, b))
    kind = d.data.dtype
    name = str(precision).rpartition(".")[2]
    if x.dtype != np.float32 or name == "IEEE":
        total = np.matmul(x, y, dtype=kind)
    elif name == "TF32":
        total = np.matmul(_tf32(x), _tf32(y))
    elif name == "TF32x3":
        (big_x, big_y), (small_x, small_y) = (_tf32(x), _tf32(y)), (_tf32(x - _tf32(x)), _tf32(y - _tf32(y)))
        total = np.matmul(small_x, big_y) + np.matmul(big_x, small_y) + np.matmul(big_x, big_y)
    else:
        raise NotImplementedError(f"tl.dot with input_precision {name} is not interpreted")
    return Handle(total + d.data, d.dtype.scalar)


def _wanted(mask: Any) -> Array:
    """Which elements a mask lets through; a mask made of a scalar condition has numbers."""
    wanted: Array = np.asarray(mask.data).astype(bool, copy=False)
    return wanted


def _masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> Any:
    kind, wanted = ptrs.get_element_ty(), _wanted(mask)
    dtype = interpreter._get_np_dtype(kind)
    _check(ptrs.data, wanted, dtype.itemsize, writes=False)
    if other is None:
        left = BF16_NAN if kind == tl.bfloat16 else np.nan if dtype.kind == "f" else 0x55
        other = Handle(np.full(ptrs.data.shape, left, dtype), kind)
    return Handle(interpreter._interpreter.load(ptrs.data, wanted, other.data, dtype), kind)


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
    dtype, wanted = interpreter._get_np_dtype(ptrs.get_element_ty()), _wanted(mask)
    _check(ptrs.data, wanted, dtype.itemsize, writes=True)
    return interpreter._interpreter.store(ptrs.data, value.data.astype(dtype, copy=False), wanted)


def _atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        _check(ptr.data, _wanted(mask), val.data.dtype.itemsize, writes=True)
        if time.monotonic() > _deadline[0]:
            raise TimeoutError("the programs wait for each other, or another has failed")
        with others_turn():
            time.sleep(YIELD_SECONDS)
        return original(self, op, ptr, val, mask, sem, scope)

    return atomic_rmw


def _materialize(self: Any, offsets: list[Any]) -> tuple[Any, Array]:
    """A box's pointers and which of its elements exist; `steps` apart along each axis."""
    rank = len(self.block_shape)
    itemsize = self.base.dtype.element_ty.primitive_bitwidth // 8
    pointers: Array = np.broadcast_to(self.base.data.astype(np.int64), self.block_shape)
    mask: Array = np.ones(self.block_shape, bool)
    for axis, (extent, step) in enumerate(
        zip(self.block_shape, getattr(self, "steps", (1,) * rank), strict=True)
    ):
        places = int(offsets[axis].data.item()) + step * np.arange(extent, dtype=np.int64)
        places = places.reshape([extent if each == axis else 1 for each in range(rank)])
        pointers = pointers + itemsize * places * int(self.strides[axis].data.item())
        mask = mask & (places >= 0) & (places < int(self.shape[axis].data.item()))
    return Handle(pointers.astype(np.uint64), self.base.dtype.scalar), mask


def _lang_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


@functools.cache
def _shape(extents: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(each) for each in extents]), tl.constexpr(math.prod(extents))


def _tensor(self: Any, handle: Any, kind: Any) -> None:
    """As Triton's, which makes every shape anew: a quarter of the time."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shape(tuple(kind.shape) if kind.is_block() else ())


def _np_dtype(make: Any) -> Callable[[Any], np.dtype[Any]]:
    """Once for a type: `make` makes a table of all types in each call, a seventh of reductions' time."""
    known: Callable[[Any], np.dtype[Any]] = functools.cache(make)

    def found(kind: Any) -> np.dtype[Any]:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else known(element)

    return found


def install() -> None:
    """Puts the interpreter of this process right."""
    Builder.grid_idx = property(
        lambda self: getattr(_place, "indices", None),
        lambda self, indices: setattr(_place, "indices", indices),
    )
    tl.tensor.__init__ = _tensor
    # It computes in 64 bits whether sums and products fit, which debug mode alone asserts: a third of it all.
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    interpreter._get_np_dtype = _np_dtype(interpreter._get_np_dtype)
    Builder.cast_impl = _cast(Builder.cast_impl)
    Builder.create_fp_to_fp = _fp_to_fp(Builder.create_fp_to_fp)
    Builder.create_dot = _dot
    Builder.create_masked_load = _masked_load
    Builder.create_masked_store = _masked_store
    Builder.create_atomic_rmw = _atomic(Builder.create_atomic_rmw)
    Builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    Builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    interpreter.TensorDescHandle.materialize_pointers = _materialize
    interpreter._patch_lang_tensor = _lang_tensor(interpreter._patch_lang_tensor)

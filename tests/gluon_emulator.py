"""Runs the text of a Gluon kernel in NumPy: the copies, barriers and warps of Hopper as threads of Python.

Gluon 3.6 has no interpreter. Here a partition of the warps is a thread, a barrier counts arrivals and bytes
as the hardware's does, a copy moves a box of a tensor map with zeros outside, and a product is of float32.
Where two partitions disagree about a barrier's phase, the wait ends after SECONDS and the test fails. Layouts
mean nothing here: what lies where in shared memory is for the compiler and the device to show.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.kernels.emit import Source, TensorMap
from fuseplan.kernels.packing import Rounded
from fuseplan.language.dtypes import dtype_of

SECONDS = 10.0
NUMBERS = ("parameter", "extent")  # slots that hold no pointer
PACKAGE = "triton.experimental.gluon"
_program = threading.local()
_counting = threading.Lock()


class Barrier:
    """Counts arrivals and bytes of one phase after the other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int = 1, coming: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += coming
            assert self.pending >= 0, "more arrivals than the barrier counts"
            self._turn()

    def complete(self, coming: int) -> None:
        with self.changed:
            self.bytes -= coming
            self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: self.phase != parity, SECONDS)
        assert ended, "a barrier's phase never ended"


class Number(int):
    """A whole number that is given by value."""

    def to(self, dtype: object) -> Number:
        return self


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, place: int) -> Shared:
        return Shared(self.data[int(place)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        view = self.data.reshape(shape)
        assert np.shares_memory(view, self.data)
        return Shared(view)

    def reinterpret(self, dtype: object, shape: Sequence[int], layout: object) -> Shared:
        """What begins where this view does, whatever lies behind it: rows, or blocks of columns."""
        across = self.data.shape[-1]
        if shape[-1] > across:
            blocks = self.reinterpret(dtype, (shape[-1] // across, shape[0], across), layout)
            return Shared(blocks.data.swapaxes(0, 1).reshape(shape))
        strides = [self.data.itemsize * int(np.prod(shape[place + 1 :])) for place in range(len(shape))]
        return Shared(np.lib.stride_tricks.as_strided(self.data, shape, strides))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data[(*[slice(None)] * dim, slice(start, start + length))])

    def load(self, layout: object) -> Tile:
        return np.array(self.data, np.float32).view(Tile)

    def store(self, value: NDArray[Any]) -> None:
        self.data[...] = value


@dataclass
class Pointer:
    """Flat memory and offsets into it."""

    memory: NDArray[Any]
    offset: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def to(self, each: int) -> Pointer:
        """The workspace's words as what lies there: so many elements each."""
        return Pointer(self.memory, self.offset * each)


class Mapped:
    """A tensor map of flat memory."""

    layout = None

    def __init__(self, memory: NDArray[Any], told: TensorMap) -> None:
        self.memory, self.told = memory[told.begin // dtype_of(told.dtype).itemsize :], told
        self.block_type = SimpleNamespace(shape=list(told.box), nbytes=0)
        self.dtype = np.float32

    def box(self, start: Sequence[int]) -> tuple[tuple[slice, ...], NDArray[Any]]:
        """The part of a box that is in the tensor, and that part of the tensor's memory."""
        told, inside, begin, end = self.told, [], 0, 1
        assert start[-1] >= 0  # none of ours begins before the first column
        for first, step, count, extent, stride in zip(
            start, told.steps, told.box, told.shape, told.strides, strict=True
        ):
            low = max(0, -(first // step))
            high = max(low, min(count, -((first - extent) // step)))
            inside.append(slice(low, high))
            begin += (first + step * low) * stride
            end += (high - low - 1) * step * stride
        shape = [each.stop - each.start for each in inside]
        if 0 in shape:
            return tuple(inside), np.empty(shape, self.memory.dtype)
        assert begin + end <= self.memory.size, "a box outside of its operand"
        apart = [
            self.memory.itemsize * step * stride
            for step, stride in zip(told.steps, told.strides, strict=True)
        ]
        return tuple(inside), np.lib.stride_tricks.as_strided(self.memory[begin:], shape, apart)

    def read(self, start: Sequence[int], into: NDArray[Any]) -> None:
        inside, held = self.box(start)
        into[...] = 0
        into[inside] = held

    def write(self, start: Sequence[int], values: NDArray[Any]) -> None:
        inside, held = self.box(start)
        held[...] = values[inside]


def _offsets(pointer: Pointer, mask: Any) -> tuple[Any, Any]:
    offset = np.asarray(pointer.offset)
    held = np.broadcast_to(True if mask is None else mask, np.broadcast_shapes(offset.shape, np.shape(mask)))
    return np.broadcast_to(offset, held.shape), held


def _load(
    pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "", volatile: bool = False
) -> NDArray[Any]:
    if volatile:  # a program that waits for others lets them go on
        time.sleep(0.001)
        assert time.monotonic() < _program.until, "the programs never met"
    offset, held = _offsets(pointer, mask)
    assert (offset[held] < pointer.memory.size).all(), "a load outside of its operand"
    values = np.where(held, pointer.memory[np.where(held, offset, 0)], pointer.memory.dtype.type(other))
    return np.asarray(values).view(Tile)


class Tile(np.ndarray[Any, Any]):
    """An array with the methods of Gluon's tensors that kernels use."""

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        return (self.view(dtype) if bitcast else self.astype(dtype)).view(Tile)

    def permute(self, order: Sequence[int]) -> Tile:
        return self.transpose(order).view(Tile)

    def split(self) -> tuple[Tile, Tile]:
        return self[..., 0].view(Tile), self[..., 1].view(Tile)


def _atomic(pointer: Pointer, value: int, sem: str, scope: str, is_sum: bool = True) -> int:
    """The number that was there."""
    with _counting:
        before = int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] = before * is_sum + value
    return before


def _store(pointer: Pointer, value: Any, mask: Any = None, cache_modifier: str = "") -> None:
    offset, held = _offsets(pointer, mask)
    assert (offset[held] < pointer.memory.size).all(), "a store outside of its result"
    pointer.memory[offset[held]] = np.broadcast_to(value, held.shape)[held]


def _product(a: Shared | Tile, b: Shared, acc: Any, is_async: bool = False, use_acc: Any = True) -> Any:
    first = a.data if isinstance(a, Shared) else a
    x, y = (each.astype(np.float32, copy=False) for each in (first, b.data))
    return ((acc if use_acc else 0) + x @ y).view(Tile)


def _allocate(dtype: Any, shape: Sequence[int], layout: object) -> Shared:
    if dtype is np.int64:
        barriers = np.empty(int(np.prod(shape)), object)
        barriers[:] = [Barrier() for _ in barriers]
        return Shared(barriers)
    return Shared(np.full(shape, np.nan, np.float32))


def _barrier(shared: Shared) -> Barrier:
    found = shared.data if isinstance(shared.data, Barrier) else shared.data.reshape(-1)[0]
    assert isinstance(found, Barrier)
    return found


def _warp_specialize(
    parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any
) -> None:
    """Runs every partition in a thread of its own; the first failure is the test's."""
    failed: list[BaseException] = []
    own = dict(vars(_program))

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        vars(_program).update(own)
        try:
            with np.errstate(all="ignore"):  # as on the device: exp(100), log(0), 0/0
                function(*arguments)
        except BaseException as error:
            failed.append(error)

    _run_all([threading.Thread(target=run, args=part) for part in parts])
    if failed:
        raise failed[0]


def _copy_in(told: Mapped, start: Sequence[int], barrier: Shared, into: Shared) -> None:
    told.read([int(index) for index in start], into.data)
    _barrier(barrier).complete(int(np.prod(told.told.box)) * dtype_of(told.told.dtype).itemsize)


def _language() -> ModuleType:
    """What kernels call `gl`."""
    gl = ModuleType(f"{PACKAGE}.language")
    gl.__dict__.update(
        constexpr=int, int32=np.int32, int64=np.int64, uint32=np.uint32, umulhi=_upper,
        float32=np.float32, float16=np.float32, bfloat16=np.float32,
        program_id=lambda axis: 0 if axis else _program.index, static_range=range, where=_where, load=_load,
        arange=lambda low, high, layout=None: np.arange(low, high).view(Tile),
        zeros=lambda shape, dtype, layout=None: np.zeros(shape, dtype).view(Tile),
        full=lambda shape, value, dtype, layout=None: np.full(shape, value, dtype).view(Tile),
        zeros_like=np.zeros_like, max=np.max, sum=np.sum, store=_store,
        reduce=lambda x, axis, join: functools.reduce(join, np.moveaxis(x, axis, 0)),
        pointer_type=lambda dtype: 2,
        atomic_add=_atomic, atomic_xchg=partial(_atomic, is_sum=False),
        expand_dims=lambda x, axis: np.expand_dims(x, axis).view(Tile),
        exp=np.exp, exp2=np.exp2, sqrt=np.sqrt, rsqrt=lambda x: 1 / np.sqrt(x),
        maximum=lambda x, y, propagate_nan=None: np.asarray(np.maximum(x, y)).view(Tile),
        minimum=lambda x, y, propagate_nan=None: np.asarray(np.minimum(x, y)).view(Tile),
        sqrt_rn=np.sqrt, div_rn=np.divide, abs=np.abs, log=np.log, allocate_shared_memory=_allocate,
        barrier=lambda: None, warp_specialize=_warp_specialize,
        NVMMADistributedLayout=lambda **_: None, SliceLayout=lambda *_: None,
        NVMMASharedLayout=lambda *_: None, DotOperandLayout=lambda *_: None, erf=_erf,
        BlockedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
        convert_layout=lambda value, layout, assert_trivial=False: value,
        inline_asm_elementwise=_instruction, num_programs=lambda axis: 1 if axis else _program.count,
        cast=lambda x, dtype: np.asarray(x).astype(dtype).view(Tile),
    )  # fmt: skip
    return gl


def _instruction(asm: str, constraints: str, values: Sequence[Tile], *_: Any) -> Tile:
    """The instructions that kernels name: rounding to TF32, and the order of stores before copies."""
    if asm.startswith("fence.proxy.async;"):
        return values[0]
    assert asm.startswith("cvt.rna.tf32.f32")
    return Rounded().of(values[0]).view(Tile)


def _upper(x: Tile, y: Any) -> Tile:
    """The upper half of a product of words."""
    upper: Tile = (x.astype(np.uint64) * y >> 32).astype(np.uint32).view(Tile)
    return upper


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.float32])(x).view(Tile)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(condition, bool | np.bool_):
        return yes if condition else no
    return np.where(condition, yes, no).view(Tile)


def _hopper() -> ModuleType:
    hopper = ModuleType(f"{PACKAGE}.language.nvidia.hopper")
    hopper.__dict__.update(
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: _barrier(barrier).init(count),
            expect=lambda barrier, coming: _barrier(barrier).arrive(coming=coming),
            arrive=lambda barrier, pred=True: _barrier(barrier).arrive() if pred else None,
            wait=lambda barrier, phase: _barrier(barrier).wait(int(phase)),
        ),
        tma=SimpleNamespace(
            async_load=_copy_in,
            async_store=lambda told, start, tile: told.write([int(i) for i in start], tile.data),
            store_wait=lambda pendings: None,
        ),
        warpgroup_mma=_product,
        warpgroup_mma_wait=lambda pending, deps: deps if len(deps) > 1 else deps[0],
    )
    return hopper


@contextmanager
def _gluon() -> Iterator[None]:
    """The emulation stands where Gluon would be imported from."""
    gluon, language = ModuleType(PACKAGE), _language()
    gluon.__dict__.update(jit=lambda function: function, language=language)
    plain = ModuleType("triton.language")
    plain.__dict__.update(
        PropagateNan=SimpleNamespace(ALL="all"), int64=np.int64, pointer_type=lambda dtype: 2
    )
    names = {
        "triton": ModuleType("triton"),
        "triton.language": plain,
        "triton.experimental": ModuleType("triton.experimental"),
        PACKAGE: gluon,
        f"{PACKAGE}.language": language,
        f"{PACKAGE}.language.nvidia": ModuleType(f"{PACKAGE}.language.nvidia"),
        f"{PACKAGE}.language.nvidia.hopper": _hopper(),
    }
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def run(source: Source, memories: Sequence[Any]) -> None:
    """Runs a kernel on flat arrays, and numbers for parameters by value, in the order of its slots."""
    assert source.language == "gluon"
    space: dict[str, Any] = {"__name__": "emulated"}
    with _gluon():
        exec(compile(source.text, "<emulated>", "exec"), space)
    arguments = [
        Mapped(memory, slot.map) if slot.map else memory if slot.kind in NUMBERS else Pointer(memory)
        for slot, memory in zip(source.slots, memories, strict=True)
    ]
    failed: list[BaseException] = []

    def program(index: int) -> None:
        vars(_program).update(index=index, count=source.grid[0], until=time.monotonic() + SECONDS)
        try:
            space[source.entry](*arguments)
        except BaseException as error:
            failed.append(error)

    programs = [threading.Thread(target=program, args=(index,)) for index in range(source.grid[0])]
    together = len(programs) if dict(source.options).get("cooperative") else 1
    for first in range(0, len(programs), together):
        _run_all(programs[first : first + together])
    if failed:
        raise failed[0]


def _run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

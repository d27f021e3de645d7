"""Operands that each call packs: the copies of one call, in memory that later calls have again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.backends.backend import Copier, Packer
from fuseplan.language.dtypes import dtype_of, widen
from fuseplan.tensors.arrays import ALIGNMENT, Buffer, address_of, aligned_bytes, aligned_copy

if TYPE_CHECKING:
    from fuseplan.kernels.packing import Packing

MOST_NUMBERED = 1 << 17  # elements of an operand
MOST_KEPT = 16 << 20  # bytes of memory that later calls have: larger memory is given back


class Room:
    """Memory that a call packs an operand into; when the call is done, later calls have it.

    Its pages are there, and in a near cache: to have 128 KB of the system and to give them back takes 20 us.
    """

    __slots__ = ("_free", "_memory", "address")

    def __init__(self, nbytes: int) -> None:
        size = 1 << max(nbytes - 1, 0).bit_length() if nbytes <= MOST_KEPT else nbytes
        self._free = _rooms.setdefault(size, [])
        try:
            self._memory = self._free.pop()  # atomic, so that no two calls get the same
        except IndexError:
            self._memory = aligned_bytes(size)
        self.address = address_of(self._memory)

    def __del__(self) -> None:
        if self._memory.nbytes <= MOST_KEPT:
            self._free.append(self._memory)


_rooms: dict[int, list[NDArray[Any]]] = {}  # that no call has, by their bytes


def packer(packing: Packing, buffer: Buffer, copier: Copier) -> Packer:
    """Packs as `packed` does; steps that only name elements in another order are taken here, once.

    So are those that move few elements: 43 tiles of 6 features, of which the last begins early, stack
    in 81 us, and their 16,384 elements are taken by numbers in 18.
    """
    array, dtype = buffer.numpy(), buffer.dtype  # the buffer would keep the tensor alive
    made = arranged(packing, dtype, array)
    is_view = made.size == array.size and address_of(made) == buffer.address
    stays = is_view and made.flags.c_contiguous
    steps = tuple(step // made.itemsize for step in made.strides)
    read = (replace(buffer, shape=made.shape, strides=steps) if is_view else buffer).reader()
    copy = copier(made.shape, steps, made.itemsize) if is_view else _taking(packing, buffer, made.size)
    nbytes = made.nbytes

    def pack(_: Any, address: int) -> tuple[int, object]:
        if stays and address % ALIGNMENT == 0:
            return address, None
        if copy:
            room = Room(nbytes)
            copy(room.address, address)
            return room.address, room
        values = read(address)
        if not is_view:
            values = arranged(packing, dtype, values)
        if is_view or address_of(values) % ALIGNMENT or not values.flags.c_contiguous:
            values = aligned_copy(values)
        return address_of(values), values

    return pack


def _taking(packing: Packing, buffer: Buffer, size: int) -> Callable[[int, int], None] | None:
    """A function that copies elements one by one to their places in the packed array; the others are 0."""
    (low, end), itemsize = buffer.bounds, dtype_of(buffer.dtype).array.itemsize
    ahead, span = (buffer.address - low) // itemsize, (end - low) // itemsize
    if packing.dtype != buffer.dtype or not packing.only_moves or max(size, span) > MOST_NUMBERED:
        return None
    steps = tuple(8 * stride for stride in buffer.strides)
    numbers: NDArray[Any] = np.ndarray(buffer.shape, np.int64, np.arange(1, span + 1), 8 * ahead, steps)
    places = np.ascontiguousarray(packing.of(numbers)).reshape(-1) - 1
    zeros, flat = np.flatnonzero(places < 0), replace(buffer, address=low, shape=(span,), strides=(1,))
    read, write = flat.reader(), replace(flat, shape=(size,)).reader()

    def copy(to: int, begin: int) -> None:
        made = write(to)
        read(begin - ahead * itemsize).take(places, out=made, mode="clip")
        made[zeros] = 0

    return copy


def arranged(packing: Packing, dtype: str, array: NDArray[Any]) -> NDArray[Any]:
    """An operand's elements in the order of its packing: a view, with any strides, where that is one."""
    if packing.dtype == dtype:
        return packing.of(array)
    return packing.of(widen(array, dtype).astype(dtype_of(packing.dtype).array, copy=False))

"""Memory that ends where a tensor ends, so that touching more is a fault and not a silent success."""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan.backends.cpu import toolchain
from fuseplan.language.dtypes import dtype_of
from fuseplan.language.tensor import TensorSpec


@pytest.fixture(autouse=True, scope="module")
def _compiled_once() -> Iterator[None]:
    """LLVM makes the same code of a text each time: of 414 seconds it took 31 for texts that it had met."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "compile_object", cache(toolchain.compile_object))
        yield


Guarded = Callable[[TensorSpec], NDArray[Any]]


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    """Makes tensors that end where a page ends, before one that may not be touched."""
    libc = ctypes.CDLL(None)
    kept: list[tuple[mmap.mmap, int]] = []

    def made(spec: TensorSpec) -> NDArray[Any]:
        page, size = mmap.PAGESIZE, spec.span * spec.itemsize
        room = -(-size // page) * page
        area = mmap.mmap(-1, room + page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        assert libc.mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) == 0
        kept.append((area, address + room))
        flat = np.frombuffer(area, dtype_of(spec.dtype).array, spec.span, offset=room - size)
        steps = [step * spec.itemsize for step in spec.element_strides]
        return np.lib.stride_tricks.as_strided(flat, spec.shape, steps)

    yield made
    for _, wall in kept:
        libc.mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), 3)

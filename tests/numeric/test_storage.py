"""Reads and writes of part of a vector: every dtype, width and count, run on this processor."""

import ctypes
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fuseplan.arrays import narrow, widen
from fuseplan.backends.cpu import storage, toolchain
from fuseplan.backends.cpu.ir import Builder
from fuseplan.backends.cpu.ir_text import PTR, Module

UNTOUCHED = 77
NUMPY = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def incremented(dtype: str, lanes: int, count: int, src: NDArray[Any], dst: NDArray[Any]) -> None:
    """dst[:count] = src[:count] + 1, by one vector."""
    module = Module()
    b = Builder(module, "f", [(PTR, "src"), (PTR, "dst")], element=storage.COMPUTED[dtype], lanes=lanes)
    x = storage.read(b, dtype, b.parameters[0], lanes, count=count)
    storage.write(b, dtype, x + b.number(1.0), b.parameters[1], count=count)
    b.finish()
    address = toolchain.load_object(toolchain.compile_object(module.text()), ("f",))["f"]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)(src.ctypes.data, dst.ctypes.data)


@pytest.mark.parametrize("dtype", list(NUMPY))
@pytest.mark.parametrize(
    ("lanes", "count"), [(lanes, count) for lanes in (2, 4, 8, 16) for count in range(1, lanes + 1)]
)
def test_a_part_of_a_vector_is_read_and_written_and_nothing_else(dtype: str, lanes: int, count: int) -> None:
    src = narrow(np.arange(1.0, 33.0), dtype).astype(NUMPY[dtype])
    dst = np.full(32, UNTOUCHED, NUMPY[dtype])
    incremented(dtype, lanes, count, src, dst)
    np.testing.assert_array_equal(widen(dst[:count], dtype), np.arange(2.0, 2.0 + count))
    assert (dst[count:] == UNTOUCHED).all()

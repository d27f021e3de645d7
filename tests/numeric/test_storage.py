"""The CPU's storage of every dtype, run on this processor: parts of vectors, all codes, and rounding."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from every_number import every_code, floats
from fuseplan.backends.cpu import storage, toolchain
from fuseplan.backends.cpu.ir import Builder, Value
from fuseplan.backends.cpu.ir_text import PTR, Module
from fuseplan.language.dtypes import DTYPES, dtype_of, narrow, widen

Array = NDArray[Any]

UNTOUCHED = 6.0
COMPUTE = [("f32", "float"), ("f64", "double")]


def run(
    write: Callable[[Builder, Value, Value], None], element: str, lanes: int, src: Array, dst: Array
) -> None:
    """Calls a function of src and dst whose body `write` writes."""
    module = Module()
    b = Builder(module, "f", [(PTR, "src"), (PTR, "dst")], element=element, lanes=lanes)
    write(b, *b.parameters)
    b.finish()
    address = toolchain.load_object(toolchain.compile_object(module.text()), ("f",))["f"]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)(src.ctypes.data, dst.ctypes.data)


def incremented(dtype: str, lanes: int, count: int, src: Array, dst: Array) -> None:
    """dst[:count] = src[:count] + 1, by one vector."""

    def write(b: Builder, first: Value, second: Value) -> None:
        x = storage.read(b, dtype, first, lanes, count=count)
        storage.write(b, dtype, x + b.number(1.0), second, count=count)

    run(write, storage.COMPUTED[dtype_of(dtype).compute], lanes, src, dst)


def converted(x: Array, before: str, after: str, element: str, lanes: int = 8) -> Array:
    """Elements of one dtype as another one's, through the compute type."""
    whole = x.size // lanes * lanes
    dst = np.zeros(whole, dtype_of(after).array)

    def write(b: Builder, first: Value, second: Value) -> None:
        with b.loop(0, whole, lanes) as at:
            here = b.at(first, at, storage.element_type(before))
            there = b.at(second, at, storage.element_type(after))
            storage.write(b, after, storage.read(b, before, here, lanes), there)

    run(write, element, lanes, x, dst)
    return dst


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_a_part_of_a_vector_is_read_and_written_and_nothing_else(dtype: str, lanes: int) -> None:
    values = np.arange(32.0) % 7
    for count in range(1, lanes + 1):
        src, dst = narrow(values, dtype), narrow(np.full(32, UNTOUCHED), dtype)
        incremented(dtype, lanes, count, src, dst)
        want = narrow(values[:count] + 1, dtype)
        np.testing.assert_array_equal(dst[:count], want)
        np.testing.assert_array_equal(dst[count:], narrow(np.full(32 - count, UNTOUCHED), dtype))


@pytest.mark.parametrize(("compute", "element"), COMPUTE)
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "f64"])
def test_every_element_is_widened_and_every_number_rounded_as_numpy_does(
    dtype: str, compute: str, element: str
) -> None:
    row = dtype_of(dtype)
    codes = every_code(row)
    with np.errstate(invalid="ignore"):  # of NaN that signal
        want = widen(codes, dtype).astype(dtype_of(compute).array)
        np.testing.assert_array_equal(converted(codes, dtype, compute, element), want[: codes.size // 8 * 8])
    with np.errstate(over="ignore"):
        x = floats(row).astype(dtype_of(compute).array)
    got = widen(converted(x, compute, dtype, element), dtype)
    np.testing.assert_array_equal(got, widen(narrow(x.astype(np.float64), dtype), dtype)[: got.size])

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fuseplan.errors import ArgumentError
from fuseplan.language.dtypes import narrow, widen
from fuseplan.language.tensor import TensorSpec
from fuseplan.tensors.arrays import (
    ALIGNMENT,
    REGION,
    address_of,
    aligned_copy,
    empty,
    form_of,
    lasting_bytes,
    overlap,
    view,
)
from fuseplan.tensors.dlpack import _Tensor, _Versioned

NHWC = TensorSpec((2, 3, 4, 5), "f32", "nhwc")


def test_a_numpy_array_is_seen_where_it_lies() -> None:
    array = np.zeros((2, 4, 5, 3), np.float32).transpose(0, 3, 1, 2)
    seen = view(array, "`src`")
    assert seen.address == array.ctypes.data
    assert seen.matches(NHWC)
    assert not seen.matches(TensorSpec((2, 3, 4, 5)))
    assert seen.owner is array
    assert not seen.readonly
    assert seen.text == "f32[2x3x4x5, nhwc]"


def test_a_read_only_array_says_so() -> None:
    array = np.zeros((2, 3))
    array.flags.writeable = False
    assert view(array, "x").readonly


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float64, "f64"), (torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")],
)
def test_a_torch_tensor_is_seen_where_it_lies(dtype: torch.dtype, name: str) -> None:
    tensor = torch.zeros((2, 3, 4, 5), dtype=dtype).to(memory_format=torch.channels_last)[:, 1:]
    seen = view(tensor, "`src`")
    assert seen.address == tensor.data_ptr()
    assert seen.dtype == name
    assert seen.shape == (2, 2, 4, 5)
    assert seen.strides == tensor.stride()
    seen.numpy()[0, 0, 0, 0] = 1
    assert tensor[0, 0, 0, 0] != 0, "not the same memory"


class OldExporter:
    """DLPack as it was before 1.0: `__dlpack__` takes no version."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self) -> object:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class ArrayImpl(OldExporter):
    """As JAX's arrays are: their capsules do not say that nothing may write them."""

    __module__ = "jaxlib._jax"


class OnDevice(OldExporter):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class NoCapsule(OldExporter):
    def __dlpack__(self) -> object:
        return object()


class Forged:
    """A versioned capsule whose fields are the test's; right but for those."""

    def __init__(self, **changes: Any) -> None:
        self.elements = (ctypes.c_float * 6)(*range(6))
        shape = (ctypes.c_int64 * 2)(2, 3)
        told = {"data": ctypes.addressof(self.elements), "ndim": 2, "shape": shape, "flags": 0} | changes
        tensor = _Tensor(told["data"], 1, 0, told["ndim"], 2, 32, 1, told["shape"], None, 0)
        self.versioned = _Versioned(1, 0, None, None, told["flags"], tensor)

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return make(ctypes.addressof(self.versioned), b"dltensor_versioned", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class Tracer:
    """As JAX's tracers are: it has the methods, and no numbers."""

    __module__ = "jax._src.core"

    def __dlpack__(self) -> object:
        raise AssertionError("a tracer holds nothing")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise AssertionError("a tracer lies nowhere")


class Raising(OldExporter):
    """Raises what the test wants, from the method that it names."""

    def __init__(self, error: Exception, method: str) -> None:
        super().__init__(np.zeros(3))
        self.error, self.method = error, method

    def __dlpack__(self, **_: object) -> object:
        if self.method == "__dlpack__":
            raise self.error
        return super().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.method == "__dlpack_device__":
            raise self.error
        return (1, 0)


def test_an_immutable_array_is_read_only() -> None:
    assert view(ArrayImpl(np.zeros((2, 3))), "x").readonly
    assert not view(OldExporter(np.zeros((2, 3))), "x").readonly


@pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
@pytest.mark.parametrize("kind", [ValueError, BufferError, KeyError, TypeError, AssertionError, OSError])
def test_an_exporters_own_error_is_the_cause_of_ours(kind: type[Exception], method: str) -> None:
    error = kind("not today")
    with pytest.raises(ArgumentError, match=f"{kind.__name__}: .*not today") as refused:
        view(Raising(error, method), "`src`")
    assert refused.value.__cause__ is error


def test_a_forged_capsule_is_right_but_for_what_a_test_changes() -> None:
    whole = Forged()
    np.testing.assert_array_equal(view(whole, "x").numpy(), np.arange(6.0).reshape(2, 3))
    assert view(Forged(data=None, shape=(ctypes.c_int64 * 2)(0, 3)), "x").shape == (0, 3)


def test_an_old_exporter_is_taken() -> None:
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    seen = view(OldExporter(array), "x")
    assert (seen.address, seen.shape, seen.strides) == (array.ctypes.data, (2, 2), (3, 2))


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy exports no read-only array before 2.1"
)
def test_read_only_numpy_through_dlpack_stays_read_only() -> None:
    class Versioned(OldExporter):
        def __dlpack__(self, *, max_version: tuple[int, int] | None = None) -> object:
            return self.array.__dlpack__(max_version=max_version)

    array = np.zeros(3)
    array.flags.writeable = False
    assert view(Versioned(array), "x").readonly


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ([1.0, 2.0], "`src` is a list; want a NumPy array"),
        (np.zeros(3, np.uint32), "`src` has dtype uint32"),
        (np.zeros(3, np.complex64), "dtype complex64"),
        (np.zeros(3, ">f4"), "this machine's byte order"),
        (np.zeros(3, object), "dtype object"),
        (np.zeros(13, np.uint8)[1:].view(np.float32), "not aligned"),
        (np.zeros(3, np.dtype([("a", "f4"), ("b", "i1")]))["a"], "not aligned"),
        (torch.zeros(3, dtype=torch.uint32), "dtype torch.uint32; want float64"),
        (OldExporter(np.zeros(3, np.uint32)), "DLPack code 1, 32 bits"),
        (torch.zeros(3, requires_grad=True), "detach"),
        (OnDevice(np.zeros(3)), "`src` is in CUDA memory"),
        (NoCapsule(np.zeros(3)), "no DLPack capsule"),
        (Forged(data=None), "DLPack exports it with a null pointer"),
        (Forged(shape=None), "with 2 axes and without a shape"),
        (Forged(ndim=-1), "with -1 axes"),
        (Forged(flags=2), "is exported by DLPack as a copy"),
        (Tracer(), "`src` is a Tracer, a placeholder without numbers: jax.jit"),
        (torch.fx.Proxy(torch.fx.Node(torch.fx.Graph(), "x", "placeholder", "x", (), {})), "torch.fx"),
        (None, "`src` is a NoneType"),
        (np.ma.MaskedArray(np.zeros(3), [True, False, True]), "kernels do not support masks"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_tensor_of_ours_is_refused_by_name(tensor: object, says: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        view(tensor, "`src`")
    assert says in str(refused.value)


def test_a_copy_of_what_is_not_aligned_is_taken() -> None:
    crooked = np.ndarray((2, 3), np.float32, bytearray(25), 1)
    with pytest.raises(ArgumentError, match=r"numpy\.copy\(\.\.\.\)"):
        view(crooked, "src")
    assert view(np.copy(crooked), "src").dtype == "f32"


def test_bf16_is_ml_dtypes_or_bits() -> None:
    plain = np.zeros((2, 3), ml_dtypes.bfloat16)
    assert view(plain, "x").dtype == view(plain.view(np.uint16), "x").dtype == "bf16"


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_new_array_is_the_specs_and_aligned(dtype: str, layout: str) -> None:
    spec = TensorSpec((2, 3, 5, 7), dtype, layout)
    array = empty(spec)
    assert array.ctypes.data % 64 == 0
    assert view(array, "x").matches(spec)
    array[...] = 1  # all of it is ours
    assert view(empty(str(spec)), "x").matches(spec)


def test_a_new_array_may_have_gaps() -> None:
    spec = TensorSpec((2, 3), "f32", strides=(8, 2))
    assert view(empty(spec), "x").matches(spec)


def test_an_aligned_copy_is_aligned() -> None:
    for size in (1, 3, 64, 1000):
        source = np.arange(2.0 * size)[::2]
        copied = aligned_copy(source)
        assert copied.ctypes.data % 64 == 0
        np.testing.assert_array_equal(copied, source)


def test_what_lasts_shares_regions_and_no_bytes() -> None:
    sizes = (1, 65, REGION // 8, REGION // 4 - 1, REGION // 4, 3, *[REGION // 5] * 6)
    pieces = [lasting_bytes(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece[...] = number
    for number, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        assert piece.ctypes.data % ALIGNMENT == 0
        assert piece.nbytes == size
        assert (piece == number).all()


@pytest.mark.parametrize("told", [OSError, None])
def test_a_system_may_have_no_huge_pages(told: type[OSError] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if told is None:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)  # no advice of Linux's
    piece = lasting_bytes(REGION)
    piece[...] = 1
    assert piece.nbytes == REGION


def test_an_address_is_numpys_own() -> None:
    for array in (np.zeros((3, 4))[1:, 2:], np.zeros(5)[::-1], np.zeros((), np.float32)):
        assert address_of(array) == array.ctypes.data


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (np.s_[0:4], np.s_[4:8], False),
        (np.s_[0:5], np.s_[4:8], True),
        (np.s_[0::2], np.s_[1::2], False),
        (np.s_[0::2], np.s_[0::3], True),
        (np.s_[3::-1], np.s_[4:], False),
        (np.s_[4::-1], np.s_[4:], True),
    ],
)
def test_overlap_is_of_elements(first: slice, second: slice, shared: bool) -> None:
    memory = np.zeros(8, np.float32)
    assert overlap(view(memory[first], "a"), view(memory[second], "b")) is shared
    assert overlap(view(memory[second], "b"), view(memory[first], "a")) is shared


def test_channel_slices_of_one_buffer_do_not_overlap() -> None:
    whole = np.zeros((1, 8, 8, 16), np.float32).transpose(0, 3, 1, 2)
    assert not overlap(view(whole[:, :8], "a"), view(whole[:, 8:], "b"))
    assert overlap(view(whole[:, :9], "a"), view(whole[:, 8:], "b"))


def test_bf16_is_rounded_once_to_nearest_even() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [
            rng.standard_normal(20000) * np.exp(rng.uniform(-80, 80, 20000)),
            [0.0, -0.0, math.inf, -math.inf, 1e39, -1e39, 3.4e38, 1e-45, 1 + 2**-8, 1 + 2**-8 + 2**-40],
            # To float32 first this is a tie, which then rounds the wrong way.
            [1 + 2**-8 + 2**-30, 1 + 3 * 2**-8 - 2**-30],
        ]
    )
    with np.errstate(over="ignore"):
        got = narrow(values, "bf16").view(ml_dtypes.bfloat16).astype(np.float64)
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(values), 2.0**-126))) - 7)
    fits = np.abs(values) < 3.38e38
    exact = np.round(values[fits] / step[fits]) * step[fits]  # NumPy rounds halves to even
    np.testing.assert_array_equal(got[fits], exact)
    assert np.isinf(got[~fits]).sum() >= 4
    assert np.isnan(widen(narrow(np.array([math.nan, -math.nan]), "bf16"), "bf16")).all()


def test_widening_is_exact() -> None:
    bits = np.arange(0, 2**16, dtype=np.uint32).astype(np.uint16)
    np.testing.assert_array_equal(widen(bits, "bf16"), bits.view(ml_dtypes.bfloat16).astype(np.float32))
    halves = bits.view(np.float16)
    np.testing.assert_array_equal(widen(halves, "f16"), halves.astype(np.float32))


def test_a_form_knows_its_like() -> None:
    array = np.zeros((2, 3, 4), np.float32)
    form = form_of(array)
    assert form is not None
    other = np.ones_like(array)
    assert form.address(other) == other.ctypes.data
    locked = array.copy()
    locked.flags.writeable = False
    assert form.address(locked)
    assert not form.address(locked, True)
    misaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(array.shape)
    for unlike in (array.T, array.astype(np.float64), array[:1], misaligned, torch.zeros(2, 3, 4), [1.0]):
        assert not form.address(unlike)

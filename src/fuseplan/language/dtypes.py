"""How elements are stored: the one table of dtypes, and each of them in NumPy's arrays.

Arithmetic is in a compute dtype, f64 or f32; stored elements are widened to it exactly, and results are
rounded to the storage once, to nearest even. NumPy has no bf16 and no fp8: there, elements are held as bits,
or in the caller's ml_dtypes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuseplan.errors import PlanError, near_miss
from fuseplan.messages.elsewhere import answers
from fuseplan.messages.excerpt import shown

_FLOAT, _BFLOAT, _INT, _UINT, _BOOL, _E4M3FN, _E5M2 = 2, 4, 0, 1, 6, 10, 12  # DLPack's DLDataTypeCode


@dataclass(frozen=True)
class DType:
    """How an element is stored, and other packages' names of that.

    Attributes:
        name: in a plan's text.
        epsilon: distance from 1 to the next number.
        largest: the largest finite number.
        package: the name in torch, JAX and ml_dtypes, and in NumPy where it has the dtype.
        numpy: NumPy's dtype of an array that holds the elements, or their bits.
        onnx: its number in ONNX's TensorProto.DataType.
        dlpack: DLPack's type code; the bits are those of `itemsize`.
        c: the type of an element in a C header.
        llvm: LLVM's type of an element in memory.
        triton: Triton's type of an element in memory.
    """

    name: str
    itemsize: int
    epsilon: float
    largest: float
    package: str
    numpy: str
    onnx: int
    dlpack: int
    c: str
    llvm: str
    triton: str

    @property
    def is_float(self) -> bool:
        """Operators compute with its elements; integers and bool are only stored and converted."""
        return self.dlpack not in (_INT, _UINT, _BOOL)

    @property
    def least(self) -> float:
        """The least finite number."""
        return 0.0 if self.dlpack in (_UINT, _BOOL) else -self.largest - (self.dlpack == _INT)

    @property
    def is_narrow(self) -> bool:
        """Results are rounded to so few bits that approximate functions are as good as exact ones."""
        return self.is_float and self.itemsize <= 2

    @property
    def compute(self) -> str:
        """The dtype of computation and accumulators."""
        return "f64" if self.name == "f64" else "f32"

    @property
    def array(self) -> np.dtype[Any]:
        """NumPy's dtype of the elements or of their bits."""
        return np.dtype(self.numpy)


# fmt: off
_ROWS = (
    DType("f64", 8, 2.0**-52, sys.float_info.max,
          "float64", "float64", 11, _FLOAT, "double", "double", "fp64"),
    DType("f32", 4, 2.0**-23, (2 - 2.0**-23) * 2.0**127,
          "float32", "float32", 1, _FLOAT, "float", "float", "fp32"),
    DType("f16", 2, 2.0**-10, 65504.0,
          "float16", "float16", 10, _FLOAT, "uint16_t", "half", "fp16"),
    DType("bf16", 2, 2.0**-7, (2 - 2.0**-7) * 2.0**127,
          "bfloat16", "uint16", 16, _BFLOAT, "uint16_t", "i16", "bf16"),
    DType("f8e4m3", 1, 2.0**-3, 448.0,
          "float8_e4m3fn", "uint8", 17, _E4M3FN, "uint8_t", "i8", "u8"),
    DType("f8e5m2", 1, 2.0**-2, 57344.0,
          "float8_e5m2", "uint8", 19, _E5M2, "uint8_t", "i8", "u8"),
    DType("i8", 1, 1.0, 2.0**7 - 1, "int8", "int8", 3, _INT, "int8_t", "i8", "i8"),
    DType("u8", 1, 1.0, 2.0**8 - 1, "uint8", "uint8", 2, _UINT, "uint8_t", "i8", "u8"),
    DType("i16", 2, 1.0, 2.0**15 - 1, "int16", "int16", 5, _INT, "int16_t", "i16", "i16"),
    DType("i32", 4, 1.0, 2.0**31 - 1, "int32", "int32", 6, _INT, "int32_t", "i32", "i32"),
    DType("i64", 8, 1.0, 2**63 - 1, "int64", "int64", 7, _INT, "int64_t", "i64", "i64"),
    DType("bool", 1, 1.0, 1.0, "bool", "bool", 9, _BOOL, "uint8_t", "i8", "i8"),
)
# fmt: on
DTYPES = {each.name: each for each in _ROWS}


class Fp8(NamedTuple):
    """How a float is rounded to the bits of an fp8: numbers for the bits of its size.

    Attributes:
        cut: bits of a float's fraction that are cut off.
        rounder: added with the lowest bit that stays; it changes the bias of the exponent and rounds.
        normal: the bits of the smallest number that is no denormal.
        denormal: the bits of a float in whose lowest places a denormal's bits lie.
        top: the code of all numbers that are too large: infinity, or the largest number.
        nan: a code of NaN.
    """

    cut: int
    rounder: int
    normal: int
    denormal: int
    top: int
    nan: int = 0x7F

    @property
    def unit(self) -> float:
        """The float whose bits `denormal` are."""
        return float(np.int32(self.denormal).view(np.float32))


def _fp8(fraction: int, top: int) -> Fp8:
    cut, less = 23 - fraction, 127 - ((1 << (6 - fraction)) - 1)
    return Fp8(cut, (1 << (cut - 1)) - 1 - (less << 23), (less + 1) << 23, (less + 1 + cut) << 23, top)


FP8 = {"f8e4m3": _fp8(3, 0x7E), "f8e5m2": _fp8(2, 0x7C)}
CONVERTED = tuple(name for name in DTYPES if name != "i64")  # which has indices alone
FACTORS = tuple(each.name for each in _ROWS if each.is_float and each.itemsize > 1)  # of products, everywhere
STORED = {each.package: each.name for each in DTYPES.values()}
HELD = {each.numpy: each.name for each in reversed(_ROWS)} | STORED  # by the name of NumPy's dtype


def dtype_of(name: str) -> DType:
    """The dtype of that name; a PlanError where there is none."""
    if not isinstance(name, str) or name not in DTYPES:
        remedy = near_miss(str(name), DTYPES, answers("dtypes"))
        raise PlanError(f"there is no dtype {shown(name)}", want=" ".join(DTYPES), remedy=remedy)
    return DTYPES[name]


def dtype_name(dtype: object, *, stored: bool = False) -> str:
    """The word for a dtype, which may be NumPy's, torch's, JAX's or ml_dtypes'; texts are left as they are.

    Args:
        dtype: such as `np.float32`, `np.dtype("float32")`, `torch.float32`, `jnp.float32`.
        stored: it is an array's: uint16 holds the bit patterns of bf16 there.

    Raises:
        PlanError: it is a dtype that no plan has, or none at all.
    """
    if isinstance(dtype, str):
        return dtype
    name, known = _name(dtype), HELD if stored else STORED
    if name not in known:
        raise PlanError(f"there is no dtype {shown(dtype)}", want=" ".join(DTYPES))
    return known[name]


def _name(dtype: object) -> str:
    """`float32`, as the package of a dtype writes it; empty for other things."""
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    found: Any = getattr(dtype, "dtype", dtype)  # jnp.float32 has a `dtype`
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        found = np.dtype(dtype)
    return found.name if isinstance(found, np.dtype) and found.isnative else ""


def widen(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Elements as NumPy holds them (bf16 and fp8 as their bits) in f32, those of f64 and integers in f64."""
    if dtype == "bf16":
        widened: NDArray[Any] = (array.astype(np.uint32) << 16).view(np.float32)
        return widened
    if dtype in FP8:
        return np.take(_numbers(dtype), array)
    return array.astype(np.float32 if dtype in ("f32", "f16") else np.float64, copy=False)


@cache
def _numbers(dtype: str) -> NDArray[np.float32]:
    """The numbers of all codes of an fp8: the upper bits of halves, with a bit of exponent less in e4m3."""
    code = np.arange(256, dtype=np.uint16)
    is_short = dtype == "f8e4m3"
    halves = code << 8 if not is_short else (code & 0x80) << 8 | (code & 0x7F) << 7
    with np.errstate(invalid="ignore"):  # of NaN that signal
        wide = halves.view(np.float16).astype(np.float32) * np.float32(256 if is_short else 1)
    return np.where(code & 0x7F > FP8[dtype].top, np.float32(np.nan), wide)


def narrow(array: NDArray[np.float64], dtype: str) -> NDArray[Any]:
    """Float64 numbers as NumPy holds elements of `dtype`, rounded once, as a kernel stores its results.

    Floating-point dtypes round to nearest even. A number too large for them becomes infinite; f8e4m3 has no
    infinity and saturates, as in PyTorch. Integers drop the fraction and saturate, and NaN becomes 0. bool is
    True where the number is not 0.
    """
    row = dtype_of(dtype)
    if dtype == "bool":
        return np.not_equal(array, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        if not row.is_float:
            return np.clip(np.nan_to_num(array), row.least, row.largest).astype(row.array)
        if row.array.kind == "f":
            return array.astype(row.array)
        if dtype == "bf16":
            return (_nearest(array, 7, -133).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "f8e5m2":
            return (_nearest(array, 2, -16).astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
        near = np.clip(_nearest(array, 3, -9), -row.largest, row.largest)
        bits = (near / 256).astype(np.float16).view(np.uint16)
    code = np.where(np.isnan(near), 0x7F, bits >> 7 & 0x7F)
    return (bits >> 8 & 0x80 | code).astype(np.uint8)


def _nearest(array: NDArray[np.float64], fraction: int, lowest: int) -> NDArray[np.float64]:
    """The nearest numbers with so many bits behind the first, none of them below 2**lowest; to even."""
    _, exponent = np.frexp(array)
    unit = np.ldexp(1.0, np.maximum(exponent - 1 - fraction, lowest))
    nearest: NDArray[np.float64] = np.rint(array / unit) * unit
    return nearest


def strides_of(tensor: Any, itemsize: int) -> tuple[int, ...] | None:
    """The strides of an array in elements; None where it tells none, which makes it dense.

    Raises:
        PlanError: they are no multiples of an element.
    """
    if callable(getattr(tensor, "stride", None)):  # torch's are elements
        return tuple(tensor.stride())
    steps = getattr(tensor, "strides", None)
    if steps is None:
        return None
    if any(step % itemsize for step in steps):
        raise PlanError("strides are whole elements", got=f"{steps} bytes", want=f"multiples of {itemsize}")
    return tuple(step // itemsize for step in steps)

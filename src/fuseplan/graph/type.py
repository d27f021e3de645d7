"""The type of a graph's value: its shape, its dtype, and the names of its axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuseplan.errors import PlanError
from fuseplan.language.dtypes import DTYPES, STORED
from fuseplan.language.layouts import LAYOUTS
from fuseplan.language.tensor import TensorSpec
from fuseplan.messages.excerpt import shown
from fuseplan.tensors.arrays import is_torch

# NumPy's names of dtypes, and the words for them: those of plans, and others that frameworks have.
WORDS = STORED | {
    "uint64": "u64", "uint32": "u32", "uint16": "u16",
    "complex128": "c128", "complex64": "c64", "object": "str",
}  # fmt: skip
FLOATS = ("f64", "f32", "f16", "bf16")
QUANTIZED = ("i8", "u8")
_NUMPY = {word: name for name, word in WORDS.items()}
_TEXT = re.compile(r"(\w+|\?)(?:\[\s*(\?|[0-9x]*)\s*(?:,\s*([a-z]+)\s*)?\])?")


@dataclass(frozen=True)
class Type:
    """The type of a value.

    Attributes:
        shape: extents in logical order, any rank, 0 allowed; None where they are known at run time alone.
        dtype: `f32` and other words of plans; `i64`, `u8`, `bool`, `str` and others that frameworks have; `?`
            for a value that is no tensor.
        names: a letter for each axis, from the operator that made the value; empty where none told them.
    """

    shape: tuple[int, ...] | None
    dtype: str
    names: str = ""

    @property
    def rank(self) -> int:
        """Number of axes, of a known shape."""
        return len(self.shape or ())

    @property
    def size(self) -> int:
        """Number of elements, of a known shape."""
        return math.prod(self.shape or ())

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, of a known shape; of a text's elements, none."""
        return self.size * itemsize(self.dtype)

    @property
    def is_float(self) -> bool:
        """A tensor of known shape that formulas take: of 2-byte floats or larger ones."""
        return self.shape is not None and self.dtype in FLOATS

    @property
    def is_spec(self) -> bool:
        """Whether `spec` gives a tensor of plans: rank 2 to 5, no extent 0, a dtype of plans."""
        return self.is_float and self._is_plans

    @property
    def is_quantized(self) -> bool:
        """Whether `spec` gives a tensor of quantized numbers."""
        return self.dtype in QUANTIZED and self._is_plans

    @property
    def is_sum(self) -> bool:
        """Whether `spec` gives a tensor of sums of integers."""
        return self.dtype == "i32" and self._is_plans

    @property
    def _is_plans(self) -> bool:
        return self.rank in LAYOUTS and min(self.shape or (0,)) > 0

    def spec(self) -> TensorSpec:
        """The tensor that an operator of plans is given; a PlanError where a plan has no such tensor."""
        if self.shape is None:
            raise PlanError("the shape of this value is known at run time alone", got=str(self))
        return TensorSpec(self.shape, self.dtype, self.names or None)

    def __str__(self) -> str:
        if self.dtype == "?":
            return "?"
        extents = "?" if self.shape is None else "x".join(map(str, self.shape))
        return f"{self.dtype}[{extents}{self.names and ', ' + self.names}]"

    @classmethod
    def parse(cls, text: str) -> Type:
        """The type that a text writes: `f32[1x64x56x56, nchw]`, `i64[]`, `f32[?]`, `?`.

        Raises:
            PlanError: it writes none.
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None or (found[2] is None) != (found[1] == "?"):
            raise PlanError("this is not a value's type", got=shown(text), want="such as f32[1x64x56x56]")
        if found[1] == "?":
            return cls(None, "?")
        if not re.fullmatch(r"\?|(\d+(x\d+)*)?", found[2]):
            raise PlanError("an x separates extents", got=shown(text), want="such as f32[1x64]")
        shape = None if found[2] == "?" else tuple(int(each) for each in found[2].split("x") if each)
        return cls(shape, found[1], found[3] or "")


def is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's or a tensor of torch's."""
    return isinstance(value, np.ndarray) or is_torch(value)


def type_of(array: Any) -> Type:
    """The type of an array."""
    return Type(tuple(array.shape), word_of(array.dtype))


def types_of(values: Mapping[str, Any]) -> dict[str, Type]:
    """The types of values, of which types tell their own; `?` where a value is no array or tensor."""
    found = {name: type_of(each) for name, each in values.items() if is_array(each)}
    other = (each if isinstance(each, Type) else Type(None, "?") for each in values.values())
    return dict(zip(values, other, strict=True)) | found


def word_of(dtype: Any) -> str:
    """The word for a dtype of NumPy, ml_dtypes or torch."""
    if type(dtype).__module__ == "torch":
        return WORDS.get(str(dtype).removeprefix("torch."), str(dtype))
    name = np.dtype(dtype).name
    return "str" if np.dtype(dtype).kind in "US" else WORDS.get(name, name)


def numpy_dtype(word: str) -> np.dtype[Any]:
    """NumPy's dtype of a word; a PlanError where NumPy has none."""
    try:
        return np.dtype(_NUMPY.get(word, word))
    except TypeError:
        raise PlanError(f"NumPy has no dtype {shown(word)}") from None


def bits_of(word: str) -> np.dtype[Any]:
    """A dtype of as many bytes as an element's, which NumPy has for each word: it tells how elements lie."""
    return np.dtype(f"V{itemsize(word)}")


def itemsize(word: str) -> int:
    """Bytes of an element; 0 for texts and for values that are no tensors."""
    return (
        DTYPES[word].itemsize if word in DTYPES else 0 if word in ("str", "?") else numpy_dtype(word).itemsize
    )


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors have together, by NumPy's rule; a PlanError where there is none."""
    try:
        return np.broadcast_shapes(*map(tuple, shapes))
    except ValueError:
        told = " and ".join("x".join(map(str, shape)) or "a number" for shape in shapes)
        raise PlanError("the shapes do not go together", got=told) from None

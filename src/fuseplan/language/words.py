"""Random numbers that an element's index decides: Philox 4x32-10, a generator that keeps no state.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011. Arithmetic is that of words, whole
numbers of 32 bits; a backend has a row for each of WORDS in its table of scalar functions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from fuseplan.language.dtypes import narrow

W = TypeVar("W")

# Each function of words and the number of its arguments. `low` and `high` are the words of an index, `word`
# is the whole part of a number as an i32 has it, `bits` a constant; `mul_high` is the upper word of a
# product, `spread` the topmost bit in all places.
WORDS = {
    "low": 1, "high": 1, "word": 1, "bits": 1, "mul_low": 2, "mul_high": 2, "plus": 2, "xor": 2, "spread": 1,
}  # fmt: skip
_ROUNDS = 10
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_UNIT = float(np.float32(4.6566127342e-10))  # Triton's, about 2**-31
_MASK = 0xFFFFFFFF


def philox(table: Mapping[str, Callable[..., W]], counter: tuple[W, W, W, W], key: tuple[W, W]) -> W:
    """The first of the four words that Philox 4x32-10 makes of a counter and a key."""
    factors, steps = map(table["bits"], _FACTORS), [table["bits"](step) for step in _STEPS]
    first, second = factors
    a, b, c, d = counter
    for turn in range(_ROUNDS):
        if turn:
            key = table["plus"](key[0], steps[0]), table["plus"](key[1], steps[1])
        high, low = table["mul_high"](c, second), table["mul_low"](c, second)
        high_a, low_a = table["mul_high"](a, first), table["mul_low"](a, first)
        xor = table["xor"]
        a, b, c, d = xor(xor(high, b), key[0]), low, xor(xor(high_a, d), key[1]), low_a
    return a


def uniform(table: Mapping[str, Callable[..., Any]], index: Any, seed: Any, offset: Any) -> Any:
    """A number from 0 to 1 for an index and two words, rounded to f32 whatever the compute dtype is.

    It is that of Triton's `tl.rand(seed, index)` where `offset` is 0 and the index is below 2**32.
    """
    zero = table["bits"](0)
    drawn = philox(table, (table["low"](index), table["high"](index), offset, zero), (seed, zero))
    whole = table["number"](table["xor"](drawn, table["spread"](drawn)))
    return table["as_f32"](table["mul"](table["as_f32"](whole), table["const"](_UNIT)))


def random(table: Mapping[str, Callable[..., Any]], index: Any, seed: Any, offset: Any) -> Any:
    """The meaning of a scalar function `random`: `uniform` of the whole parts of two numbers."""
    return uniform(table, index, table["word"](seed), table["word"](offset))


def rows(whole: Callable[[Any], Any], word: Callable[[Any], Any]) -> dict[str, Callable[..., Any]]:
    """The meaning of the functions of WORDS, but for `bits`, for arrays of whole numbers of 64 bits.

    Args:
        whole: numbers of float64 as such.
        word: likewise, of their whole parts from -2**31 to 2**31 - 1; NaN is 0.
    """
    return {
        "low": lambda index: whole(index) & _MASK,
        "high": lambda index: (whole(index) >> 32) & _MASK,
        "word": lambda x: word(x) & _MASK,
        "mul_low": lambda x, y: (x * y) & _MASK,
        "mul_high": lambda x, y: ((x * y) >> 32) & _MASK,
        "plus": lambda x, y: (x + y) & _MASK,
        "xor": operator.xor,
        "spread": lambda x: (x >> 31) * _MASK,
    }


def _whole(x: Any) -> Any:
    return np.asarray(x).astype(np.int64).astype(np.uint64)


NUMPY_WORDS: dict[str, Callable[..., Any]] = {
    **rows(_whole, lambda x: _whole(narrow(np.asarray(x, np.float64), "i32"))),
    "bits": np.uint64,
    "number": lambda x: np.asarray(x, np.float64),
}

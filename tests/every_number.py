"""Every element of a dtype, and numbers that are hard to round to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.language.dtypes import DType, widen

Array = NDArray[Any]


def every_code(row: DType) -> Array:
    """All elements of a dtype of one or two bytes, as NumPy holds them; of the others, any."""
    if row.name == "bool":
        return np.arange(256) % 3 > 0
    if row.itemsize <= 2:
        return np.arange(1 << 8 * row.itemsize).astype(f"u{row.itemsize}").view(row.array)
    return np.random.default_rng(0).integers(-(2**31), 2**31, 4096).astype(row.array)


def exact_codes(row: DType) -> Array:
    with np.errstate(invalid="ignore"):  # of NaN that signal
        return np.asarray(widen(every_code(row), row.name).astype(np.float64))


def floats(row: DType) -> Array:
    """Numbers of every size, ties between neighbours, ends of the range, and what is none."""
    rng = np.random.default_rng(1)
    codes = exact_codes(row)
    known = np.sort(codes[np.isfinite(codes)])[:: max(1, codes.size // 4096)]
    ties = (known[1:] + known[:-1]) / 2
    spread = rng.standard_normal(50_000) * np.exp(rng.uniform(-20, 20, 50_000))
    beyond = row.largest * np.array([1.01, 1.1, 2, 1e6]) if row.name != "f64" else np.zeros(1)
    odd = [0.0, -0.0, math.inf, -math.inf, math.nan]
    return np.concatenate([spread, ties, ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), beyond, -beyond, odd])

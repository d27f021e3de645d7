"""How elements are stored, and what other packages call that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fuseplan.elsewhere import DTYPES as NAMED_ELSEWHERE
from fuseplan.errors import PlanError, near_miss
from fuseplan.excerpt import shown


@dataclass(frozen=True)
class DType:
    """The storage of an element: its bytes, and the distance from 1 to the next number."""

    name: str
    itemsize: int
    epsilon: float


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("f64", 8, 2.0**-52),
        DType("f32", 4, 2.0**-23),
        DType("f16", 2, 2.0**-10),
        DType("bf16", 2, 2.0**-7),
    )
}
STORED = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def dtype_of(name: str) -> DType:
    """The dtype of that name.

    Raises:
        PlanError: there is none.
    """
    if not isinstance(name, str) or name not in DTYPES:
        remedy = near_miss(str(name), DTYPES, NAMED_ELSEWHERE)
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
    name = _name(dtype)
    if stored and name == "uint16":
        return "bf16"
    if name not in STORED:
        raise PlanError(f"there is no dtype {shown(dtype)}", want=" ".join(DTYPES))
    return STORED[name]


def _name(dtype: object) -> str:
    """`float32`, as the package of a dtype writes it; empty for other things."""
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    found: Any = getattr(dtype, "dtype", dtype)  # jnp.float32 has a `dtype`
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        found = np.dtype(dtype)
    return found.name if isinstance(found, np.dtype) and found.isnative else ""


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

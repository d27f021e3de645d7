"""Between which numbers a formula of integers lies, and what holds sums of their products exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from fuseplan.language.dtypes import dtype_of
from fuseplan.language.indices import EXACT_IN_F32
from fuseplan.scalar import CASTS, Scalar, fold, leaves_of

Bounds = tuple[float, float]
EXACT_IN_I32 = 2**31
_ANY = (float("-inf"), float("inf"))


def _held(name: str) -> Callable[..., Bounds]:
    return lambda _: bounds_of(name)


_TABLE: dict[str, Callable[..., Bounds]] = defaultdict(
    lambda: lambda *_: _ANY,
    const=lambda x: (x, x),
    neg=lambda x: (-x[1], -x[0]),
    add=lambda x, y: (x[0] + y[0], x[1] + y[1]),
    sub=lambda x, y: (x[0] - y[1], x[1] - y[0]),
    **{fn: _held(name) for fn, name in CASTS.items()},
)


def bounds_of(dtype: str) -> Bounds:
    """The least and the largest integer of a dtype; of any other, none."""
    row = dtype_of(dtype)
    return _ANY if row.is_float else (row.least, row.largest)


def bounds_behind(formulas: Iterable[Scalar], src: str, dtypes: Mapping[str, str]) -> Bounds:
    """Between which numbers the last formula's value lies, each of `x`, the one before it, and operands.

    Args:
        src: the dtype of the first `x`.
        dtypes: of the operands, by key.
    """
    found = bounds_of(src)
    for each in formulas:
        known = {key: bounds_of(dtypes[key]) if key in dtypes else _ANY for key in leaves_of(each)}
        found = fold(each, known | {"x": found}, _TABLE)
    return found


def is_long(largest: float, written: str) -> bool:
    """Whether f32 does not do for sums of integers, which have 32 bits until they are computed with.

    Args:
        largest: absolute value of a sum.
        written: the dtype of the kernel's output.
    """
    return largest >= EXACT_IN_I32 or (largest > EXACT_IN_F32 and written == "i32")


def largest_sum(factor: Bounds, weight: str, depth: int) -> float:
    """The largest absolute value of a sum of so many products."""
    return depth * max(map(abs, factor)) * max(map(abs, bounds_of(weight)))

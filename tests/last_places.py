"""Errors in units of the last place, and the arguments at which functions of one element are tried."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fuseplan.scalar import NUMPY

Array = NDArray[Any]

# What NumPy computes is the reference, and on doubles the interpreter's answer.
exact_numpy = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="NumPy 1.26 itself errs by up to 3 ulp of doubles"
)

DTYPES: dict[str, np.dtype[Any]] = {"float": np.dtype(np.float32), "double": np.dtype(np.float64)}

EDGES = (
    0.0, 5e-324, 1e-310, 2.2250738585072014e-308, 1e-45, 3e-45, 1e-40, 1.1754944e-38, 1e-20, 1e-8, 2**-24,
    2**-53, 0.125, 0.34657, 0.34658, 0.5, 0.5625, 0.70710677, 0.70710678, 0.99999994, 1.0, 1.0000001,
    1.4142135, 1.4142137, 2.0, 2.5, 3.0, 3.9, 3.95, 9.0, 9.02, 17.3, 18.0, 37.5, 87.33, 87.34, 88.37, 88.38,
    88.7228, 88.7229, 103.97, 103.98, 104.0, 709.43, 709.782, 709.783, 744.44, 745.13, 745.14, 2**23 + 1,
    2**24, 2**24 + 2, 2**52 + 1, 2**53, 1e20, 3.4028e38, 3.4028235e38, 1e300, 1.7976931348623157e308,
    math.inf,
)  # fmt: skip


def ulps(got: Array, want: Array) -> Array:
    """The distance of `got` from `want`, a wider type, in last places; infinite where a limit is missed."""
    info = np.finfo(got.dtype)
    with np.errstate(all="ignore"):
        nearest = want.astype(got.dtype)
        exponent = np.clip(np.frexp(want)[1], info.minexp + 1, info.maxexp) - info.nmant - 1
        distance = np.abs(got.astype(want.dtype) - want) / np.ldexp(want.dtype.type(1), exponent)
    is_same = (got == nearest) | (np.isnan(got) & np.isnan(nearest))
    limits = ~np.isfinite(got) | ~np.isfinite(want)
    return np.where(limits, np.where(is_same, 0.0, np.inf), distance).astype(np.float64)


def assert_within(bound: float, got: Array, want: Array, *arguments: Array) -> None:
    """Each element within `bound` ulp; of a zero the sign too."""
    error = ulps(got, want)
    worst = int(np.argmax(error))
    where = ", ".join(repr(argument[worst]) for argument in arguments)
    assert error[worst] <= bound, f"{error[worst]:.3f} ulp at ({where}): {got[worst]!r}, not {want[worst]!r}"
    flipped = np.flatnonzero((want == 0) & (np.signbit(got) != np.signbit(want)))
    assert not flipped.size, f"zero has the wrong sign at {[argument[flipped[0]] for argument in arguments]}"


def reference(name: str, x: Array) -> Array:
    """In float64 of floats, in long double of doubles; erf is torch's, as ours for doubles is libm's."""
    wide = np.float64 if x.dtype == np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        if name == "erf":
            return np.asarray(torch.erf(torch.from_numpy(x.astype(np.float64))).numpy()).astype(wide)
        return np.asarray(NUMPY[name](x.astype(wide)))


def edges(element: str) -> Array:
    """Limits, thresholds of every formula, their neighbours, and NaN."""
    with np.errstate(all="ignore"):
        positive = np.array(EDGES, np.float64).astype(DTYPES[element])
        near = np.concatenate([positive, np.nextafter(positive, 0, dtype=DTYPES[element])])
        near = np.concatenate([near, np.nextafter(positive, DTYPES[element].type(np.inf))])
    return np.concatenate([near, -near, [np.nan]]).astype(DTYPES[element])


def every_exponent() -> Array:
    """A million floats, evenly over all bit patterns: 2048 of each exponent and sign."""
    return np.arange(0, 1 << 32, 4093, dtype=np.uint64).astype(np.uint32).view(np.float32)


def doubles() -> Array:
    """Doubles over all bit patterns, and more of them where the functions change."""
    patterns = np.random.default_rng(0).integers(0, 1 << 64, 100_000, dtype=np.uint64, endpoint=False)
    ordinary = [
        np.linspace(low, high, 50_001) for low, high in ((-746, 711), (-40, 40), (-2, 2), (0.99, 1.01))
    ]
    return np.concatenate([patterns.view(np.float64), *ordinary])


def pairs(element: str) -> tuple[Array, Array]:
    """Every two of the edges."""
    x, y = np.meshgrid(edges(element), edges(element))
    return x.ravel(), y.ravel()


def powers(x: Array, y: Array) -> Array:
    """pow in float64 of floats, in long double of doubles."""
    wide = np.float64 if x.dtype == np.float32 else np.longdouble
    with np.errstate(all="ignore"):
        return np.asarray(np.power(x.astype(wide), y.astype(wide)))


def bases_and_exponents(element: str) -> tuple[Array, Array]:
    """Pairs whose power is spread over the type's range, also for bases very near 1, and negative bases."""
    generator, count = np.random.default_rng(1), 100_000
    info = np.finfo(DTYPES[element])
    lowest, highest = math.log(info.smallest_subnormal) - 2, math.log(info.max) + 2
    spread = generator.uniform(lowest, highest, count)
    logarithms = np.concatenate(
        [generator.uniform(lowest, highest, count), generator.uniform(-1e-3, 1e-3, count)]
    )
    with np.errstate(all="ignore"):
        x = np.exp(logarithms).astype(DTYPES[element])
        y = (np.tile(spread, 2) / np.log(x.astype(np.float64))).astype(DTYPES[element])
    integers = generator.integers(-60, 60, count).astype(DTYPES[element])
    negative = -np.exp(generator.uniform(-4, 4, count)).astype(DTYPES[element])
    return np.concatenate([x, negative]), np.concatenate([y, integers])

"""The transforms of Winograd's short convolutions, and their evaluation with few operations.

A tile of m x m outputs of an r x r kernel comes from n x n products, n = m + r - 1, instead of m x m x r x r:

    dst = A' [(G weight G') * (B' src B)] A

(Winograd, Arithmetic Complexity of Computations, 1980; Lavin and Gray, Fast Algorithms for Convolutional
Neural Networks, 2016). The matrices follow from m + 1 interpolation points and infinity (Toom and Cook),
and the points decide how far rounding errors grow. 0, +-sqrt(1/2), +-sqrt(2) cost what the textbook's 0,
+-1, +-2 cost and keep F(4x4, 3x3) a quarter of their error, about direct convolution's; F(2x2, 5x5) has the
same points. That good points
lie near 1, with their reciprocals, was found by Barabasz, Anderson, Soodhalter and Gregg (Error Analysis
and Improving the Accuracy of Winograd Convolution for Deep Neural Networks, ACM TOMS 46(4), 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import lcm, prod, sqrt
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

# By n; one less than n, since infinity is a point too.
POINTS = {4: (0.0, 1.0, -1.0), 6: (0.0, sqrt(1 / 2), -sqrt(1 / 2), sqrt(2), -sqrt(2))}
_WHOLE_POINTS = {4: POINTS[4], 6: (0.0, 1.0, -1.0, 2.0, -2.0)}

Matrix = NDArray[np.float64]


class Term(Protocol):
    """What a transform is evaluated on: vectors in registers, numbers, or a count of operations."""

    def __add__(self, other: Any, /) -> Any: ...

    def __sub__(self, other: Any, /) -> Any: ...

    def __mul__(self, factor: Any, /) -> Any: ...


T = TypeVar("T", bound=Term)
Fma = Callable[[T, float, T], T]  # fma(x, factor, y) = x * factor + y, rounded once


@dataclass(frozen=True)
class Transforms:
    """B' (`src`, n x n), G (`weight`, n x r), A' (`dst`, m x n) of F(m, r): m is `tile`, r is `taps`.

    Outputs are `divisor` times as large as they are.
    """

    tile: int
    taps: int
    src: Matrix
    weight: Matrix
    dst: Matrix
    divisor: int = 1

    @property
    def size(self) -> int:
        """Elements along one side of a transformed tile."""
        return self.tile + self.taps - 1

    @property
    def growth(self) -> float:
        """The most that |A'| (|G| |w| |G'| * |B'| |x| |B|) |A| can be where |x| <= 1 and sum |w| = 1."""
        rows = np.abs(self.src).sum(axis=1)
        return float((np.abs(self.dst) @ (rows[:, None] * np.abs(self.weight))).max() ** 2)

    @property
    def squared(self) -> tuple[tuple[float, ...], ...]:
        """The matrix that takes a weight's r * r taps to the n * n of G weight G'."""
        rows: list[list[float]] = np.kron(self.weight, self.weight).tolist()
        return tuple(map(tuple, rows))

    @property
    def most(self) -> tuple[float, float]:
        """How much larger than src's and the weight's numbers those are that are multiplied, at most."""
        src, weight = (np.abs(matrix).sum(axis=1).max() ** 2 for matrix in (self.src, self.weight))
        return float(src), float(weight)


@cache
def whole(tile: int, taps: int = 3) -> Transforms:
    """The transforms of integers, by whole numbers: rows of G are multiplied, and columns of A' make up."""
    made = transforms(tile, taps, _WHOLE_POINTS[tile + taps - 1])
    scales = [round(1 / min(abs(row[row != 0]))) for row in made.weight]
    common = lcm(*scales)
    weight = np.round(made.weight * np.array(scales)[:, None])
    dst = np.round(made.dst * (common / np.array(scales)))
    return replace(made, weight=weight, dst=dst, divisor=common**2)


@cache
def transforms(tile: int, taps: int = 3, points: tuple[float, ...] = ()) -> Transforms:
    """The transforms of F(tile, taps)."""
    n = tile + taps - 1
    points = points or POINTS[n]
    src, weight, dst = np.zeros((n, n)), np.zeros((n, taps)), np.zeros((tile, n))
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        src[row, : n - 1] = np.poly(others)[::-1]
        weight[row] = [point**power / prod(point - other for other in others) for power in range(taps)]
        dst[:, row] = [point**power for power in range(tile)]
    src[n - 1] = np.poly(points)[::-1]
    weight[n - 1, taps - 1] = dst[tile - 1, n - 1] = 1
    return Transforms(tile, taps, _tidied(src), weight, _tidied(dst))


def power_of_two(number: int) -> int:
    """How often 2 divides it."""
    return (number & -number).bit_length() - 1


def _tidied(matrix: Matrix) -> Matrix:
    """Squares of the points are whole numbers and halves; what rounding left costs operations."""
    near = np.round(matrix * 64) / 64
    return np.where(np.abs(matrix - near) < 1e-12, near, matrix) + 0.0


# ---- evaluation


def rows_of(matrix: Matrix, xs: Sequence[T | None], rows: Sequence[int], fma: Fma[T]) -> list[T]:
    """The given rows of matrix @ xs.

    Rows of opposite points are an even part plus and minus an odd one: where both are wanted, one after the
    other, they share the parts. An x that no wanted row needs may be None.
    """
    found: list[T] = []
    while len(found) < len(rows):
        first, *second = matrix[rows[len(found) : len(found) + 2]]
        if second and _are_opposite(first, second[0]):
            found += _plus_minus(first, second[0], xs, fma)
        else:
            found.append(_combined(first, xs, fma))
    return found


def _are_opposite(first: Matrix, second: Matrix) -> bool:
    return bool(np.isclose(abs(first), abs(second)).all() and not np.isclose(first, second).all())


def _plus_minus(first: Matrix, second: Matrix, xs: Sequence[T | None], fma: Fma[T]) -> list[T]:
    """first @ xs and second @ xs: even + factor * odd and even - factor * odd."""
    odd_part = np.where(np.isclose(first, -second), first, 0.0)
    factor = float(odd_part[np.flatnonzero(odd_part)[-1]])
    even = _combined(first - odd_part, xs, fma)
    odd = _combined(_tidied(odd_part / factor), xs, fma)
    return [_added(even, odd, factor, fma), _added(even, odd, -factor, fma)]


def columns_of(matrix: Matrix, xs: Sequence[T], fma: Fma[T]) -> list[T]:
    """matrix @ xs where columns of opposite points differ in the sign of odd rows: their sums come first."""
    last = matrix.shape[1] - 1
    even: list[T | None] = [xs[0], *[None] * (last - 1), xs[last]]
    odd = list(even)
    for i in range(1, last, 2):
        even[i], odd[i] = xs[i] + xs[i + 1], xs[i] - xs[i + 1]
    folded = matrix.copy()
    folded[:, 2:last:2] = 0
    return [_combined(row, odd if power % 2 else even, fma) for power, row in enumerate(folded)]


def _combined(factors: Matrix, xs: Sequence[T | None], fma: Fma[T]) -> T:
    """sum of factors * xs, beginning with a factor of 1 where there is one: it costs nothing."""
    wanted = [(float(factor), x) for factor, x in zip(factors, xs, strict=True) if factor and x is not None]
    wanted.sort(key=lambda term: (term[0] != 1, abs(term[0]) != 1))
    factor, x = wanted[0]
    total: T = x if factor == 1 else x * factor
    for factor, x in wanted[1:]:
        total = _added(total, x, factor, fma)
    return total


def _added(total: T, x: T, factor: float, fma: Fma[T]) -> T:
    """total + factor * x."""
    if abs(factor) != 1:
        return fma(x, factor, total)
    added: T = total + x if factor > 0 else total - x
    return added


# ---- cost


class _Count:
    """Counts operations, and roundings on the longest way from an input; an inexact factor is one more."""

    operations = 0

    def __init__(self, roundings: int = 0) -> None:
        self.roundings = roundings

    def __add__(self, other: _Count) -> _Count:
        return self._made(max(self.roundings, other.roundings))

    __sub__ = __add__

    def __mul__(self, factor: float) -> _Count:
        return self._made(self.roundings + _is_inexact(factor))

    def fma(self, factor: float, other: _Count) -> _Count:
        return self._made(max(self.roundings + _is_inexact(factor), other.roundings))

    @staticmethod
    def _made(roundings: int) -> _Count:
        _Count.operations += 1
        return _Count(roundings + 1)


def _is_inexact(factor: float) -> bool:
    return float(np.float32(factor)) != factor


@dataclass(frozen=True)
class Cost:
    """Operations of one transform in one dimension, and the most roundings on a way through it."""

    src_operations: int
    src_roundings: int
    dst_operations: int
    dst_roundings: int


@cache
def cost(tile: int, taps: int = 3, is_whole: bool = False) -> Cost:
    """What the transforms of F(tile, taps) cost as they are evaluated here."""
    made = whole(tile, taps) if is_whole else transforms(tile, taps)
    xs = [_Count() for _ in range(made.size)]
    before = _Count.operations
    src = rows_of(made.src, xs, range(made.size), _Count.fma)
    between = _Count.operations
    dst = columns_of(made.dst, xs, _Count.fma)
    roundings = [max(value.roundings for value in values) for values in (src, dst)]
    return Cost(between - before, roundings[0], _Count.operations - between, roundings[1])

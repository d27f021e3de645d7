"""Numbers made of many elements: what an operator with statistics asks for, and a kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuseplan.scalar import NUMPY, Scalar, fold, text

KINDS = ("moments", "sums")


@dataclass(frozen=True)
class Reduction:
    """Numbers made of all elements of a channel, or of all images' elements at one place.

    Expressions are of one element: over `x`, which is what the prologue gives, keys of operands and
    parameters, and names of earlier reductions.

    Attributes:
        kind: `moments`: the mean of the one expression and the mean squared deviation from it; `sums`: the
            sum of each expression.
        names: what later expressions call the numbers: of moments the mean's and the variance's.
        expressions: what is reduced.
    """

    kind: str
    names: tuple[str, ...]
    expressions: tuple[Scalar, ...]

    @property
    def text(self) -> str:
        """All fields in one line."""
        return f"{', '.join(self.names)} = {self.kind} of {'; '.join(map(text, self.expressions))}"


def reduce(
    reduction: Reduction, leaves: Mapping[str, Any], shape: tuple[int, ...], axes: tuple[int, ...]
) -> dict[str, NDArray[np.float64]]:
    """The numbers of a reduction in float64, by name; the reduced axes stay, with extent 1.

    Args:
        reduction: what is reduced.
        leaves: what its expressions are over: float64 arrays that broadcast over `shape`.
        shape: extents of all elements.
        axes: over which is summed.
    """
    parts = [np.broadcast_to(fold(each, leaves, NUMPY), shape) for each in reduction.expressions]
    if reduction.kind == "sums":
        sums = [part.sum(axis=axes, keepdims=True) for part in parts]
        return dict(zip(reduction.names, sums, strict=True))
    mean = parts[0].mean(axis=axes, keepdims=True)
    variance = np.square(parts[0] - mean).mean(axis=axes, keepdims=True)
    return dict(zip(reduction.names, (mean, variance), strict=True))

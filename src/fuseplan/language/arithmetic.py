"""How tensors of one kind are computed with: a meaning is written once, for NumPy's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuseplan.scalar import NUMPY

# The float64 meaning of each function of `reduction.JOINS` over axes that stay with extent 1.
NUMPY_JOINS: dict[str, Callable[..., Any]] = {
    "add": np.add.reduce,
    "mul": np.multiply.reduce,
    "maximum": np.maximum.reduce,
    "minimum": np.minimum.reduce,
}


@dataclass(frozen=True, repr=False)
class Arithmetic:
    """What differs between kinds of tensors in the meaning of an operator.

    Attributes:
        of: the kind, in a word.
        table: the meaning of each scalar function; `const` makes a tensor of a number or of NumPy's array.
        joins: of each function that joins terms, over axes that stay with extent 1.
        broadcast: spreads a tensor over a shape.
        empty: makes a tensor of a shape.
        wide: a tensor in the dtype that is computed in.
        whole: a tensor of whole numbers as indices.
        own: a tensor that the caller may write into, where it was made of the arguments.
    """

    of: str
    table: Mapping[str, Callable[..., Any]]
    joins: Mapping[str, Callable[..., Any]]
    broadcast: Callable[..., Any]
    empty: Callable[[tuple[int, ...]], Any]
    wide: Callable[[Any], Any]
    whole: Callable[[Any], Any]
    own: Callable[[Any], Any]

    def __repr__(self) -> str:
        return f"<arithmetic of {self.of}>"

    def zeros(self, shape: tuple[int, ...]) -> Any:
        """A tensor of zeros."""
        made = self.empty(shape)
        made[...] = 0
        return made


ARRAYS = Arithmetic(
    "arrays",
    NUMPY,
    NUMPY_JOINS,
    np.broadcast_to,
    np.empty,
    wide=lambda array: np.asarray(array, np.float64),
    whole=lambda array: array.astype(np.int64),
    own=np.array,
)

"""An axis in parts: elements of one axis, some way apart, that one formula reads or makes together.

The leaves of such a formula are `x[0]`, `x[1]`, ..., the elements of src in part 0, 1, ... at one place, and
`cos[0]`, ... those of an operand. A gated product reads two parts and makes one; a rotation reads two and
makes two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuseplan.scalar import Scalar, fold, leaf, leaves_of


@dataclass(frozen=True)
class Split:
    """How the places of an axis stand together.

    Part i is the i-th run of `extent` elements. Interleaved, parts 2j and 2j + 1 are the even and the odd
    elements of the j-th run of 2 * extent; an axis of a single part is that part.

    Attributes:
        extent: elements of a part.
        reads: parts of src along the axis.
        makes: parts of dst, each with a formula of its own.
        interleaved: neighbours belong to two parts.
    """

    axis: int
    extent: int
    reads: int
    makes: int
    interleaved: bool = False

    def step(self, parts: int) -> int:
        """Elements from a place of a part to the next, where the axis has so many parts."""
        return 2 if self.interleaved and parts > 1 else 1

    def start(self, index: int, parts: int) -> int:
        """The first element of a part, where the axis has so many parts."""
        if self.step(parts) == 1:
            return index * self.extent
        return index // 2 * 2 * self.extent + index % 2

    def count(self, extent: int) -> int:
        """The parts of a tensor with that extent along the axis; 1 where it is no end of the split."""
        parts, rest = divmod(extent, self.extent)
        return parts if not rest and parts in (self.reads, self.makes) else 1

    def of(self, array: Any, index: int, parts: int) -> Any:
        """A part of an array, NumPy's or torch's: a view."""
        start, step = self.start(index, parts), self.step(parts)
        return array[(slice(None),) * self.axis + (slice(start, start + (self.extent - 1) * step + 1, step),)]

    @property
    def text(self) -> str:
        """All fields in one line."""
        order = "interleaved " if self.interleaved else ""
        return f"{self.reads} {order}parts of {self.extent} along axis {self.axis}, made into {self.makes}"

    def fill(
        self,
        dst: Any,
        formulas: Sequence[Scalar],
        leaves: Mapping[str, Any],
        meanings: Mapping[str, Callable[..., Any]],
    ) -> Any:
        """An array of dst's shape with the value of each formula in its part.

        Args:
            dst: takes the values; NumPy's or torch's, as all arrays here.
            formulas: one for each part that is made.
            leaves: whole arrays by name, `x` among them, each to be broadcast over src.
        """
        known = dict(leaves)
        for name in frozenset().union(*map(leaves_of, formulas)):
            key, index = part_of(name)
            if index is not None:
                own = self if key == "x" else Split(self.axis, self.extent, 1, 1)
                known[name] = own.of(leaves[key], index, self.reads)
        for index, formula in enumerate(formulas):
            self.of(dst, index, self.makes)[...] = fold(formula, known, meanings)
        return dst


def part(whole: Scalar, index: int) -> Scalar:
    """The leaf of part `index` of what another leaf names."""
    return leaf(f"{whole.args[0]}[{index}]")


def part_of(name: str) -> tuple[str, int | None]:
    """What a leaf's name names, and its part: `x[1]` is part 1 of x, and `x` is x."""
    key, _, index = name.rstrip("]").partition("[")
    return key, int(index) if index else None

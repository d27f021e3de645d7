"""Numbers made of many elements: what an operator with statistics asks for, and a kernel computes."""

from __future__ import annotations

from dataclasses import dataclass

from fuseplan.scalar import Scalar, text

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

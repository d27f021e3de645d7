"""Sums and moments of tiles as text: of a program's elements, and of what the programs of a group found.

Moments are never differences of large sums. In a loop a lane's are Welford's ("Note on a method for
calculating corrected sums of squares and products", Technometrics 4, 1962). Elements at hand, and parts, are
put together around a guess of their common mean, whose error is taken out again: Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", The American Statistician 37, 1983.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseplan.backends.triton.text import Text


@dataclass
class Moments:
    """Names of parts' means, and of the sums of squares around them; `count`: elements of each part."""

    count: str
    mean: str
    square: str


class Welford:
    """Moments of each lane, element by element, in a loop."""

    def __init__(self, text: Text, shape: str, compute: str, is_cut: bool) -> None:
        self.text = text
        self.zeros = f"tl.zeros({shape}, {compute})"
        self.scalar = f"tl.full((), 0, {compute})"
        self.compute, self.is_cut = compute, is_cut
        self.held = Moments(text.name("count"), text.name("mean"), text.name("square"))

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is counted on."""
        return self.held.count, self.held.mean, self.held.square

    def begin(self, cut_shape: str) -> None:
        """Nothing yet; counts are of `cut_shape` where elements may be missing."""
        text, held = self.text, self.held
        text.line(
            f"{held.count} = tl.zeros({cut_shape}, {self.compute})"
            if self.is_cut
            else f"{held.count} = {self.scalar}"
        )
        text.line(f"{held.mean} = {self.zeros}", f"{held.square} = {self.zeros}")

    def take(self, value: str, exists: str) -> None:
        """One more element a lane, where it exists."""
        text, held = self.text, self.held
        if self.is_cut:
            text.line(f"{held.count} += tl.where({exists}, 1.0, 0.0)")
            share = text.let("share", f"1.0 / tl.maximum({held.count}, 1.0)")
            value = text.let("value", f"tl.where({exists}, {value}, {held.mean})")
        else:
            text.line(f"{held.count} += 1.0")
            share = text.let("share", f"1.0 / {held.count}")
        off = text.let("off", f"{value} - {held.mean}")
        text.line(f"{held.mean} += {off} * {share}", f"{held.square} += {off} * ({value} - {held.mean})")


def together(text: Text, parts: Moments, total: str, axis: int = 0) -> Moments:
    """The moments of parts along an axis as those of all: `total` elements."""
    back = "[:, None]" if axis else ""
    weighted = text.let("weighted", f"{parts.mean} * {parts.count}")
    guess = text.let("guess", f"tl.sum({weighted}, {axis}) / {total}")
    off = text.let("off", f"{parts.mean} - {guess}{back}")
    moved = text.let("moved", f"{off} * {parts.count}")
    first = text.let("first", f"tl.sum({moved}, {axis})")
    second = text.let("second", f"tl.sum({parts.square} + {moved} * {off}, {axis})")
    return around(text, guess, first, second, total)


def around(text: Text, guess: str, first: str, second: str, total: str) -> Moments:
    """The moments of `total` elements whose deviations from a guess, and their squares, have these sums."""
    mean = text.let("mean", f"{guess} + {first} / {total}")
    square = text.let("square", f"{second} - {first} * ({first} / {total})")
    return Moments(total, mean, square)


class Sums:
    """Sums of each lane."""

    def __init__(self, text: Text, shape: str, compute: str, count: int) -> None:
        self.text, self.zeros = text, f"tl.zeros({shape}, {compute})"
        self.held = [text.name("total") for _ in range(count)]

    def begin(self) -> None:
        """Nothing yet."""
        self.text.line(*(f"{name} = {self.zeros}" for name in self.held))

    def take(self, values: Sequence[str], exists: str) -> None:
        """One more element a lane, where it exists."""
        for name, value in zip(self.held, values, strict=True):
            self.text.line(f"{name} += {f'tl.where({exists}, {value}, 0.0)' if exists else value}")
